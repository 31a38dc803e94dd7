"""PPO with VERL on Mathstral-7B-v0.1 and MATH levels 3 to 5, template abel.

The data is that of grpo_mathstral_7b.py, which says how to prepare it.

    python -m launch.train --config=configs/verl/ppo_mathstral_7b.py \\
        --workdir=runs/ppo_mathstral_7b --config.rollout.addresses=HOST:PORT

Hardware: 4 devices of 80 GB, as the launcher's, and others for sampling. Not run here yet.
Published (one run, mean Pass@1 of 15 sets): 44.2 before, 52.3 with PPO, 54.1 with VERL.
"""

from configs.verl import grpo_mathstral_7b, ppo


def get_config():
    """The GRPO run's values with a critic."""
    return ppo.with_critic(grpo_mathstral_7b.get_config())
