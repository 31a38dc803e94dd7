"""PPO with VERL on Qwen2.5-7B and MATH levels 3 to 5, template qwen-boxed.

The data is that of grpo_qwen2_5_7b.py, which says how to prepare it.

    python -m launch.train --config=configs/verl/ppo_qwen2_5_7b.py \\
        --workdir=runs/ppo_qwen2_5_7b --config.rollout.addresses=HOST:PORT

Hardware: 4 devices of 80 GB, as the launcher's, and others for sampling. Not run here yet.
Published (one run, mean Pass@1 of 15 sets): 53.6 before, 57.9 with PPO, 59.0 with VERL.
"""

from configs.verl import grpo_qwen2_5_7b, ppo


def get_config():
    """The GRPO run's values with a critic."""
    return ppo.with_critic(grpo_qwen2_5_7b.get_config())
