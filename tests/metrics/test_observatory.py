"""The metrics that the reference implementation lacks, against float64, and by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.metrics import MetricKey
from semrl_jax.metrics.kinds.matrix_entropy import metric_of_order, renyi_entropy
from semrl_jax.metrics.kinds.rankme import rankme_of
from semrl_jax.metrics.metric import load_metric
from tests.cases import raised
from tests.oracles import metrics as release
from tests.oracles import observatory as oracle

STRIDE = 3
LENGTHS = (11, 9, 7, 3, 2, 1, 0, 11)
SHAPE = (len(LENGTHS), 12, 6)


@pytest.fixture(scope="module")
def batch():
    """Responses on both sides of T = D, one with an offset and equal rows; NaN in the padding."""
    rng = np.random.default_rng(0)
    states = np.full(SHAPE, np.nan, np.float32)
    mask = np.zeros(SHAPE[:2], bool)
    for i, length in enumerate(LENGTHS):
        where = np.sort(rng.permutation(12)[:length]) if i == 0 else np.arange(length)
        states[i, where] = rng.normal(size=(length, 6)) * rng.uniform(0.3, 2, size=6) + 3 * (i == 1)
        mask[i, where] = True
    states[2, 4] = states[2, 1]  # equal rows
    states[7, 5] = 0.0  # a row without direction
    return states, mask


@pytest.fixture(scope="module")
def measured(batch):
    return metrics.hidden_state_metrics(
        *batch, stride=STRIDE, names=tuple(oracle.METRICS), method="svd"
    )


@pytest.mark.parametrize("name", oracle.METRICS)
def test_masked_responses_have_the_values_of_their_rows(batch, measured, name):
    metric, kind = oracle.METRICS[name], load_metric(name)
    for i, (states, mask) in enumerate(zip(*batch)):
        rows = states[mask]
        orders = release.orders(release.series(metric, rows, STRIDE, "exact"))
        for order, expected in zip(("value", "velocity", "acceleration"), (metric(rows), *orders)):
            found, valid = measured[MetricKey(name, order)]
            if order == "value":
                assert valid[i] == (len(rows) >= kind.min_tokens)
            # 1e-5: float32 sums of cosines and steps; the others are computed in float64. Orders
            # are differences of values of up to 10.
            np.testing.assert_allclose(found[i], expected or 0.0, rtol=2e-5, atol=2e-5, err_msg=i)


def test_a_response_with_a_broken_state_is_invalid_alone(batch, measured):
    states, mask = batch[0].copy(), batch[1]
    states[2, 3] = np.inf
    found = metrics.hidden_state_metrics(
        states, mask, stride=STRIDE, names=tuple(oracle.METRICS), method="svd"
    )
    for key, (value, valid) in found.items():
        assert not valid[2] and value[2] == 0.0, key
        others = np.arange(len(value)) != 2
        np.testing.assert_array_equal(value[others], measured[key].value[others])


# All without a decomposition, and one of the centred and of the uncentred spectrum.
FUNCTIONS = [name for name in oracle.METRICS if load_metric(name).of_states]
FUNCTIONS += ["stable_rank", "rankme"]


@jax.jit
def of_rows(states, mask):
    """Public functions of one response, in one program."""
    return {name: getattr(metrics, name)(states, mask) for name in FUNCTIONS}


def test_functions_of_one_response_agree(batch, measured):
    for i in (0, 1, 4, 6):
        for name, value in of_rows(batch[0][i], batch[1][i]).items():
            found = np.where(measured[MetricKey(name)].valid[i], value, 0.0)
            np.testing.assert_allclose(found, measured[MetricKey(name)].value[i], rtol=1e-6)


def test_rankme_counts_no_padding():
    sigma, scale, num_rows = jnp.float32([3, 2, 0]), jnp.float32(1), jnp.int32(3)
    alone = rankme_of(sigma, scale, num_rows, 2000)
    padded = rankme_of(jnp.pad(sigma, (0, 1000)), scale, num_rows, 2000)
    # Each of the 1000 would add 1e-7 log 1e7 to the entropy, 1.6e-3 together.
    np.testing.assert_allclose(padded, alone, rtol=1e-6)


@pytest.mark.parametrize("order", [0.5, 0.95, 1.0, 1.0001, 2.0, 30.0, np.inf])
def test_matrix_entropy_of_any_order(order):
    rows = np.random.default_rng(1).normal(size=(5, 4))
    shares = np.linalg.svd(rows, compute_uv=False) ** 2
    found = renyi_entropy(jnp.append(jnp.float32(shares / shares.sum()), 0.0), order)
    expected = oracle.matrix_entropy(rows, order)
    # 1e-5: float32; at order 0.5 the roots of the shares.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_entropies_of_higher_order_are_smaller():
    shares = jnp.float32([0.6, 0.3, 0.1, 0])
    found = [renyi_entropy(shares, order).item() for order in (0.5, 1.0, 1.01, 2.0, np.inf)]
    assert found == sorted(found, reverse=True) and len(set(found)) == 5
    assert all(renyi_entropy(0 * shares, order) == 0.0 for order in (0.5, 1.0, 1.01, np.inf))


@pytest.mark.parametrize("order", [0, -1.0, float("nan"), False])
def test_a_wrong_order_is_named(order):
    raised(ValueError, "must be a number above 0", metric_of_order, order)


def test_by_hand():
    def of(name, rows):
        states, mask = np.zeros(SHAPE[1:], np.float32), np.arange(SHAPE[1]) < len(rows)
        states[: len(rows), : len(rows[0])] = rows
        return of_rows(states, mask)[name]

    cross = [[3, 0], [-3, 0], [0, 3], [0, -3]]
    # 4 of the 6 pairs are at right angles, 2 opposite: -2 / 6, and log((4 e^-4 + 2 e^-8) / 6).
    np.testing.assert_allclose(of("anisotropy", cross), -1 / 3, rtol=1e-6)
    expected = np.log((4 * np.exp(-4) + 2 * np.exp(-8)) / 6)
    np.testing.assert_allclose(of("uniformity", cross), expected, rtol=1e-6)
    # Steps of 4 east and 3 north: 5 of 7. The fourth row is back at the start.
    path = [[0, 0], [4, 0], [4, 3], [0, 0]]
    np.testing.assert_allclose(of("straightness", path[:3]), 5 / 7, rtol=1e-6)
    assert of("straightness", path) == 0.0
    # 0, 1, 3: nearest 1, 1, 2 and second nearest 3, 2, 3, so 2 / log(3 * 2 * 1.5).
    found = of("intrinsic_dimension", [[0.0], [1.0], [3.0], [1.0]])
    np.testing.assert_allclose(found, 2 / np.log(9), rtol=1e-6)
    assert of("intrinsic_dimension", np.eye(4)) == 0.0  # all ratios are one


@pytest.mark.slow
def test_the_dimension_of_a_plane_is_two():
    rng = np.random.default_rng(0)
    plane = (rng.uniform(size=(2000, 2)) @ rng.normal(size=(2, 24))).astype(np.float32)
    found = metrics.intrinsic_dimension(plane, np.ones(2000, bool))
    # The standard error of the estimate is 2 / sqrt(2000) = 0.045; the border biases it down.
    np.testing.assert_allclose(found, 2.0, atol=0.15)


def pad(rows, num_rows, fill=np.nan):
    """The rows before others that must not count, and their mask."""
    padded = np.full((num_rows, rows.shape[1]), fill, np.float32)
    padded[: len(rows)] = rows
    return padded, np.arange(num_rows) < len(rows)


def test_alignment_and_drift_of_two_sets():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(9, 6)).astype(np.float32)
    y = (x + 0.3 * rng.normal(size=(9, 6))).astype(np.float32)
    (x_padded, mask), (y_padded, _) = pad(x, 12), pad(y, 12)
    found = metrics.linear_cka(x_padded, y_padded, mask)
    np.testing.assert_allclose(found, oracle.linear_cka(x, y), rtol=1e-6)
    rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    moved = pad((3 * x @ rotation + 5).astype(np.float32), 12)[0]
    # 1e-6: float32 rounds the moved rows.
    np.testing.assert_allclose(metrics.linear_cka(x_padded, moved, mask), 1.0, rtol=1e-6)
    assert metrics.linear_cka(x_padded, np.ones_like(moved), mask) == 0.0
    drift = metrics.drift(x_padded, y_padded, mask)
    np.testing.assert_allclose(drift, oracle.drift(x, y), rtol=1e-5)
    # 1e-7: the rounding of the scale; JAX 0.11 gives 2e-8.
    np.testing.assert_allclose(metrics.drift(x_padded, x_padded, mask), 0.0, atol=1e-7)
    np.testing.assert_allclose(metrics.drift(2 * x_padded, x_padded, mask), (1.0, 0.0), atol=1e-6)
    broken = np.where(np.arange(12)[:, None] == 4, np.nan, y_padded)
    assert metrics.linear_cka(x_padded, broken, mask) == 0.0
    assert tuple(metrics.drift(x_padded, broken, mask)) == (0.0, 0.0)


@pytest.mark.parametrize("num_rows", [5, 12])  # below and above both widths
def test_cka_of_long_responses_needs_no_square_of_tokens(num_rows):
    """Two float64 matrices of 32,768 x 32,768 would have 17 GB."""
    x, y = (np.random.default_rng(i).normal(size=(num_rows, 7 + i)) for i in (0, 1))
    found = metrics.linear_cka(x, y, np.ones(num_rows, bool))
    np.testing.assert_allclose(found, oracle.linear_cka(x, y), rtol=1e-6)
    if num_rows > 8:
        shapes = [jax.ShapeDtypeStruct((32_768, 8), "f4")] * 2
        text = str(
            jax.make_jaxpr(metrics.linear_cka)(*shapes, jax.ShapeDtypeStruct((32_768,), bool))
        )
        assert "[32768,8]" in text and "[8,8]" in text and "[32768,32768]" not in text


@pytest.mark.parametrize("width", [4, 30])  # fewer dimensions than rows, and more
def test_lidar_of_ragged_classes(width):
    rng = np.random.default_rng(3)
    states = np.full((6, 4, width), np.nan, np.float32)
    sizes = np.array([4, 3, 0, 4, 1, 2])
    mask = np.arange(4) < sizes[:, None]
    states[mask] = (
        rng.normal(size=(mask.sum(), width))
        + 2 * rng.normal(size=(6, 1, width)).repeat(4, axis=1)[mask]
    )
    classes = [rows[kept] for rows, kept in zip(states, mask) if kept.any()]
    found = metrics.lidar(states, mask)
    np.testing.assert_allclose(found, oracle.lidar(classes), rtol=1e-6)
    assert metrics.lidar(states, mask & (np.arange(6) == 0)[:, None]) == 0.0  # one class
    assert metrics.lidar(np.where(np.isnan(states), 1.0, np.inf), mask) == 0.0


def group_of(rows):
    """The rows in a group of one shape, so that the tests share the programs."""
    padded, mask = pad(np.asarray(rows, np.float32), 7)
    columns = np.zeros((7, 20 - padded.shape[1]), np.float32)  # change no product
    return np.concatenate([padded, columns], axis=1), mask


@pytest.mark.parametrize("width", [3, 20])
def test_novelty_and_diversity_of_a_group(width):
    rows = np.random.default_rng(4).normal(size=(5, width)).astype(np.float32)
    rows[1] = rows[0]
    found = metrics.elliptical_novelty(*group_of(rows / np.sqrt(0.5)))
    np.testing.assert_allclose(found[:5], oracle.elliptical_novelty(rows, 0.5), rtol=1e-5)
    assert not found[5:].any() and found[0] == pytest.approx(found[1])
    diversity = metrics.log_determinant(*group_of(rows / np.sqrt(0.5)))
    np.testing.assert_allclose(diversity, oracle.log_determinant(rows, 0.5), rtol=1e-6)


def test_equal_and_orthogonal_groups_by_hand():
    equal, orthogonal = np.tile(np.eye(3)[:1], (4, 1)), np.eye(4, 6)
    # Three others: 1 / (1 + 3). det(I + 1 1^T) = 1 + 4.
    for rows, novelty, volume in ((equal, 0.25, 5), (orthogonal, 1.0, 16)):
        found = metrics.elliptical_novelty(*group_of(rows))
        np.testing.assert_allclose(found[:4], novelty, rtol=1e-6)
        found = metrics.log_determinant(*group_of(rows))
        np.testing.assert_allclose(found, np.log(volume), rtol=1e-6)
    broken = np.where(np.arange(4)[:, None] == 1, np.inf, orthogonal)
    assert not metrics.elliptical_novelty(*group_of(broken)).any()
    assert metrics.log_determinant(*group_of(broken)) == 0.0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, m: ("linear_cka", x, x[:2], m), "mask has shape"),
        (lambda x, m: ("drift", x, x[:, :2], m), "must be that of policy"),
        (lambda x, m: ("lidar", x, m), r"must be \[C, N, D\]"),
        (lambda x, m: ("lidar", x[None], m[None].astype(int)), "must be bool"),
    ],
)
def test_wrong_sets_are_named(call, message):
    name, *arguments = call(np.ones((3, 4), np.float32), np.ones(3, bool))
    unchecked = inspect.unwrap(getattr(metrics, name))  # the annotations would refuse it first
    raised(ValueError, message, unchecked, *arguments)


def test_the_default_measures_what_it_did():
    assert set(metrics.RELEASE_METRICS) == set(release.METRICS)
    assert set(metrics.METRICS) == {*release.METRICS, *oracle.METRICS}
