"""PPO with VERL on Llama-3.2-3B-Instruct and MATH levels 1 to 4, template abel.

The data is that of grpo_llama3_2_3b.py, which says how to prepare it.

    python -m launch.train --config=configs/verl/ppo_llama3_2_3b.py \\
        --workdir=runs/ppo_llama3_2_3b --config.rollout.addresses=HOST:PORT

Hardware: 4 devices of 80 GB, as the launcher's, and others for sampling. Not run here yet.
Published (one run, mean Pass@1 of 15 sets): 31.0 before, 40.1 with PPO, 41.9 with VERL.
"""

from configs.verl import grpo_llama3_2_3b, ppo


def get_config():
    """The GRPO run's values with a critic."""
    return ppo.with_critic(grpo_llama3_2_3b.get_config())
