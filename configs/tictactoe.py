"""A tiny policy plays Tic-Tac-Toe against random moves.

    python -m benchmarks.environment_learning tictactoe --seeds=0

The benchmark writes plays of random legal moves, fine-tunes a random model of 0.5 M parameters on
them, and trains with this config. An episode is a game; it is correct if the policy wins. On two
cores: ten minutes of fine-tuning, then 60 steps of 15 to 30 s; wins rise from 45 to 80 %.
"""

from configs import default


def get_config():
    """The default with the game, and sizes for two cores."""
    config = default.get_config()
    config.model.path = "runs/tictactoe/demonstrations/model"
    config.data.task = "environment"
    config.data.prompts_per_step = 16
    config.environment.name = "textarena:game=TicTacToe-v0:opponent=random"
    config.environment.max_turns = 5
    config.rollout.max_prompt_tokens = 256
    config.rollout.max_response_tokens = 512
    config.rollout.jax_max_batch = 128
    config.rollout.jax_chunk_tokens = 4  # a move has three tokens and an end
    config.metrics.stride = 2
    config.warm_start.num_steps = 0
    config.training.num_steps = 60
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 16
    )
    config.training.micro_batch_size = 16
    config.training.learning_rate = 3e-4
    config.training.learning_rate_warmup_steps = 5
    config.training.weight_decay = 0.0
    config.evaluation.every_steps = 10
    config.evaluation.num_problems = 128
    config.checkpoints.every_steps = 20
    return config
