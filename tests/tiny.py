"""A run small enough to repeat: a 1-layer policy, 4 prompts x 4 responses, a few steps."""

from configs import quickstart


def tiny_config():
    """The quickstart with sizes for a run of seconds on 8 forced devices."""
    config = quickstart.get_config()
    config.model.hidden_size = 32
    config.model.intermediate_size = 32
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.data.prompts_per_step = 4
    config.data.num_prompts = 6  # the second step reads into the next epoch
    config.rollout.group_size = 4
    config.rollout.jax_max_batch = 16
    config.warm_start.num_steps = 0  # random weights, unless a test sets it
    config.warm_start.num_demonstrations = 64
    config.warm_start.batch_size = 16
    config.training.num_steps = 3
    config.training.prompts_per_minibatch = 2
    config.training.micro_batch_size = 8
    config.training.learning_rate = 1e-2
    config.rewards.mode = "independent"
    config.rewards.num_workers = 1  # the start of one costs more than all grading
    config.evaluation.every_steps = 2
    config.evaluation.num_problems = 8
    config.checkpoints.every_steps = 1
    config.logging.rollouts_every_steps = 1
    config.logging.plot_every_steps = 0
    return config
