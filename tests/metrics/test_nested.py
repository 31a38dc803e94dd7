"""Sums over the spectra of all prefixes, and what long responses take from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.metrics import nested, prefixes
from semrl_jax.metrics.metric import load_metric
from tests.cases import slow_after
from tests.metrics.flat import flat_metrics
from tests.oracles import metrics as oracle

FIRST, SIZE = 12, 40


@pytest.fixture(scope="module")
def sums():
    """Sums of prefixes of float64 rows [T, D], T <= 40; all use one compiled program."""
    compute = jax.jit(lambda *arrays: nested.prefix_sums(*arrays, FIRST))

    def of_rows(rows):
        padded = np.zeros((SIZE, rows.shape[1]))
        padded[: len(rows)] = rows
        with jax.enable_x64(True):
            gram = jnp.asarray(padded @ padded.T)
            found = compute(gram, jnp.int32(len(rows)), jnp.int32(rows.shape[1]))
            return jax.tree.map(np.asarray, found)

    return of_rows


def decaying(smallest, rows=SIZE, width=60):
    rng = np.random.default_rng(1)
    u = np.linalg.qr(rng.normal(size=(rows, rows)))[0]
    v = np.linalg.qr(rng.normal(size=(width, rows)))[0]
    return u * np.geomspace(1, smallest, rows) @ v.T


def cases():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(SIZE, 60))
    return {
        "fewer rows than columns": rows,
        "padded": rows[:31],
        "more rows than columns": rng.normal(size=(SIZE, 7)),
        "rank 3": rng.normal(size=(SIZE, 3)) @ rng.normal(size=(3, 60)),
        "repeated rows": rows[rng.integers(0, 9, SIZE)],
        "sigma down to 1e-2": decaying(1e-2),
        "sigma down to 1e-5": decaying(1e-5),
        "scaled": rows * 2.0**40,
    }


@pytest.mark.parametrize("name", list(cases()))
def test_sums_of_all_prefixes_are_those_of_their_singular_values(sums, name):
    rows = cases()[name]
    found = sums(rows)
    for size in range(FIRST, len(rows) + 1):
        sigma = oracle.singular_values(rows[:size])
        sigma = sigma[sigma > 1e-10 * sigma[0]]
        # The fit has errors of 1.4e-5 of sigma and 4.7e-5 of sigma log sigma, at a scale where the
        # largest eigenvalue of all rows is about 1; stopping early adds at most as much.
        np.testing.assert_allclose(found.total[size - 1], sigma.sum(), rtol=5e-5)
        unit = np.linalg.norm(rows - rows.mean(0), 2)
        weighted = (sigma / unit * np.log(sigma / unit)).sum()
        actual = found.weighted[size - 1] / unit - found.total[size - 1] / unit * np.log(unit)
        np.testing.assert_allclose(actual, weighted, atol=2e-4 * sigma.sum() / unit)
    assert (found.unresolved[FIRST:] <= prefixes.MAX_UNRESOLVED_SUM * found.total[FIRST:]).all()


def test_a_spectrum_below_the_fit_is_reported(sums):
    rows = decaying(1) @ np.diag(np.append(1, np.full(59, 7e-7)))
    found = sums(rows)
    assert (found.unresolved[-1] > prefixes.MAX_UNRESOLVED_SUM * found.total[-1]).all()


def test_zero_eigenvalues_and_equal_rows_add_nothing(sums):
    found = sums(np.zeros((SIZE, 60)))
    assert abs(found.total).max() < 1e-3


def test_the_fit_has_the_errors_that_are_stated():
    x = np.geomspace(nested.SMALLEST, nested.LARGEST, 5000)
    terms = np.column_stack([np.log1p(x[:, None] / np.array(nested.SHIFTS)), x])
    sigma = np.sqrt(x)
    targets = np.stack([sigma, sigma * np.log(sigma)], axis=1)
    errors = terms @ nested.fitted_weights() - targets
    errors = np.abs(errors / np.maximum(sigma, nested.RELATIVE_FROM)[:, None]).max(axis=0)
    assert (errors < [1.5e-5, 5e-5]).all(), errors


def test_contrasts_have_the_scatter_of_the_centred_rows():
    rows = np.random.default_rng(0).normal(size=(SIZE, 60)).astype(np.float32)
    found = np.asarray(nested._contrasts(jnp.asarray(rows)))
    for size in (2, 3, SIZE):
        centred = rows[:size] - rows[:size].mean(axis=0)
        contrasts = found[: size - 1]
        # 1e-4: sums of up to 40 products up to 16, in float32.
        np.testing.assert_allclose(contrasts.T @ contrasts, centred.T @ centred, atol=1e-4)


def test_the_largest_eigenvector_may_be_orthogonal_to_the_start_of_the_power_method():
    start = np.cos([0.0, 1.0])
    start /= np.linalg.norm(start)
    other = np.array([-start[1], start[0]])
    gram = np.outer(start, start) + 5 * np.outer(other, other)
    found = nested.POWER_MARGIN * float(nested._largest_eigenvalue(jnp.asarray(gram, jnp.float32)))
    assert 5 <= found <= nested.LARGEST * 5  # the power method alone finds 1


@pytest.mark.parametrize("side_by_side", slow_after(1, [False, True]))
@pytest.mark.parametrize("window", slow_after(1, ["exact", "release", "later"]))
def test_short_responses_have_the_orders_of_the_oracle(window, side_by_side):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(6, 40, 48)).astype(np.float32)
    mask = np.arange(40) < np.array([40, 33, 2, 1, 0, 40])[:, None]
    mask[1, ::5] = False
    states[5, 20:] = states[5, :20]  # of rank 19
    states[~mask] = np.nan
    (name,) = names = ("effective_rank",)
    found = flat_metrics(
        states, mask, stride=4, names=names, window=window, side_by_side=side_by_side
    )
    alone = flat_metrics(states[1:2], mask[1:2], stride=4, names=names, window=window)
    for i, valid in enumerate(mask):
        rows = states[i][valid].astype(np.float64)
        series = oracle.series(oracle.effective_rank, rows, 4, window)
        expected = [oracle.effective_rank(rows), *(x or 0.0 for x in oracle.orders(series))]
        orders = ("", "_velocity", "_acceleration")
        actual = [found[f"{name}{order}"][i] for order in orders]
        # 2e-5: the rounding of values that float32 just resolves.
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)
        if i == 1 and not side_by_side:
            # Up to rounding: JAX 0.11 multiplies six matrices in another order than one.
            of_one = [alone[f"{name}{order}"][0] for order in orders]
            np.testing.assert_allclose(actual, of_one, rtol=1e-6)


def test_products_that_float32_loses_are_not_summed():
    # Column 0 is a common offset, which centring removes. Relative to its square, products of the
    # other columns are about 4e-38, near the smallest normal float32 number.
    states = np.random.default_rng(0).normal(size=(1, 40, 48)) * 2e-19
    states[..., 0] = 1
    states = (states * 1e30).astype(np.float32)
    mask = np.ones((1, 40), bool)
    found = flat_metrics(states, mask, stride=2, names=("effective_rank",))
    expected = oracle.effective_rank(states[0])
    np.testing.assert_allclose(found["effective_rank"][0], expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("length", "width", "options", "expected"),
    [
        (1024, 3584, {}, 12),
        (512, 3584, {}, None),  # short
        (4096, 128, {}, None),  # D x D matrices are small
        (1024, 3584, {"method": "svd"}, None),
        (1024, 3584, {"stride": 400}, None),  # three windows
        (1024, 3584, {"name": "traditional_rank"}, None),
        (1024, 3584, {"centred": False}, None),
    ],
)
def test_sums_are_used_where_they_are_faster(length, width, options, expected):
    stride = options.get("stride", 40)
    sizes = tuple(range(stride, length + 1, stride))
    metric = load_metric(options.get("name", "effective_rank"))
    found = prefixes._num_short(
        length,
        width,
        method=options.get("method", "gram"),
        sizes=sizes,
        series_metrics=(metric,),
        centred=options.get("centred", True),
    )
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("side_by_side", [False, True])
def test_long_responses_have_the_orders_of_the_oracle(monkeypatch, side_by_side):
    monkeypatch.setattr(prefixes, "MAX_SHORT", 16)
    rng = np.random.default_rng(0)
    states = rng.normal(size=(5, 48, 40)).astype(np.float32)
    mask = np.arange(48) < np.array([48, 33, 16, 9, 48])[:, None]
    mask[1, ::5] = False
    # The sums cannot resolve directions this small next to column 0: they are decomposed.
    states[4] = states[4] * np.append(1, np.full(39, 3e-7)).astype(np.float32)
    states[~mask] = np.nan
    names = ("effective_rank", "curvature", "response_entropy")
    found = flat_metrics(
        states, mask, stride=2, names=names, orders=names[:1], side_by_side=side_by_side
    )
    for i, valid in enumerate(mask):
        rows = states[i][valid].astype(np.float64)
        series = oracle.series(oracle.effective_rank, rows, 2, "exact")
        expected = [oracle.effective_rank(rows), *oracle.orders(series)]
        orders = ("", "_velocity", "_acceleration")
        actual = [found[f"effective_rank{order}"][i] for order in orders]
        # 2e-4: 20 times the largest error of the sums at this size.
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-6)
        entropy = oracle.response_entropy(rows)
        np.testing.assert_allclose(found["response_entropy"][i], entropy, rtol=1e-3, atol=1e-6)
    assert len(metrics.window_sizes(48, 2, "exact")) == 24
