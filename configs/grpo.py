"""Plain GRPO, the baseline that VERL's shaping is compared with: correctness is the only reward.

    python -m launch.train --config=configs/grpo.py --workdir=runs/grpo --config.model.path=MODEL \\
        --config.data.task=files --config.data.files=train.jsonl

No shaping, no KL penalty, no entropy bonus, no penalty for the format. Hidden states are still
measured, so that both runs have the same curves; hidden_states.source=none leaves that out.
"""

from configs import default


def get_config():
    """The default without everything that it adds to GRPO."""
    config = default.get_config()
    config.shaping.target = "none"
    config.algorithms.loss.kl_coefficient = 0.0
    config.algorithms.loss.entropy_coefficient = 0.0
    config.rewards.mode = "mix"
    return config
