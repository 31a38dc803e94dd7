"""Sums over sequences, whether one lies in a row or several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.algorithms import sum_over_sequences, token_weights
from semrl_jax.training.packing import RowPlan, lay_out, take_values
from tests.training.test_packing import batch_of, mesh_of

summed = jax.jit(sum_over_sequences)
PLANS = {
    "one": {"micro_batch_size": 2},
    "packed": {"micro_batch_tokens": 24, "pack_sequences": True},
}


def test_sums_by_hand():
    values = jnp.array([[1, 2, 4, 8, jnp.nan], [3, jnp.inf, 5, 7, 1]], jnp.float32)
    ids = jnp.array([[1, 1, 2, 1, 0], [1, 0, 2, 3, 3]])
    np.testing.assert_array_equal(summed(values, ids), [[11, 11, 4, 11, 0], [3, 0, 5, 8, 8]])


def sequence_loss(logprobs, old, advantages, weights, sequence_ids):
    """Mean over responses of ratio * advantage, the ratio being the geometric mean of the tokens'.

    The sum over a response is one of token weights, which sum to 1 / number of responses.
    """
    mask = sequence_ids > 0
    difference = jnp.where(mask, logprobs, 0.0) - jnp.where(mask, old, 0.0)
    lengths = sum_over_sequences(jnp.ones_like(difference), sequence_ids)
    ratio = jnp.exp(sum_over_sequences(difference, sequence_ids) / jnp.maximum(lengths, 1.0))
    return -jnp.sum(weights * ratio * jnp.where(mask, advantages, 0.0))


loss_and_gradient = jax.jit(jax.value_and_grad(sequence_loss))


@pytest.mark.parametrize("name", PLANS)
@given(seed=st.integers(0, 2**31 - 1))
def test_padded_and_packed_rows_give_the_same_sums_and_gradients(name, seed):
    random = np.random.default_rng(seed)
    lengths = [(int(random.integers(1, 5)), int(random.integers(1, 17))) for _ in range(7)]
    masks = [random.random(response) < 0.7 for _, response in lengths]
    for own in masks:
        own[0] = True
    batch = batch_of([*lengths, (4, 16)], [*masks, None])  # so that shapes are few
    mask = batch.response_mask
    layout = lay_out(batch, RowPlan(mesh_of(1), **PLANS[name]))
    ids = layout.rows.sequence_ids
    in_slots = functools.partial(take_values, index=layout.tokens())
    # On padding and context anything.
    logprobs, old, advantages = (
        np.where(mask, random.normal(size=mask.shape), np.nan).astype(np.float32) for _ in range(3)
    )
    padded = summed(logprobs, mask.astype(np.int32))
    rows = np.stack([summed(*micro) for micro in zip(in_slots(logprobs), ids)])
    expected = np.where(mask, np.nansum(logprobs, axis=1, keepdims=True, dtype=np.float64), 0)
    for found in (padded, take_values(rows, layout.slots)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    weights = np.asarray(token_weights(jnp.asarray(mask), aggregation="response_mean"))
    arrays = (logprobs, old, advantages, weights)
    padded_loss, padded_gradient = loss_and_gradient(*arrays, mask.astype(np.int32))
    slots = zip(*map(in_slots, arrays), ids)
    losses, gradients = zip(*(loss_and_gradient(*micro) for micro in slots))
    ratios = [
        np.exp(np.mean(logprobs[row, own] - old[row, own], dtype=np.float64))
        for row, own in enumerate(mask)
    ]
    by_hand = -np.mean(
        [r * np.mean(advantages[row, mask[row]], dtype=np.float64) for row, r in enumerate(ratios)]
    )
    for found in (padded_loss, np.sum(losses)):
        np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-5)
    found = take_values(np.stack(gradients), layout.slots)
    np.testing.assert_allclose(found, padded_gradient, rtol=1e-4, atol=1e-6)
    assert not np.asarray(padded_gradient)[~mask].any()
