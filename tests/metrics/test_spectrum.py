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
from tests.cases import slow_after
from tests.metrics.flat import flat_metrics
from tests.oracles import metrics as oracle


@pytest.mark.slow  # compiles twelve windows twice
@pytest.mark.parametrize("name", list(cases()))
def test_both_methods_keep_their_accuracy(name):
    rows = cases()[name]
    gram, svd = errors(rows, "gram"), errors(rows, "svd")
    for key in ("ER", "ERV", "ERA", "beta"):
        assert gram[key] < 1e-3, (key, gram)
    assert svd["ER"] < 1e-5
    # Differences of values of which each is good for 1e-5.
    rank = metrics.effective_rank(rows, np.ones(len(rows), bool))
    for key in ("ERV", "ERA"):
        assert abs(svd[key] * svd[f"{key} is"]) < 1e-5 * rank


def beside_one_direction(share, num_rows=96, width=160):
    """Rows with one huge direction and all others `share` of it, as outlier features make them."""
    rng = np.random.default_rng(0)
    u = np.linalg.qr(rng.normal(size=(num_rows, num_rows)))[0]
    v = np.linalg.qr(rng.normal(size=(width, num_rows)))[0]
    sigma = np.full(num_rows, share)
    sigma[0] = 1.0
    return ((u * sigma) @ v.T * 99).astype(np.float32)


@pytest.mark.parametrize("share", slow_after(2, [1e-5, 1e-2, 1.2e-3, 8e-4, 3e-4]))
def test_gram_is_accurate_beside_one_huge_direction(share):
    states, mask = beside_one_direction(share), np.ones(96, bool)
    expected = oracle.effective_rank(states)
    actual = metrics.effective_rank(states, mask, method="gram")
    np.testing.assert_allclose(actual, expected, rtol=1e-3)  # documented; float32 alone: 90 % off
    measured = flat_metrics(states[None], mask[None], stride=24, names=("traditional_rank",))
    assert measured["traditional_rank"][0] == oracle.traditional_rank(states)


@pytest.mark.parametrize("shape", [(45, 40), *slow_after(0, [((20, 30),)])])
def test_svd_is_accurate_beside_a_huge_column(shape):
    # ER and its logarithm have errors below 1e-5. Nearly all of the logarithm comes from the other
    # columns: at 3e7, Gram matrices in float64 lose 6e-5 of ER and 28 % of the logarithm.
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mask = np.ones(len(rows), bool)
    measure = jax.jit(functools.partial(metrics.rank_dynamics, stride=len(rows) // 3))
    for factor in (1e3, 1e5, 3e7, 1e9):
        states = rows * np.append(np.float32(factor), np.ones(shape[1] - 1, np.float32))
        found = measure(states, mask)
        expected = oracle.effective_rank(states)
        np.testing.assert_allclose(found.effective_rank, expected, rtol=1e-5)
        logarithm = metrics.log_effective_rank(states, mask)
        np.testing.assert_allclose(logarithm, oracle.log_effective_rank(states), rtol=1e-5)
        series = oracle.series(oracle.effective_rank, states, len(rows) // 3, "exact")
        np.testing.assert_allclose(found[1:3], oracle.orders(series), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("side_by_side", [pytest.param(False, marks=pytest.mark.slow), True])
def test_metrics_run_inside_the_callers_shard_map(side_by_side):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    states = np.random.default_rng(0).normal(size=(4, 16, 20)).astype(np.float32)
    states[3] = beside_one_direction(3e-4, 16, 20)  # float64 on one device alone
    mask = np.ones((4, 16), bool)
    rows = jax.sharding.PartitionSpec("data")
    measure = functools.partial(
        flat_metrics, stride=8, orders=("effective_rank",), method="gram",
        side_by_side=side_by_side,
    )  # fmt: skip
    sharded = jax.jit(jax.shard_map(measure, mesh=mesh, in_specs=(rows, rows), out_specs=rows))
    expected = measure(states, mask)
    for name, values in sharded(states, mask).items():
        # 1e-5: products of half the batch may round otherwise.
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=2e-5, err_msg=name)


def test_float64_is_taken_where_float32_does_not_resolve_and_only_there(monkeypatch):
    calls = decompositions(monkeypatch)
    for share, dtypes in ((1e-2, {"float32"}), (3e-4, {"float32", "float64"})):
        calls.clear()
        states, mask = beside_one_direction(share), np.ones(96, bool)
        # Not the compiled one of another test: the patched solver must be traced.
        jax.block_until_ready(metrics.rank_dynamics(states, mask, stride=40, method="gram"))
        jax.effects_barrier()
        assert {dtype for dtype, _ in calls} == dtypes
        sizes = [size for dtype, size in calls if dtype == max(dtypes)]
        assert sorted(sizes) == [40, 80, 96]
        if len(dtypes) == 2:  # the whole response is unresolved, so no window is decomposed
            assert [size for dtype, size in calls if dtype == "float32"] == [96]


def test_a_window_that_is_the_whole_response_is_not_decomposed_again(monkeypatch):
    calls = decompositions(monkeypatch)
    states = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    for num_tokens, sizes in ((40, [8, 16, 24, 32, 40]), (24, [8, 16, 40]), (25, [8, 16, 24, 40])):
        calls.clear()
        mask = np.arange(40) < num_tokens
        measured = metrics.rank_dynamics(states, mask, stride=8)
        rows = states[:num_tokens]
        values = oracle.series(oracle.effective_rank, rows, 8, "exact")
        expected = oracle.effective_rank(rows), *oracle.orders(values)
        np.testing.assert_allclose(measured, expected, rtol=2e-5, atol=1e-4)
        jax.effects_barrier()
        assert sorted(size for _, size in calls) == sizes  # the whole one is padded to 40


def decompositions(monkeypatch):
    """A list that gets the dtype and the size of every decomposition that runs from here on."""
    calls, solver = [], spectrum.symmetric_eigenvalues

    def recorded(gram, active):
        def record(active):
            if active:
                calls.append((str(gram.dtype), gram.shape[0]))

        jax.debug.callback(record, active)
        return solver(gram, active)

    monkeypatch.setattr(spectrum, "symmetric_eigenvalues", recorded)
    spectrum.with_float64.cache_clear()
    return calls


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
    # A jaxlib without them takes twice as long, so a change must be noticed.
    assert eigenvalue_kernel(np.dtype(np.float32)) == "lapack_ssyevd_ffi"
    assert eigenvalue_kernel(np.dtype(np.float64)) == "lapack_dsyevd_ffi"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svd", pytest.param("gram", marks=pytest.mark.soak)])
def test_every_composition_gives_the_same_bits(method):
    # Float64 inside: vmap of a jitted function would round its constants to float32.
    states = np.random.default_rng(0).normal(size=(2, 14, 6)).astype(np.float32)
    mask = np.ones((2, 14), bool)
    one = functools.partial(metrics.rank_dynamics, stride=6, method=method)
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
    function = spectrum.with_float64
    before = function.cache_info()
    metrics.effective_rank(states * 2, mask)
    after = function.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)


def test_the_tail_of_a_response_takes_its_part_of_the_one_gram_matrix(monkeypatch):
    sizes = []
    original = spectrum.symmetric_product
    monkeypatch.setattr(
        spectrum, "symmetric_product", lambda rows: sizes.append(rows.shape) or original(rows)
    )
    states = np.random.default_rng(0).normal(size=(530, 531)).astype(np.float32)
    jax.jit(functools.partial(metrics.rank_dynamics, stride=200, window="release")).lower(
        states, np.ones(530, bool)
    )
    assert sizes[0] == (530, 531)
    assert sizes[1:] == [(265, 531)] * 2  # its halves


def test_a_product_of_halves_is_the_product():
    rows = np.random.default_rng(0).normal(size=(801, 7)).astype(np.float32)
    product = np.asarray(jax.jit(spectrum.symmetric_product)(rows))
    exact = rows.astype(np.float64)
    # 2e-6 of the largest entry: sums of seven float32 products.
    np.testing.assert_allclose(product, exact @ exact.T, rtol=0, atol=2e-6 * product.max())
    np.testing.assert_array_equal(product, product.T)


def test_prefixes_longer_than_the_width_add_to_one_scatter_matrix(monkeypatch):
    sizes = []
    original = spectrum.symmetric_product
    monkeypatch.setattr(
        spectrum, "symmetric_product", lambda rows: sizes.append(rows.shape) or original(rows)
    )
    states = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    measured = jax.jit(functools.partial(metrics.rank_dynamics, stride=10))(
        states, np.ones(60, bool)
    )
    values = oracle.series(oracle.effective_rank, states, 10, "exact")
    np.testing.assert_allclose(measured[1:3], oracle.orders(values), rtol=1e-4)
    # The first 8 rows, the whole, and each window the ten rows it adds.
    assert sizes.count((8, 8)) == 1 and sizes.count((8, 60)) == 1
    assert {shape[1] for shape in sizes} == {8, 60, 0, 10}


@pytest.mark.parametrize(
    "names", [pytest.param(("effective_rank",), marks=pytest.mark.soak), metrics.RELEASE_METRICS]
)
@pytest.mark.slow
def test_side_by_side_matches_one_after_the_other(names):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(4, 24, 40)).astype(np.float32)
    states[1] = beside_one_direction(3e-4, 24, 40)  # only this one needs float64
    states[2, 3] = np.nan
    mask = np.arange(24) < np.array([24, 24, 24, 7])[:, None]
    measure = functools.partial(flat_metrics, stride=5, names=names)
    expected, actual = measure(states, mask), measure(states, mask, side_by_side=True)
    for key in expected:
        # 1e-5: products of a batch round otherwise.
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5, atol=2e-5, err_msg=key)
    assert not actual["effective_rank_valid"][2]
    nested = jax.vmap(functools.partial(measure, side_by_side=True))(states[None], mask[None])
    np.testing.assert_allclose(nested["effective_rank"][0], expected["effective_rank"], rtol=1e-5)


def test_neighbours_that_need_float64_change_no_bit_of_a_response_beside_them():
    states = np.random.default_rng(0).normal(size=(3, 24, 40)).astype(np.float32)
    mask = np.ones((3, 24), bool)
    measure = functools.partial(
        flat_metrics, stride=10, names=("effective_rank",), side_by_side=True
    )
    without = measure(states, mask)
    states[1] = beside_one_direction(3e-4, 24, 40)
    beside = measure(states, mask)
    np.testing.assert_allclose(
        beside["effective_rank"][1], oracle.effective_rank(states[1]), rtol=1e-5
    )
    for name, values in without.items():
        np.testing.assert_array_equal(beside[name][::2], values[::2], err_msg=name)


@pytest.mark.slow
def test_side_by_side_decomposes_in_one_batch_on_accelerators():
    measure = functools.partial(
        flat_metrics, stride=8, names=("effective_rank",), side_by_side=True
    )
    shapes = jax.ShapeDtypeStruct((4, 24, 40), np.float32), jax.ShapeDtypeStruct((4, 24), bool)
    text = jax.jit(measure).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    solvers = [line for line in text.splitlines() if "cusolver_syevd" in line]
    assert solvers and all("tensor<4x" in line for line in solvers)
