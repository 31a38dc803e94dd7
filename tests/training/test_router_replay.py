"""Router replay in the trainer: tokens go to the experts that an engine chose.

The oracle is a pass over each sequence by itself, without padding, rows or micro-batches;
`tests/models/test_experts.py` compares given experts with a loop.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.models.attention import BRANCHES
from semrl_jax.training.packing import RowPlan, lay_out
from semrl_jax.training.policy_update import batch_logprobs
from tests.training.test_mesh import assert_near
from tests.training.test_update import (
    PLANS,
    SHARED,
    make_batch,
    make_values,
    mixture_of,
    plan_of,
    update,
)

CONFIG = mixture_of(num_layers=2)
POLICY = models.Policy(CONFIG)
NUM_LAYERS, CHOSEN, NUM_EXPERTS = CONFIG.routed_experts
UNKNOWN = 255


@functools.cache
def params():
    return POLICY.init(jax.random.key(0))


def sequences(batch):
    """Row, columns and inputs of each sequence."""
    for row, segments in enumerate(batch.segment_ids):
        columns = np.flatnonzero(segments)
        ids = jnp.asarray(batch.token_ids[row, columns])[None]
        yield row, columns, (ids, jnp.arange(len(columns))[None], jnp.ones_like(ids))


def routed(batch, experts):
    """The batch with these experts at its tokens."""
    experts = np.where((batch.segment_ids > 0)[:, :, None, None], experts, UNKNOWN)
    return batch._replace(routed_experts=experts.astype(np.uint8))


def chosen_by_routers(batch):
    found = np.zeros((*batch.token_ids.shape, NUM_LAYERS, CHOSEN), np.int32)
    for row, columns, inputs in sequences(batch):
        found[row, columns] = POLICY.prefill(params(), *inputs).experts[0]
    return found


def random_experts(batch, seed=3):
    """Some experts of each token, the same for equal prompts; a fifth are not known."""
    random = np.random.default_rng(seed)
    shape = *batch.token_ids.shape, NUM_LAYERS
    found = np.argsort(random.random((*shape, NUM_EXPERTS)), axis=-1)[..., :CHOSEN]
    found[random.random(shape) < 0.2] = UNKNOWN
    prompts = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    _, same = np.unique(batch.token_ids[:, :prompts], axis=0, return_inverse=True)
    for number in np.unique(same):
        found[same == number, :prompts] = found[same == number, :prompts][0]
    return found


def oracle(batch):
    """Log-probabilities [B, T] of each sequence by itself."""
    found = np.zeros(batch.response_mask.shape, np.float32)
    prompts = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    for row, columns, (ids, *others) in sequences(batch):
        experts = jnp.asarray(batch.routed_experts[row, columns])[None]
        states = POLICY.final_states(params(), ids, *others, experts=experts)[:, :-1]
        logprobs, _ = POLICY.token_logprobs(params(), states, ids[:, 1:], temperature=0.8)
        response = columns[columns >= prompts] - prompts
        found[row, response] = logprobs[0, -len(response) :]
    return np.where(batch.response_mask, found, 0)


def logprobs_of(batch, plan, policy=POLICY, params_=None, **options):
    own = params() if params_ is None else params_
    options = {"policy": policy, "temperature": 0.8, "plan": plan} | options
    return batch_logprobs(own, batch, **options).logprobs


@pytest.mark.slow
def test_replay_of_what_the_routers_choose_changes_no_bit():
    batch, plan = make_batch(), plan_of(PLANS["three rows"])
    again, values = routed(batch, chosen_by_routers(batch)), make_values(batch)
    np.testing.assert_array_equal(logprobs_of(again, plan, replays=True), logprobs_of(batch, plan))
    expected, _, scalars = update(POLICY, params(), batch, values, plan)
    actual, _, same = update(POLICY, params(), again, values, plan)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert scalars == same


@pytest.mark.slow
def test_rows_go_to_the_given_experts(monkeypatch):
    """Padded, packed and with shared prompts; the reference keeps its own experts."""
    values = make_values(SHARED)
    batch = routed(SHARED, random_experts(SHARED))
    expected = oracle(batch)
    plain = np.asarray(logprobs_of(batch, plan_of(PLANS["one row"])))  # of a reference
    np.testing.assert_array_equal(plain, logprobs_of(SHARED, plan_of(PLANS["one row"])))
    assert np.abs(plain - expected).max() > 0.05
    updated = None
    for name, is_shared in (("three rows", False), ("packed", False), ("packed, one row", True)):
        monkeypatch.setattr(models.Policy, "attention_columns", 1e9 * is_shared)
        plan = plan_of(PLANS[name])
        rows = lay_out(batch, plan, 1e9 * is_shared).rows
        assert (rows.segment_ids.max() > BRANCHES) == is_shared and rows.experts is None
        found = logprobs_of(batch, plan, replays=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        found, _, _ = update(POLICY, params(), batch, values, plan)
        updated = updated or found
        assert_near(found, updated, 1e-5)
    before = update(POLICY, params(), SHARED, values, plan_of(PLANS["three rows"]))[0]
    router = [tree["layers"]["router"]["kernel"] for tree in (params(), before, updated)]
    assert np.abs(router[2] - router[0]).max() > 1e-4  # it learns,
    assert np.abs(router[2] - router[1]).max() > 1e-4  # something else


AXES = [{"replica": 2}, {"fsdp": 2}, {"sequence": 2}, {"tensor": 2}, {"expert": 2}]


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"fsdp": 2, "sequence": 2, "expert": 2}, marks=pytest.mark.slow),
        *(pytest.param(axes, marks=pytest.mark.soak) for axes in AXES),
        pytest.param({"replica": 2, "sequence": 2, "tensor": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_mesh_changes_nothing_but_rounding(axes):
    batch = routed(make_batch(), random_experts(make_batch()))
    values, plan = make_values(batch), plan_of(PLANS["three rows"])
    expected, _, _ = update(POLICY, params(), batch, values, plan)
    shape = dict.fromkeys(models.AXES, 1) | axes
    mesh = models.make_mesh(shape, jax.devices()[: np.prod(list(shape.values()))])
    placed = jax.device_put(params(), models.parameter_shardings(params(), mesh))
    on_mesh = dataclasses.replace(POLICY, mesh=mesh, remat="dots")
    plan = RowPlan(mesh, micro_batch_tokens=16, pack_sequences=True)
    found = logprobs_of(batch, plan, on_mesh, placed, replays=True)
    np.testing.assert_allclose(found, oracle(batch), rtol=0, atol=5e-5)
    assert_near(update(on_mesh, placed, batch, values, plan)[0], expected, 1e-4)
