"""A real language model on a laptop: SmolLM2-135M learns to use a calculator.

    python -m launch.prepare_model --name=smollm2-135m --output=runs/models/smollm2
    python -m benchmarks.tool_learning --seeds=0

The benchmark writes demonstrations, fine-tunes the model on them, and trains with this config. An
episode is a problem such as "What is 4821 * 77?", calls of the calculator, and an answer.

Hardware: 2 CPU cores, about 5 GiB.
"""

from configs import default


def get_config():
    """The default with the environment, and sizes for a model of 135 M parameters on a CPU."""
    config = default.get_config()
    config.model.path = "runs/tool_learning/demonstrations/model"
    config.data.task = "environment"
    config.environment.name = "calculator:digits=4:terms=2"
    config.environment.max_turns = 3
    config.data.prompts_per_step = 8
    config.rollout.max_prompt_tokens = 256
    config.rollout.max_response_tokens = 128
    config.metrics.stride = 4
    config.training.num_steps = 20
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 8
    )
    config.training.micro_batch_size = 4
    config.training.learning_rate = 1e-5
    config.training.weight_decay = 0.0
    config.algorithms.loss.kl_coefficient = 0.0
    config.evaluation.num_problems = 64
    config.evaluation.every_steps = 5
    config.checkpoints.every_steps = 10
    config.logging.plot_every_steps = 0
    return config
