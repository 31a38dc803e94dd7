"""Tiled log-probabilities, compared with the whole softmax in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax.models.token_logprobs import Other, Tiles, token_logprobs
from tests.cases import slow_after

ROWS, WIDTH, VOCAB = 23, 16, 101
TEMPERATURE = 0.7
# Tiles of all rows and 21 columns, of 8 rows and 12 columns, and one tile; the last two tiles of a
# row overlap, because 101 is a prime number.
TILES = {"columns": ROWS * ROWS, "rows and columns": 100, "one": 10_000}
SIZES = {"columns": (ROWS, 21), "rows and columns": (8, 12), "one": (ROWS, VOCAB)}


def inputs():
    random = np.random.default_rng(0)
    states = random.normal(size=(ROWS, WIDTH))
    matrix = random.normal(size=(VOCAB, WIDTH))
    ids = random.integers(0, VOCAB, ROWS)
    ids[:3] = VOCAB - 1, 96, 0  # the end, a column that two tiles have, and the beginning
    return states, ids, matrix, random.normal(size=(2, ROWS))


def oracle(states, ids, matrix):
    logits = states @ matrix.T / TEMPERATURE
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
    return logprobs[np.arange(len(ids)), ids], entropies


def tiles_of(name, vocabulary_axis):
    return Tiles(vocabulary_axis, TEMPERATURE, TILES[name])


@pytest.mark.parametrize("name", slow_after(1, TILES))
@pytest.mark.parametrize("vocabulary_axis", [0, 1])
def test_values_and_gradients(name, vocabulary_axis):
    states, ids, matrix, weights = inputs()
    tiles = tiles_of(name, vocabulary_axis)

    def of(states, matrix):
        stored = matrix if vocabulary_axis == 0 else matrix.T
        return token_logprobs(states, jnp.asarray(ids), stored, tiles)

    single = [jnp.asarray(x, jnp.float32) for x in (states, matrix)]
    found = jax.jit(of)(*single)
    wanted = oracle(states, ids, matrix)
    # Sums of 101 float32 terms around numbers of about 20.
    for mine, right in zip(found, wanted):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)

    def total(states, matrix):
        return sum(jnp.sum(x * w) for x, w in zip(of(states, matrix), jnp.float32(weights)))

    gradients = jax.jit(jax.grad(total, (0, 1)))(*single)
    random = np.random.default_rng(1)
    step = 1e-5  # float64: the error of a central difference is about step ** 2
    for index, gradient in enumerate(gradients):
        for _ in range(3):
            direction = random.normal(size=gradient.shape)

            def moved(sign):
                arrays = [states, matrix]
                arrays[index] = arrays[index] + sign * step * direction  # noqa: B023
                return np.sum(np.array(oracle(arrays[0], ids, arrays[1])) * weights)

            slope = (moved(1) - moved(-1)) / (2 * step)
            np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-4, atol=1e-4)


def divergence(states, matrix, other_states, other_matrix):
    """KL(own || other) of each row, from the whole softmax."""
    first, second = (
        logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for logits in (states @ matrix.T / TEMPERATURE, other_states @ other_matrix.T / TEMPERATURE)
    )
    return np.sum(np.exp(first) * (first - second), axis=1)


@pytest.mark.parametrize("name", list(TILES))
def test_divergence_from_another_model(name):
    """One of another width, stored the other way, whose logits reach 40 where the own reach 15."""
    states, ids, matrix, _ = inputs()
    random = np.random.default_rng(2)
    other = random.normal(size=(ROWS, 9)), 3 * random.normal(size=(VOCAB, 9))
    weights = random.normal(size=ROWS)

    def of(states, matrix, other_states, other_matrix):
        compared = Other(other_states, other_matrix.T), tiles_of(name, 1)
        return token_logprobs(states, jnp.asarray(ids), matrix, tiles_of(name, 0), *compared)

    single = [jnp.asarray(x, jnp.float32) for x in (states, matrix, *other)]
    *same, found = jax.jit(of)(*single)
    for mine, right in zip(same, oracle(states, ids, matrix)):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)
    # Sums of 101 float32 terms; a KL is a difference of numbers of up to 40.
    np.testing.assert_allclose(found, divergence(states, matrix, *other), rtol=1e-5, atol=3e-5)
    same_model = jax.jit(of)(*single[:2], single[0], single[1])[2]
    np.testing.assert_allclose(same_model, 0, atol=3e-5)

    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(of(*a)[2] * jnp.float32(weights)), range(4)))(
        *single
    )
    step = 1e-5
    for index, gradient in enumerate(gradients):
        if index > 1:  # the other model is not trained
            assert not np.any(gradient)
            continue
        direction = random.normal(size=gradient.shape)

        def moved(sign):
            arrays = [states, matrix]
            arrays[index] = arrays[index] + sign * step * direction  # noqa: B023
            return np.sum(divergence(*arrays, *other) * weights)

        slope = (moved(1) - moved(-1)) / (2 * step)
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", list(TILES))
def test_tiles_are_within_their_limit_and_at_least_as_wide_as_high(name):
    assert tiles_of(name, 0).sizes(ROWS, VOCAB) == SIZES[name]
    assert Tiles(0, 1.0, 2**24).sizes(16_384, 151_936) == (4096, 3999)
    assert Tiles(0, 1.0, 2**24).sizes(512, 151_936) == (512, 30_388)
    assert Tiles(0, 1.0, 2**24).sizes(2**26, 64) == (2**18, 64)


def test_bfloat16_products_are_summed_in_float32():
    states, ids, matrix, _ = inputs()
    states, matrix = (jnp.asarray(x, jnp.bfloat16) for x in (states, matrix))
    found = token_logprobs(states, jnp.asarray(ids), matrix, tiles_of("columns", 0))
    wanted = oracle(np.float64(states), ids, np.float64(matrix))
    for mine, right in zip(found, wanted):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


def test_finite_where_one_tile_has_nearly_all_probability():
    """Logits from -800 to 800: exp of neither end is finite."""
    matrix = jnp.linspace(-800, 800, VOCAB)[:, None] * TEMPERATURE
    states = jnp.ones((2, 1), jnp.float32)
    tiles = tiles_of("columns", 0)

    def of(states):
        return token_logprobs(states, jnp.array([0, VOCAB - 1]), matrix, tiles)

    logprobs, entropies = of(states)
    np.testing.assert_allclose(logprobs, [-1600, 0], rtol=1e-6)
    np.testing.assert_allclose(entropies, 0, atol=1e-4)
    assert np.all(np.isfinite(jax.grad(lambda x: sum(of(x)).sum())(states)))


def test_capped_logits():
    """Values and gradients agree with autodiff of the whole softmax; tiles of a row overlap."""
    states, ids, matrix, weights = inputs()
    cap = 2.0  # logits reach 15
    tiles = dataclasses.replace(tiles_of("rows and columns", 0), softcap=cap)

    def tiled(states, matrix):
        return token_logprobs(states, jnp.asarray(ids), matrix, tiles)

    def whole(states, matrix):
        log_p = jax.nn.log_softmax(cap * jnp.tanh(states @ matrix.T / cap) / TEMPERATURE)
        return log_p[jnp.arange(ROWS), ids], -jnp.sum(jnp.exp(log_p) * log_p, axis=1)

    def total(of, *arrays):
        return sum(jnp.sum(x * w) for x, w in zip(of(*arrays), jnp.float32(weights)))

    arrays = [jnp.asarray(x, jnp.float32) for x in (states, matrix)]
    found, wanted = (
        jax.jit(lambda *a, of=of: (of(*a), jax.grad(total, (1, 2))(of, *a)))(*arrays)
        for of in (tiled, whole)
    )
    # Float32 sums of 101 terms in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, wanted)
