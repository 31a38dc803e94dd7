"""Sums over the spectra of all prefixes, and what long responses take from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.metrics import nested, prefixes
from semrl_jax.metrics.metric import load_metric
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


@pytest.mark.parametrize(
    ("fit", "stated"), [(nested.WIDE, [1.5e-5, 5e-5]), (nested.NARROW, [1.6e-5, 1.6e-5])]
)
def test_a_fit_has_the_errors_that_are_stated(fit, stated):
    x = np.geomspace(fit.smallest, nested.LARGEST, 5000)
    terms = np.column_stack([np.log1p(x[:, None] / np.array(fit.shifts)), x])
    sigma = np.sqrt(x)
    targets = np.stack([sigma, sigma * np.log(sigma)], axis=1)
    errors = terms @ nested.fitted_weights(fit) - targets
    errors = np.abs(errors / np.maximum(sigma, fit.relative_from)[:, None]).max(axis=0)
    assert (errors < stated).all(), errors


@pytest.fixture(scope="module")
def narrow():
    """Float32 sums of prefixes of rows [T, D], T <= 40 <= D, and whether they are right."""
    compute = jax.jit(nested.narrow_sums, static_argnums=2)

    def of_rows(rows):
        padded = np.zeros((SIZE, rows.shape[1]))
        padded[: len(rows)] = rows
        gram = jnp.asarray(padded @ padded.T, jnp.float32)
        sums, is_narrow = compute(gram, jnp.int32(len(rows)), rows.shape[1])
        return jax.tree.map(lambda x: np.asarray(x, np.float64), sums), bool(is_narrow)

    return of_rows


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        # The fit has an error of 1.6e-5, the float32 matrix one of a few roundings of 6e-8.
        (np.random.default_rng(0).normal(size=(SIZE, 60)), 1.7e-5),
        (np.random.default_rng(0).normal(size=(31, 60)), 1.7e-5),
        (np.random.default_rng(0).normal(size=(2, 60)) * 2.0**40, 1.7e-5),
        (decaying(1e-1), 1.7e-5),
        # Rounding changes an eigenvalue of 1e-4 of the largest by 1e-3, one of 1.6e-5 by 6e-3.
        (decaying(1e-2), 3e-5),
        (decaying(4e-3), 3e-5),
    ],
)
def test_narrow_sums_of_all_prefixes_are_those_of_their_singular_values(narrow, rows, error):
    found, is_narrow = narrow(rows)
    assert is_narrow
    unit = np.linalg.norm(rows - rows.mean(0), 2)
    for size in range(2, len(rows) + 1):
        sigma = oracle.singular_values(rows[:size])[: size - 1]
        total, weighted = found.total[size - 1], found.weighted[size - 1]
        np.testing.assert_allclose(total, sigma.sum(), rtol=error)
        actual = (weighted - total * np.log(unit)) / unit
        expected = (sigma * np.log(sigma / unit)).sum() / unit
        np.testing.assert_allclose(actual, expected, atol=4 * error * sigma.sum() / unit)


def test_contrasts_have_the_scatter_of_the_centred_rows():
    rows = np.random.default_rng(0).normal(size=(SIZE, 60)).astype(np.float32)
    by_product = nested._contrasts_by_product(jnp.asarray(rows))
    by_sums = nested._contrasts_by_sums(jnp.asarray(rows))
    # Means of up to 40 rows in float32 have a few roundings of 6e-8 of entries up to 4.
    np.testing.assert_allclose(by_product, by_sums, atol=2e-6)
    for size in (2, 3, SIZE):
        centred = rows[:size] - rows[:size].mean(axis=0)
        contrasts = np.asarray(by_product)[: size - 1]
        np.testing.assert_allclose(contrasts.T @ contrasts, centred.T @ centred, atol=1e-4)


def test_the_largest_eigenvector_may_be_orthogonal_to_the_start_of_the_power_method(narrow):
    start = np.cos([0.0, 1.0])
    start /= np.linalg.norm(start)
    other = np.array([-start[1], start[0]])
    contrasts = np.array([[1, -1, 0], [0.5, 0.5, -1]]) * np.sqrt([[1 / 2], [2 / 3]])
    root = np.outer(start, start) + 5**0.5 * np.outer(other, other)
    rows = contrasts.T @ root @ np.eye(2, 8)
    found, is_narrow = narrow(rows)
    assert is_narrow
    # Without a second estimate the sum of sigma log sigma is wrong by 1e-2.
    np.testing.assert_allclose(found.total[2], 1 + 5**0.5, rtol=1.7e-5)
    np.testing.assert_allclose(found.weighted[2], 5**0.5 * np.log(5**0.5), rtol=5e-5)


def wide_cases():
    rows = cases()["padded"]
    return {
        "sigma down to 3e-3": decaying(3e-3),  # 9e-6 of the largest eigenvalue
        "a huge last row": np.append(rows, np.ones((1, 60)) * 1e3, axis=0),
        "rank 3": cases()["rank 3"],
        "repeated rows": cases()["repeated rows"],
        "two equal rows": np.append(rows, rows[:1], axis=0),
        "equal rows": np.ones((SIZE, 60)),
        "squares below the range of float32": rows * 1e-20,
        "one row": rows[:1],
        "no row": rows[:0],
    }


@pytest.mark.parametrize("name", list(wide_cases()))
def test_what_is_not_narrow_is_reported(narrow, name):
    assert not narrow(wide_cases()[name])[1]


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("window", ["exact", "release", "later"])
def test_short_responses_have_the_orders_of_the_oracle(window, side_by_side):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(6, 40, 48)).astype(np.float32)
    mask = np.arange(40) < np.array([40, 33, 2, 1, 0, 40])[:, None]
    mask[1, ::5] = False
    states[5, 20:] = states[5, :20]  # of rank 19: decomposed
    states[~mask] = np.nan
    (name,) = names = ("effective_rank",)
    found = flat_metrics(
        states, mask, stride=2, names=names, window=window, side_by_side=side_by_side
    )
    alone = flat_metrics(states[1:2], mask[1:2], stride=2, names=names, window=window)
    for i, valid in enumerate(mask):
        rows = states[i][valid].astype(np.float64)
        series = oracle.series(oracle.effective_rank, rows, 2, window)
        expected = [oracle.effective_rank(rows), *(x or 0.0 for x in oracle.orders(series))]
        orders = ("", "_velocity", "_acceleration")
        actual = [found[f"{name}{order}"][i] for order in orders]
        # 2e-5: slightly above the error of the fit.
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)
        if i == 1 and not side_by_side:
            assert actual == [alone[f"{name}{order}"][0] for order in orders]


def test_products_that_float32_loses_are_not_summed():
    # Beside a common offset, which centring removes: products near the end of the float32 range.
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
        (56, 128, {}, True),
        (56, 128, {"stride": 20}, False),  # two windows
        (56, 48, {}, False),  # more rows than directions
        (1024, 3584, {}, False),  # long
        (56, 128, {"method": "svd"}, False),
        (56, 128, {"name": "traditional_rank"}, False),
        (56, 128, {"centred": False}, False),
    ],
)
def test_narrow_sums_are_used_where_they_are_faster(length, width, options, expected):
    stride = options.get("stride", 4)
    sizes = tuple(range(stride, length + 1, stride))
    metrics = (load_metric(options.get("name", "effective_rank")),)
    assert expected == prefixes._sums_suffice(
        length,
        width,
        method=options.get("method", "gram"),
        sizes=sizes,
        measured=tuple(range(len(sizes))),
        value_metrics=metrics,
        series_metrics=metrics,
        centred=options.get("centred", True),
    )


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
        measured=tuple(range(len(sizes))),
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
    # Beside one huge direction the sums do not resolve the others: these are decomposed.
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
    assert metrics.count_windows(48, 2, "exact") == 24
