"""All metrics of a batch in one call, and the metrics of a set of responses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.metrics.batch import _measure_batch
from semrl_jax.metrics.names import ORDERS
from tests.cases import slow_after
from tests.metrics.flat import flat_metrics
from tests.oracles import metrics as oracle

STRIDE = 5


@pytest.fixture(scope="module")
def batch():
    states = np.random.default_rng(0).normal(size=(6, 24, 10)).astype(np.float32)
    states[1] *= 7.0
    mask = np.arange(24) < np.array([24, 17, 10, 2, 1, 0])[:, None]
    mask[1, ::4] = False
    states[~mask] = np.nan
    return states, mask


def check(measured, states, mask, window, rtol, atol, names=metrics.RELEASE_METRICS):
    assert set(measured) == {
        f"{name}{order}{valid}"
        for name in names
        for order in ("", "_velocity", "_acceleration")
        for valid in ("", "_valid")
    }
    for i, row_mask in enumerate(mask):
        rows = states[i][row_mask]
        for name in names:
            values = oracle.series(oracle.METRICS[name], rows, STRIDE, window)
            velocity, acceleration = oracle.orders(values)
            value = oracle.METRICS[name](rows)
            enough = len(rows) >= (3 if name == "curvature" else 2)
            for order, expected in {
                "": value if enough else None,
                "_velocity": velocity,
                "_acceleration": acceleration,
            }.items():
                key = f"{name}{order}"
                assert measured[f"{key}_valid"][i] == (expected is not None), (key, i)
                np.testing.assert_allclose(
                    measured[key][i], expected or 0.0, rtol=rtol, atol=atol, err_msg=f"{key} {i}"
                )


@pytest.mark.parametrize(
    "window", ["exact", "later", pytest.param("release", marks=pytest.mark.slow)]
)
def test_all_metrics_match_float64(batch, window):
    measured = flat_metrics(*batch, stride=STRIDE, window=window)
    # Float32 resolves these spectra: 1e-5 of values up to 10, and differences of them.
    check(measured, *batch, window, rtol=2e-5, atol=5e-5)


def test_gram_metrics_match_float64(batch):
    names = ("effective_rank", "response_entropy")
    measured = flat_metrics(*batch, stride=STRIDE, names=names)
    check(measured, *batch, "exact", rtol=1e-3, atol=5e-3, names=names)  # as documented


@pytest.mark.parametrize("window", slow_after(2, ["later", "release", "exact"]))
def test_the_series_of_a_metric_is_that_of_its_prefixes(batch, window):
    names = {"names": ("effective_rank", "curvature"), "series": ("effective_rank",)}
    found = metrics.hidden_state_metrics(
        *batch, stride=STRIDE, window=window, method="svd", **names
    )
    value, valid = found.pop(metrics.MetricKey("effective_rank", "series"))
    assert {key.order for key in found} == {"value", "velocity", "acceleration"}
    for row, states, mask in zip(np.arange(len(value)), *batch):
        expected = oracle.series(oracle.effective_rank, states[mask], STRIDE, window)
        count = len(expected)
        assert valid[row, :count].all() and not valid[row, count:].any()
        np.testing.assert_allclose(value[row, :count], expected, rtol=2e-5)
        assert not value[row, count:].any()


def test_a_series_needs_the_orders_of_its_metric(batch):
    with pytest.raises(ValueError, match="series"):
        metrics.hidden_state_metrics(*batch, stride=STRIDE, orders=(), series=("effective_rank",))


@pytest.mark.slow
def test_only_the_named_orders_are_measured(batch):
    measured = flat_metrics(*batch, stride=STRIDE, orders=("effective_rank",))
    orders = {key for key in measured if key.endswith(("_velocity", "_acceleration"))}
    assert orders == {"effective_rank_velocity", "effective_rank_acceleration"}
    everything = flat_metrics(*batch, stride=STRIDE)
    for key, value in measured.items():
        # The same decompositions, but another program may round differently.
        tolerance = {"rtol": 1e-3, "atol": 5e-3} if key in orders else {"rtol": 2e-6, "atol": 1e-6}
        np.testing.assert_allclose(value, everything[key], **tolerance, err_msg=key)
    none = flat_metrics(*batch, stride=STRIDE, orders=())
    assert set(none) == {
        f"{name}{valid}" for name in metrics.RELEASE_METRICS for valid in ("", "_valid")
    }


def test_a_response_is_the_same_alone_and_in_any_batch(batch):
    states, mask = batch
    together = flat_metrics(states, mask, stride=STRIDE)
    for i in range(len(states)):
        alone = flat_metrics(states[i : i + 1], mask[i : i + 1], stride=STRIDE)
        for key in together:
            # 2e-6 of ranks up to 8: the compiler fuses a loop body differently.
            np.testing.assert_allclose(together[key][i], alone[key][0], rtol=1e-5, atol=2e-5)
    reverse = flat_metrics(states[::-1], mask[::-1], stride=STRIDE)
    for key in together:
        np.testing.assert_array_equal(together[key], reverse[key][::-1])


def test_a_non_finite_response_does_not_change_others(batch):
    states, mask = batch
    broken = states.copy()
    broken[0, 3, 3] = np.inf
    clean = flat_metrics(states, mask, stride=STRIDE)
    measured = flat_metrics(broken, mask, stride=STRIDE)
    for key in clean:
        assert measured[key][0] == 0, key  # values 0.0, valid False
        np.testing.assert_array_equal(measured[key][1:], clean[key][1:])


def test_lengths_do_not_retrace(batch):
    states, mask = batch
    flat_metrics(states, mask, stride=STRIDE)
    num_programs = _measure_batch._cache_size()
    flat_metrics(states, mask & (np.arange(24) < 12), stride=STRIDE)
    assert _measure_batch._cache_size() == num_programs > 0


def test_an_empty_batch_and_empty_responses_are_allowed():
    for shape in ((0, 8, 4), (1, 0, 4), (2, 0, 4)):
        measured = flat_metrics(np.zeros(shape, np.float32), np.zeros(shape[:2], bool), stride=2)
        for key, value in measured.items():
            assert value.shape == shape[:1]
            assert not value.any(), key


@pytest.mark.slow
def test_dataset_metrics_are_of_the_mean_states_that_are_finite(batch):
    states, mask = batch
    means = jax.vmap(metrics.mean_hidden_state)(states, mask)
    for i in range(6):
        rows = states[i][mask[i]]
        expected = rows.mean(axis=0, dtype=np.float64) if len(rows) else np.zeros(10)
        # 1e-6 of entries near 1: one float32 sum.
        np.testing.assert_allclose(means[i], expected, rtol=1e-5, atol=1e-6)
    rows = np.asarray(means)[:5]
    measured = metrics.dataset_metrics(rows, stride=1)
    assert all(measured[metrics.MetricKey("effective_rank", order)].valid for order in ORDERS)
    again = metrics.dataset_metrics(np.insert(rows, 2, np.nan, axis=0), stride=1)
    for key, value in measured.items():
        np.testing.assert_allclose(again[key], value, rtol=1e-5, err_msg=key.label)


@pytest.mark.slow  # compiles one program per window rule
@pytest.mark.parametrize("window", metrics.WINDOWS)
def test_dataset_metrics_follow_the_window(window):
    rows = np.random.default_rng(0).normal(size=(24, 10)).astype(np.float32)
    measured = metrics.dataset_metrics(rows, stride=5, window=window)
    for name, metric in oracle.METRICS.items():
        expected = metric(rows), *oracle.orders(oracle.series(metric, rows, 5, window))
        found = [measured[metrics.MetricKey(name, order)].value for order in ORDERS]
        # 1e-4 of values up to 20: differences of them.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_every_array_is_float32_or_bool(batch):
    states, mask = batch
    measured = flat_metrics(jnp.asarray(states[:1], jnp.bfloat16), mask[:1], stride=STRIDE)
    for key, value in measured.items():
        assert value.dtype == (bool if key.endswith("_valid") else np.float32)
