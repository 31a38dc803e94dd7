"""The quickstart with a replica in a second process: sampling and updates overlap.

The trainer keeps one core and leaves the other to the replica, which also computes the metrics. The
batch of each step is sampled with the weights of the step before. docs/ahead.md

    python -m launch.train --config=configs/quickstart_async.py --workdir=runs/quickstart_async

Hardware: 2 CPU cores, about 2.5 GiB.
"""

from configs import quickstart


def get_config():
    """The quickstart with a lag of one step."""
    config = quickstart.get_config()
    config.rollout.max_staleness = 1
    config.rollout.jax_processes = 1
    config.rollout.jax_process_cores = 1
    # Metrics on the replica: then both work about as long on a batch.
    config.metrics.placement = "rollout"
    return config
