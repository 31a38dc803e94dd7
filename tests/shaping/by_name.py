"""The functions of the room with metrics by name.

`<indicator>`, and `<indicator>_valid` where some are not valid.
"""

import numpy as np

from semrl_jax import shaping
from semrl_jax.metrics import Measurement, MetricKey


def records(flat):
    """The metrics as the functions take them; without a `<indicator>_valid` all are valid."""
    return {
        MetricKey.parse(name): Measurement(
            values, flat.get(f"{name}_valid", np.ones(np.shape(values), bool))
        )
        for name, values in flat.items()
        if not name.endswith("_valid")
    }


def metrics_of(era, erv, er, valid=True):
    """Metrics of the three indicators, each valid or not in all responses."""
    values = dict(zip(shaping.INDICATORS, np.asarray([era, erv, er], np.float32)))
    return values | {f"{name}_valid": np.full(len(era), valid) for name in shaping.INDICATORS}


def shape_advantages(advantages, metrics, mask, state, **options):
    return shaping.shape_advantages(advantages, records(metrics), mask, state, **options)


def reward_bonus(metrics, state, **options):
    return shaping.reward_bonus(records(metrics), state, **options)


def compute_signal(metrics, state, **options):
    return shaping.compute_signal(records(metrics), state, **options)


def update_shaping_state(state, metrics, **options):
    return shaping.update_shaping_state(state, records(metrics), **options)
