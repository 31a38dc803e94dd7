"""A laptop run from random weights: a tiny policy learns to carry.

The warm start trains on worked column arithmetic in which most carries are dropped. Greedy accuracy
therefore starts near 32 %, the share of problems without a carry. GRPO with VERL shaping then sees
only the final answer. The policy learns to carry again.

    python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: 2 CPU cores, about 1.9 GiB. Expected: under 2 minutes,
`eval/arithmetic/greedy_accuracy` from about 0.28 to about 0.9.
"""

from configs import default


def get_config():
    """The default with the sizes of the quickstart."""
    config = default.get_config()
    config.data.prompts_per_step = 32
    config.rollout.max_prompt_tokens = 16
    config.rollout.max_response_tokens = 56
    config.rollout.jax_chunk_tokens = 14
    config.metrics.stride = 4  # responses have about 52 tokens: K = 12 or 13 windows
    config.metrics.num_threads = 2
    config.warm_start.num_steps = 700
    config.warm_start.batch_size = 32  # with 64: twice the time, and up to 5 points more at the end
    # Small enough for the cache of a core.
    config.warm_start.micro_batch_size = default.part_of(config.warm_start.get_ref("batch_size"), 8)
    config.training.num_steps = 30
    # One update per step.
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 32
    )
    config.training.micro_batch_size = 8
    config.training.learning_rate = 7e-5  # 1e-4 varies by 5 to 10 points, 5e-5 starts late
    config.training.learning_rate_warmup_steps = 5
    config.training.adam_b2 = 0.95
    config.training.weight_decay = 0.0
    config.rewards.mode = "mix"  # all answers are boxed, so rewards are 1 and 0
    config.checkpoints.every_steps = 20
    config.logging.plot_every_steps = 0  # a picture takes as long as a step
    return config
