"""A run whose rewards differ within groups, so that advantages, shaping and weights change."""

from tests.tiny import tiny_config


def get_config():
    config = tiny_config()
    config.training.num_steps = 6
    config.warm_start.num_steps = 250  # after these, some responses are boxed and others are not
    config.warm_start.learning_rate = 8e-3
    config.warm_start.num_demonstrations = 1000
    config.logging.plot_every_steps = 3
    return config
