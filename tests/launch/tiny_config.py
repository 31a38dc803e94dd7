"""The small run of tests/training as an experiment file: for one device, and with more steps."""

from tests.tiny import tiny_config


def get_config():
    config = tiny_config()
    config.training.num_steps = 6
    config.warm_start.num_steps = 12
    config.rewards.mode = "mix"
    return config
