"""The eigenvalue kernel, float64 inside float32 programs, and the accuracy of both methods."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.metrics import cases, errors
from semrl_jax import metrics
from semrl_jax.metrics import spectrum
from semrl_jax.metrics.spectrum import eigenvalue_kernel, symmetric_eigenvalues
from tests.oracles import metrics as oracle

# (ER, ERV, ERA). Where the smallest singular value is 1e-4 of the largest, those below 7e-4 are
# lost to float32: promised is 5e-2, and ERA, which is nearly zero there, says nothing.
GRAM = dict.fromkeys(cases(), (1e-3, 1e-3, 1e-3)) | {"sigma down to 1e-04": (5e-2, 5e-2, np.inf)}


@pytest.mark.slow  # compiles twelve windows twice
@pytest.mark.parametrize("name", list(GRAM))
def test_both_methods_keep_their_accuracy(name):
    rows = cases()[name]
    gram, svd = errors(rows, "gram"), errors(rows, "svd")
    for key, bound in zip(("ER", "ERV", "ERA"), GRAM[name]):
        assert gram[key] < bound, (key, gram)
    assert svd["ER"] < 1e-5
    # Differences of values of which each is good for 1e-5.
    assert abs(svd["ERA"] * svd["ERA is"]) < 1e-5 * metrics.effective_rank(
        rows, np.ones(len(rows), bool)
    )


def positive_matrix(size):
    rows = np.random.default_rng(0).normal(size=(size, 2 * size)).astype(np.float32)
    return rows @ rows.T


@pytest.mark.parametrize("kernel", ["lapack", "missing"])
def test_eigenvalues_come_without_vectors_where_the_kernel_exists(kernel, monkeypatch):
    if kernel == "missing":
        monkeypatch.setattr(spectrum, "lapack", None)
    gram = positive_matrix(24)
    calls = []
    original = spectrum._values_only
    monkeypatch.setattr(
        spectrum, "_values_only", lambda target, a: calls.append(target) or original(target, a)
    )
    actual = jax.jit(lambda a: symmetric_eigenvalues(a, jnp.bool_(True)))(gram)
    expected = np.linalg.eigvalsh(gram.astype(np.float64))[::-1]
    # 1e-6 of the largest: what a float32 reduction to tridiagonal form leaves.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * expected[0])
    assert set(calls) == ({"lapack_ssyevd_ffi"} if kernel == "lapack" else set())


def test_this_jaxlib_has_the_kernels():
    # A release of jaxlib without them is twice as slow: this says so.
    assert eigenvalue_kernel(np.dtype(np.float32)) == "lapack_ssyevd_ffi"
    assert eigenvalue_kernel(np.dtype(np.float64)) == "lapack_dsyevd_ffi"


@pytest.mark.parametrize("method", ["svd", pytest.param("gram", marks=pytest.mark.slow)])
def test_every_composition_gives_the_same_bits(method):
    # Float64 inside: vmap of a jitted function would round its constants to float32.
    states = np.random.default_rng(0).normal(size=(2, 14, 6)).astype(np.float32)
    mask = np.ones((2, 14), bool)
    one = functools.partial(metrics.rank_dynamics, stride=4, method=method)
    expected = jax.jit(jax.vmap(one))(states, mask)
    compositions = {
        "vmap of jit": jax.vmap(jax.jit(one)),
        "jit of vmap of jit": jax.jit(jax.vmap(jax.jit(one))),
        "jit of map": jax.jit(lambda *batch: jax.lax.map(lambda pair: one(*pair), batch)),
    }
    for name, composition in compositions.items():
        for a, b in zip(composition(states, mask), expected):
            np.testing.assert_array_equal(a, b, err_msg=name)
    with jax.enable_x64(True):
        for a, b in zip(jax.jit(jax.vmap(one))(states, mask), expected):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    alone = one(jnp.asarray(states[0]), jnp.asarray(mask[0]))
    np.testing.assert_allclose(alone, [field[0] for field in expected], rtol=1e-6, atol=1e-6)
    rank = oracle.effective_rank(states[0])
    np.testing.assert_allclose(alone.effective_rank, rank, rtol=1e-5)


def test_calls_outside_jit_compile_once():
    states, mask = jnp.ones((9, 4)), jnp.ones(9, bool)
    metrics.effective_rank(states, mask)
    function = spectrum.one_by_one
    before = function.cache_info()
    metrics.effective_rank(states * 2, mask)
    after = function.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)


def test_the_tail_of_a_response_takes_its_part_of_the_one_gram_matrix(monkeypatch):
    sizes = []
    original = spectrum._product
    monkeypatch.setattr(spectrum, "_product", lambda a, b: sizes.append(a.shape) or original(a, b))
    states = np.random.default_rng(0).normal(size=(530, 531)).astype(np.float32)
    jax.jit(functools.partial(metrics.rank_dynamics, stride=200, window="release")).lower(
        states, np.ones(530, bool)
    )
    assert sizes == [(530, 531)]
