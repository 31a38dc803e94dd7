"""Attention by blocks and around the ring against the plain product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax.models.attention import self_attention
from tests.models.test_sharding import mesh_of

ROWS, COLUMNS, HEADS, KV_HEADS, WIDTH = 2, 48, 4, 2, 8


@pytest.fixture(scope="module")
def places():
    """One row of two packed segments, one with padding on both sides."""
    segments = np.ones((ROWS, COLUMNS), np.int32)
    segments[0, 21:] = 2
    segments[1, :5] = segments[1, 40:] = 0
    positions = np.zeros_like(segments)
    for row in range(ROWS):
        for segment in (1, 2):
            columns = np.flatnonzero(segments[row] == segment)
            positions[row, columns] = np.arange(len(columns))
    return jnp.asarray(positions), jnp.asarray(segments)


@pytest.fixture(scope="module")
def arrays():
    """Queries, keys, values, and what the attended values are multiplied by for a gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [
        jax.random.normal(key, (ROWS, COLUMNS, n, WIDTH)) for key, n in zip(keys, heads)
    ]  # [B, S, n, H]


def outcome(places, arrays, window, **options):
    """Attended values of tokens, 0 at padding, and the three gradients."""
    positions, segments = places
    attend = self_attention(positions, segments, **options)
    counted = (segments != 0)[:, :, None, None]

    def loss(query, key, value, factor, window):
        attended = attend(query, key, value, window)
        counted_only = jnp.where(counted, attended, 0.0)
        return jnp.sum(counted_only * factor), (counted_only, jnp.all(jnp.isfinite(attended)))

    window = None if window is None else jnp.int32(window)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    gradients, (attended, finite) = gradient(*arrays, window)
    assert finite  # at padding too
    return attended, *gradients


# Sums of at most 48 products of numbers near 1, in another order: 100 float32 roundings of them.
ASSERT_CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
soak = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("window", "block", "mesh"),
    [
        (7, 20, None),  # the last block of 20 is padded
        (None, 8, (1, 1, 4, 1)),
        soak(None, 16, None),
        soak(7, 8, (1, 1, 4, 1)),
        soak(7, 16, (1, 1, 8, 1)),
        soak(None, 16, (1, 2, 2, 2)),
        slow(7, 16, (1, 2, 2, 2)),
        slow(None, 16, (1, 1, 1, 2)),  # blocks, and no ring
        slow(7, 16, (1, 1, 2, 4)),  # too few kv heads to split
        slow(None, 64, (2, 1, 3, 1)),  # one block a device
    ],
)
def test_blocks_and_ring_give_the_plain_attention_and_its_gradient(
    places, arrays, window, block, mesh
):
    mesh = mesh and mesh_of(*mesh)
    expected = outcome(places, arrays, window)
    actual = outcome(places, arrays, window, mesh=mesh, block=block)
    for got, want in zip(actual, expected):
        ASSERT_CLOSE(got, want)


@pytest.mark.parametrize(("block", "mesh"), [(None, None), (20, None), slow(16, (1, 2, 2, 2))])
def test_capped_scores_are_those_of_the_formula_with_its_gradient(places, arrays, block, mesh):
    """Scores s become c tanh(s / c), with c below most of them."""
    cap, window = 1.5, 7
    positions, segments = places
    counted = (segments != 0)[:, :, None, None]
    own = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (own & (distance >= 0) & (distance < window))[:, None]

    def loss(query, key, value, factor):
        key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
        scores = jnp.einsum("bqnh,bknh->bnqk", query, key) * WIDTH**-0.5
        scores = jnp.where(seen, cap * jnp.tanh(scores / cap), -1e30)
        attended = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), value)
        attended = jnp.where(counted, attended, 0.0)
        return jnp.sum(attended * factor), attended

    gradients, attended = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    options = {"block": block, "mesh": mesh and mesh_of(*mesh), "softcap": cap}
    actual = outcome(places, arrays, window, **options)
    for got, want in zip(actual, (attended, *gradients)):
        ASSERT_CLOSE(got, want)
    assert not np.allclose(actual[0], outcome(places, arrays, window)[0], atol=1e-2)


def test_blocks_that_no_query_sees_are_not_computed(arrays):
    """NaN in the values of later columns would reach earlier ones as 0 * NaN."""
    query, key, value, _ = arrays
    columns = jnp.broadcast_to(jnp.arange(COLUMNS), (ROWS, COLUMNS))
    attend = self_attention(columns, jnp.ones_like(columns), block=16)
    attended = attend(query, key, value.at[:, 32:].set(jnp.nan), None)
    assert np.isfinite(attended[:, :32]).all()
    assert np.isnan(attended[:, 32:]).all()


def gradient_bytes(length, **options):
    """Temporary memory of the compiled gradient, on one device."""
    places = jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), jnp.int32)
    attend = self_attention(*places, **options)

    def loss(query, key, value):
        return jnp.sum(attend(query, key, value, None) ** 2)

    shapes = [jax.ShapeDtypeStruct((1, length, n, WIDTH), jnp.float32) for n in (4, 2, 2)]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_blocks_is_linear_in_the_length():
    """The memory is also below one [N, S, S] array of scores, which the plain product holds."""
    short, long = (gradient_bytes(n, block=64) for n in (512, 2048))
    assert long < 4.5 * short
    assert long < 4 * 2048 * 2048 * 4 / 8
    assert gradient_bytes(2048, block=0) > 4 * 2048 * 2048 * 4


@pytest.mark.slow
def test_ring_holds_a_share_of_the_sequence():
    """The memory of each device is linear in its own columns: with 8 devices, below 2/8."""
    whole = gradient_bytes(4096, block=64)
    split = gradient_bytes(4096, mesh=mesh_of(1, 1, 8, 1), block=64)
    # Keys, values and their gradients travel in a second copy.
    assert split < 2 * whole / 8 + 2**18


def test_bfloat16_blocks_keep_float32_sums(places, arrays):
    check_bfloat16(places, arrays, block=16)


def check_bfloat16(places, arrays, **options):
    exact = outcome(places, arrays, None)
    rounded = [x.astype(jnp.bfloat16) for x in arrays]
    attended, *gradients = outcome(places, rounded, None, **options)
    assert attended.dtype == jnp.bfloat16
    # Inputs, scaled queries, weights and results are rounded at 2^-8 each.
    for got, want in zip((attended, *gradients), exact):
        error = np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max()
        assert error < 4 * 2**-8
