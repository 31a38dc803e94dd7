"""Metrics of a batch on all cores."""

import jax
import ml_dtypes
import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.metrics import parallel
from semrl_jax.support.errors import UserError
from tests.cases import slow_after
from tests.metrics.flat import flat_metrics

OPTIONS = {"stride": 8, "names": ("effective_rank", "curvature"), "orders": ("effective_rank",)}


@pytest.fixture(scope="module")
def batch():
    states = np.random.default_rng(0).normal(size=(6, 40, 8)).astype(np.float32)
    mask = np.arange(40) < np.array([40, 31, 40, 3, 0, 32])[:, None]
    mask[1, ::4] = False
    states[~mask] = np.nan
    return states, mask


def check(found, expected):
    assert set(found) == set(expected)
    for name, values in expected.items():
        # Other sums of float32 in padding of another length.
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", slow_after(1, ["jit", "numpy", "jax", "bfloat16"]))
def test_a_batch_has_the_numbers_of_its_responses(batch, kind):
    states, mask = batch
    if kind == "bfloat16":
        states = states.astype(ml_dtypes.bfloat16)
    expected = flat_metrics(states, mask, **OPTIONS)
    if kind == "jit":
        measure = jax.jit(lambda *arrays: metrics.measure_batch(*arrays, **OPTIONS))
        found = measure(states, mask)
    else:
        arrays = (jax.numpy.asarray(states), jax.numpy.asarray(mask)) if kind == "jax" else batch
        found = metrics.measure_batch(states if kind == "bfloat16" else arrays[0], mask, **OPTIONS)
    check(metrics.flatten(found), expected)


def test_responses_are_cut_to_few_lengths(batch, monkeypatch):
    states, mask = batch
    lengths, measure = [], parallel.hidden_state_metrics

    def recorded(states, mask, **options):
        lengths.append(states.shape[1])
        return measure(states, mask, **options)

    monkeypatch.setattr(parallel, "hidden_state_metrics", recorded)
    metrics.measure_batch(states, mask, num_threads=2, **OPTIONS)
    assert sorted(lengths) == [32, 32, 32, 32, 40, 40]
    rows = np.ones(5000, bool)
    found = {parallel.bucket(rows[:length], 5000) for length in range(5001)}
    assert sorted(found) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
                             4096, 5000]  # fmt: skip
    assert all(parallel.bucket(rows[:n], 5000) >= n for n in range(5001))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads=0 must be an integer of at least 1"),
        ({"num_threads": -1}, "num_threads=-1 must"),
        ({"side_by_side": True}, "side_by_side is no option of measure_batch"),
    ],
)
def test_a_wrong_option_is_named(batch, options, message):
    with pytest.raises(UserError, match=message):
        metrics.measure_batch(*batch, **OPTIONS, **options)


def test_threads_need_at_most_a_quarter_of_the_batch(monkeypatch):
    monkeypatch.setattr(parallel, "usable_cores", lambda: 64)
    assert [parallel._check_threads(None, size) for size in (1, 8, 16, 1000)] == [1, 2, 4, 64]
    assert parallel._check_threads(3, 1) == 3
