"""The quickstart with PPO: a critic instead of groups, one response per prompt.

    python -m launch.train --config=configs/quickstart_ppo.py --workdir=runs/quickstart_ppo

Hardware: 2 CPU cores, about 1 GiB. Expected: under 6 minutes, `eval/arithmetic/greedy_accuracy`
from about 0.29 to above 0.9.
"""

from configs import default, quickstart


def get_config():
    """The quickstart with as many responses per step, each to another prompt."""
    config = quickstart.get_config()
    config.algorithms.name = "ppo"
    config.data.prompts_per_step = 256
    config.rollout.group_size = 1
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 256
    )
    config.training.num_steps = 40
    config.critic.learning_rate = 1e-3
    return config
