"""What the reference implementation gets wrong about metrics; docs/verl.md has the whole table."""

import jax
import numpy as np
import pytest

from semrl_jax import metrics
from tests.metrics.flat import flat_metrics
from tests.oracles import metrics as oracle


def of_one(states, mask=None, **options):
    """Metrics of one response as floats."""
    mask = np.ones(states.shape[0], bool) if mask is None else mask
    found = flat_metrics(states[None], mask[None], **{"stride": 20} | options)
    return {name: float(value[0]) for name, value in found.items()}


def test_padding_with_token_ids_is_ignored():
    # One such row inside the mask drives the rank to about 1.
    states = np.random.default_rng(0).normal(size=(80, 16)).astype(np.float32)
    mask = np.arange(80) < 70
    states[70:] = 128009.0
    found = of_one(states, mask, method="svd")
    assert oracle.effective_rank(states[:71]) < 1.1
    for name, metric in oracle.METRICS.items():
        np.testing.assert_allclose(found[name], metric(states[:70]), rtol=1e-4, err_msg=name)
    series = oracle.series(oracle.effective_rank, states[:70], 20, "exact")
    np.testing.assert_allclose(
        found["effective_rank_velocity"], oracle.orders(series)[0], rtol=1e-4
    )


def test_orders_use_the_whole_response():
    # Rank grows only in the first 120 rows, which are not among the last 512.
    rng = np.random.default_rng(0)
    states = rng.normal(size=(640, 12)).astype(np.float32)
    states[:120] *= np.arange(12) < np.linspace(1, 12, 120)[:, None]
    flat = states.copy()
    flat[:120] = rng.normal(size=(120, 12))
    names = {"names": ("effective_rank",), "stride": 80}
    for window, same in (("exact", False), ("later", False), ("release", True)):
        grows = of_one(states, window=window, **names)["effective_rank_velocity"]
        stays = of_one(flat, window=window, **names)["effective_rank_velocity"]
        assert (abs(grows - stays) < 1e-4) == same, window
    np.testing.assert_allclose(
        of_one(states, **names)["effective_rank_velocity"],
        oracle.orders(oracle.series(oracle.effective_rank, states, 80, "exact"))[0],
        rtol=1e-3,
    )


@pytest.mark.parametrize("method", metrics.METHODS)
def test_rank_20_is_measured_as_20_in_value_and_orders(method):
    # 241 x 512 as measured on the release: eigenvalues of the noise made it 130, and ER 21.1.
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(512, 20)))[0].T
    states = (rng.normal(size=(241, 20)) @ basis).astype(np.float32)
    found = of_one(states, stride=80, names=("effective_rank", "response_entropy"), method=method)
    rank = jax.jit(metrics.traditional_rank)(states, np.ones(241, bool))
    assert rank == 20
    tolerance = {"svd": 1e-5, "gram": 1e-3}[method]  # as documented for each method
    for name in ("effective_rank", "response_entropy"):
        series = oracle.series(oracle.METRICS[name], states, 80, "exact")
        np.testing.assert_allclose(found[name], oracle.METRICS[name](states), rtol=tolerance)
        scale = series[-1]
        for order, expected in zip(("velocity", "acceleration"), oracle.orders(series)):
            assert abs(found[f"{name}_{order}"] - expected) < tolerance * scale, (name, order)


def test_orders_of_entropy_use_the_same_entropy_as_the_value():
    # Renyi's of order 1.0001. The release uses Shannon's for the orders.
    states = np.random.default_rng(0).normal(size=(240, 200)).astype(np.float32)
    states[:, 0] *= np.linspace(1, 28, 240, dtype=np.float32)  # as far apart as the two get
    found = of_one(states, stride=40, names=("response_entropy",), method="svd")
    found = [found[f"response_entropy{order}"] for order in ("", "_velocity", "_acceleration")]
    renyi, shannon = (
        [entropy(states), *oracle.orders(oracle.series(entropy, states, 40, "exact"))]
        for entropy in (oracle.response_entropy, shannon_entropy)
    )
    np.testing.assert_allclose(found, renyi, rtol=0, atol=1e-5)  # svd: 1e-6 of values near 4
    assert np.all(np.abs(np.subtract(shannon, renyi)) > 3e-5)


def shannon_entropy(rows):
    q = oracle.singular_values(rows) ** 2
    q = q[q > 1e-8] / q[q > 1e-8].sum()
    return -np.sum(q * np.log(q))


def test_curvature_keeps_the_turns_at_every_256th_step():
    # A straight line with two right angles, where chunks of 256 steps would end.
    steps = np.zeros((600, 2))
    steps[:256, 0] = steps[512:, 0] = 1
    steps[256:512, 1] = 1
    states = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)]).astype(np.float32)
    expected = 2 * (np.pi / 2) / 599
    found = jax.jit(metrics.curvature)(states, np.ones(601, bool))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_ranks_closer_than_bfloat16_spacing_differ():
    # Spacing of bfloat16 between 128 and 256: 1. These differ by less.
    rng = np.random.default_rng(0)
    states = rng.normal(size=(200, 256)).astype(np.float32)
    other = states * np.linspace(1, 1.2, 256, dtype=np.float32)
    ranks = [jax.jit(metrics.effective_rank)(rows, np.ones(200, bool)) for rows in (states, other)]
    assert all(rank.dtype == np.float32 and rank > 128 for rank in ranks)
    assert 0.05 < abs(float(ranks[0]) - float(ranks[1])) < 1
    for rank, rows in zip(ranks, (states, other)):
        np.testing.assert_allclose(rank, oracle.effective_rank(rows), rtol=1e-5)
