"""Updates of adapters: only they change, on every mesh alike, and the base is the reference."""

import functools

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models import peft
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.train_state import init_state
from tests.training.test_mesh import OPTIMIZER, TEMPERATURE, Case, recorded
from tests.training.updates import update_policy

ALGORITHM = Algorithm(grpo, grpo.Options(kl_coefficient=0.1))
RANK = 4


@functools.cache
def steps(sizes, dtype="float32"):
    """Adapters, scalars and log-probabilities of two updates, and what the device holds.

    The updates have dropout, whose masks are the same on every mesh.
    """
    case = Case(sizes)
    policy, mesh, (batch, advantages, _) = case.policy(), case.mesh(), recorded()
    frozen = jax.tree.map(lambda leaf: leaf.astype(dtype), policy.init(jax.random.key(0)))
    frozen = jax.device_put(frozen, models.parameter_shardings(frozen, mesh))
    before = jax.device_get(frozen)
    lora = models.Lora(peft.find_modules(policy.config, ["all-linear"]), RANK, 8.0)
    base = lora.base(frozen)
    state = init_state(lora.init(frozen, 0), OPTIMIZER, init_shaping_state(), mesh)
    settings = {"policy": policy, "temperature": TEMPERATURE, "plan": RowPlan(mesh, 8)}
    params, opt_state = state.params, state.optimizer
    found = []
    for number in range(2):
        params, opt_state, scalars, _ = update_policy(
            params, opt_state, batch, None, None, advantages, None, base,
            optimizer=OPTIMIZER, algorithm=ALGORITHM, number=number, dropout=0.1, **settings,
        )  # fmt: skip
        found.append(jax.device_get((params, scalars)))
    logprobs = batch_logprobs(models.adapted(params, base), batch, **settings).logprobs
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(frozen), before)
    return found, np.asarray(logprobs), params, opt_state, policy


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_base_is_the_reference():
    (first, second), _, params, opt_state, policy = steps((1, 1, 1, 1))
    # A new adapter is the reference; the compiler may round their passes differently.
    assert 0 <= first[1]["policy/kl"] < 1e-9
    assert first[1]["policy/grad_norm"] > 0
    assert second[1]["policy/kl"] > 1e-4
    for name, pair in second[0]["layers"].items():
        assert np.abs(pair["lora_b"]).max() > 1e-3, name
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state))
    of_adapters = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(policy.shapes()))
    assert num_bytes == 2 * of_adapters + 8  # two moments; two counts of updates
    assert of_adapters == 4 * peft.num_parameters(
        policy.config, models.Lora(tuple(params["layers"]), RANK, 8.0)
    )
    assert of_adapters < 4 * num_params


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 1, 2),
        *(pytest.param(s, marks=pytest.mark.soak) for s in ((2, 1, 2, 1), (1, 4, 1, 1))),
    ],
)
def test_a_mesh_changes_only_rounding(sizes):
    alone, expected, *_ = steps((1, 1, 1, 1))
    found, logprobs, params, _, policy = steps(sizes)
    for (own, scalars), (other, others) in zip(found, alone, strict=True):
        for name in ("policy/loss", "policy/kl", "policy/grad_norm"):
            np.testing.assert_allclose(scalars[name], others[name], rtol=1e-4, atol=1e-6)
        # Adam divides by the size of the gradient: rounding decides on tiny ones in step 1.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), own, other)
    np.testing.assert_allclose(logprobs, expected, atol=5e-3)
    # Else the next update would be compiled again, for the layout of this one's results.
    shardings = models.parameter_shardings(params, policy.mesh)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, shardings)
    assert all(jax.tree.leaves(same))


@pytest.mark.soak
def test_a_base_in_bfloat16():
    (first, _), *_ = steps((1, 1, 1, 1), "bfloat16")
    assert 0 <= first[1]["policy/kl"] < 1e-9
    assert first[0]["layers"]["up"]["lora_a"].dtype == np.float32
