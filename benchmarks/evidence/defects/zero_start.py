"""D3: baselines start at 0 and not at the mean of the first batch."""

import jax.numpy as jnp

from semrl_jax.algorithms import credit
from semrl_jax.shaping import update_shaping_state
from semrl_jax.training.probes import Probe


def update(state, *arrays, **options):
    begun = state._replace(baseline_set=jnp.ones_like(state.baseline_set))
    return update_shaping_state(begun, *arrays, **options)


def probe(tools):
    credit.update_shaping_state = update
    return Probe()
