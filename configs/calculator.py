"""A real language model on a laptop: SmolLM2-135M learns to use a calculator.

    python -m launch.prepare_model --name=smollm2-135m --output=runs/models/smollm2
    python -m benchmarks.environment_learning calculator --model=runs/models/smollm2

The benchmark writes demonstrations, fine-tunes the model on them, and trains with this config. An
episode is a problem such as "What is 4821 * 77?", calls of the calculator, and an answer.
"""

from configs import smollm2


def get_config():
    """The sizes of configs/smollm2.py, with the environment in place of the problems."""
    config = smollm2.get_config()
    config.model.path = "runs/calculator/demonstrations/model"
    config.data.task = "environment"
    config.data.reasoning_gym = ()
    config.data.template = "auto"
    config.rewards.function = ""
    config.environment.name = "calculator:digits=4:terms=2"
    config.environment.max_turns = 3
    config.rollout.max_prompt_tokens = 256
    config.rollout.max_response_tokens = 128
    config.training.num_steps = 15
    config.training.micro_batch_tokens = 1280  # a row of 8 episodes, with their prompt once
    config.evaluation.every_steps = 5
    config.checkpoints.every_steps = 10
    return config
