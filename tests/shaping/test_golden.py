"""The clipped bonus as the reference implementation applies it."""

import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import shaping
from tests.oracles import shaping as oracle
from tests.shaping import by_name


@pytest.mark.parametrize("release", [False, True])
def test_bonus_matches_the_recorded_one(golden, release):
    data = np.load(golden / "rl_losses.npz")
    mask = data["mask"].astype(bool)
    aux = data["aux"].astype(np.float64)
    # One indicator of weight 1 in both modes makes Phi = eta tanh(d); a baseline of 1 and the
    # metric 1 + artanh(aux / eta) give any Phi below eta.
    eta = 2 * float(np.abs(aux).max())
    values = (1 + np.arctanh(aux / eta)).astype(np.float32)
    state = shaping.init_shaping_state(("effective_rank",), guidance="effective_rank")
    by_rank = {
        "indicators": ("effective_rank",), "explore_weights": (1.0,), "exploit_weights": (1.0,),
        "guidance": "effective_rank",
    }  # fmt: skip
    ones = {"effective_rank": np.ones(1, np.float32)}
    state = by_name.update_shaping_state(state, ones, **by_rank)
    actual, _ = by_name.shape_advantages(
        jnp.asarray(data["grpo_advantages"]),
        {"effective_rank": values},
        jnp.asarray(mask),
        state,
        reproduce_release=release,
        eta=eta,
        kappa=2.0,
        **by_rank,
    )
    name = "last_token" if release else "all_tokens"
    # 1e-6: the hyperbolic tangent and its inverse, in float32.
    expected = np.where(mask, data[f"shaped_{name}_kappa2"], 0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    # The float64 loops too, which all other options are compared with.
    loops = oracle.shaped(data["grpo_advantages"], mask, aux, 2.0, release)
    np.testing.assert_allclose(loops, expected, rtol=1e-6, atol=1e-7)
