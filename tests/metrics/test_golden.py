"""Values recorded from the reference implementation, under its own window."""

import jax
import ml_dtypes
import numpy as np
import pytest

from semrl_jax import metrics
from tests.metrics.flat import flat_metrics

KEYS = {
    "effective_rank": "Effective Rank",
    "log_effective_rank": "Log Effective Rank",
    "response_entropy": "Response Entropy 1",
    "curvature": "Curvature",
}
# Stored value: bfloat16 for effective rank and curvature, whose arithmetic is bfloat16 too; the
# recorded entropy takes (log sum q^a) / (1 - a) in float32, which is good for 6e-4, the log of the
# effective rank is rounded to bfloat16.
VALUE_TOLERANCE = {
    "effective_rank": {"rtol": 2**-8},
    "log_effective_rank": {"rtol": 2**-8},
    "response_entropy": {"atol": 2e-3},
    "curvature": {"rtol": 2**-6},
}
# Differences are kept in float32: effective rank by a float32 SVD. Entropy adds its noise to every
# window; curvature has bfloat16 noise of 2^-8 of values near 1.7 in every window.
ORDER_TOLERANCE = {
    "effective_rank": {"rtol": 1e-3, "atol": 1e-4},
    "log_effective_rank": {"rtol": 1e-3, "atol": 1e-5},
    "response_entropy": {"atol": 3e-3},
    "curvature": {"atol": 1.5e-2},
}


@pytest.mark.parametrize(
    "file", ["metrics_small", pytest.param("metrics_long", marks=pytest.mark.slow)]
)
def test_metrics_match_the_recorded_ones(golden, file):
    data = np.load(golden / f"{file}.npz")
    states = data["hidden_states_bf16_bits"].view(ml_dtypes.bfloat16).astype(np.float32)
    mask = data["mask"].astype(bool)
    for layer in range(states.shape[2]):
        measured = flat_metrics(
            states[:, :, layer], mask, stride=int(data["stride"]), window="release"
        )
        for name, key in KEYS.items():
            np.testing.assert_allclose(
                measured[name], data[f"layer{layer}/{key}"], **VALUE_TOLERANCE[name]
            )
            for order, suffix in (("_velocity", "diff"), ("_acceleration", "diff 2")):
                np.testing.assert_allclose(
                    measured[name + order],
                    data[f"layer{layer}/{key} {suffix}"],
                    err_msg=name + order,
                    **ORDER_TOLERANCE[name],
                )
        np.testing.assert_array_equal(
            measured["traditional_rank"], data[f"layer{layer}/Traditional Rank"]
        )
        if layer == 0:  # the method good for 1e-5: "gram" is off by up to 2e-5 on such spectra
            rank = jax.jit(jax.vmap(metrics.effective_rank))(states[:, :, 0], mask)
            np.testing.assert_allclose(rank, data["layer0/Effective Rank f32"], rtol=1e-5)


def test_dataset_metrics_match_the_recorded_ones(golden):
    data = np.load(golden / "metrics_small.npz")
    states = data["hidden_states_bf16_bits"].view(ml_dtypes.bfloat16)
    mask = data["mask"].astype(bool)
    for layer in range(2):
        means = jax.vmap(metrics.mean_hidden_state)(states[:, :, layer], mask)
        # The recorded mean rows are bfloat16, and so is what follows from them: 2^-8 a row.
        rounded = np.asarray(means).astype(ml_dtypes.bfloat16).astype(np.float32)
        found = metrics.dataset_metrics(rounded, stride=2, window="release")
        measured = {key.dataset_label: value for key, (value, _) in found.items()}
        np.testing.assert_allclose(
            [measured["global/effective_rank"], measured["global/response_entropy"]],
            [
                data[f"dataset/layer{layer}/Effective Rank"][0],
                data[f"dataset/layer{layer}/Response Entropy 1"][0],
            ],
            rtol=2e-2,
        )
        np.testing.assert_allclose(
            measured["cumulative/effective_rank_velocity"],
            data[f"dataset/layer{layer}/Effective Rank diff"][0],
            rtol=2e-2,
        )
        assert measured["cumulative/effective_rank_acceleration"] == 0.0
