"""Context between the policy's tokens is no token of a response; test_update.py has the update."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax.analysis import study_sources
from semrl_jax.metrics import MetricKey
from semrl_jax.rollout.engines import decoding
from semrl_jax.runs import train
from semrl_jax.training.policy_update import TokenPass
from semrl_jax.training.probes.tokens import token_indicators
from tests.fixtures import read_rows
from tests.oracles import metrics as metrics_oracle
from tests.oracles import shaping as shaping_oracle
from tests.shaping.test_advantages import BASELINES, METRICS, shape, state_with

MASK = np.array(
    [[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0]], bool
)


@pytest.mark.parametrize("release", [False, True])
def test_shaping_takes_the_tokens_of_the_policy(release):
    random = np.random.default_rng(0)
    advantages = np.where(MASK, random.normal(size=MASK.shape), np.nan).astype(np.float32)
    state, options = state_with(), {"reproduce_release": release, "eta": 0.5}
    shaped, report = shape(advantages, METRICS, MASK, state, **options)
    signal = [
        0.5 * shaping_oracle.signal(row, BASELINES, (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), 0)
        for row in zip(*(METRICS[name] for name in list(METRICS)[:3]))
    ]
    expected = shaping_oracle.shaped(advantages, MASK, signal, 2.0, release)
    np.testing.assert_allclose(shaped, expected, rtol=1e-5)
    # The same tokens with nothing between them.
    order = np.argsort(~MASK, axis=1, kind="stable")
    front, mask = (np.take_along_axis(x, order, axis=1) for x in (advantages, MASK))
    without, same_report = shape(front, METRICS, mask, state, **options)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(shaped), order, axis=1), without)
    assert report.keys() == same_report.keys()
    for name, value in report.items():  # sums over tokens in another order
        np.testing.assert_allclose(value, same_report[name], rtol=1e-6, err_msg=name)


def test_token_indicators_are_means_over_the_tokens_of_the_policy():
    random = np.random.default_rng(2)
    logprobs, entropies = random.normal(size=(2, *MASK.shape)).astype(np.float32)
    found = token_indicators(
        ("avg_log_probs", "avg_logits_entropy"), TokenPass(logprobs, entropies, None), MASK
    )
    for row, own in enumerate(MASK):
        for name, values in (("avg_log_probs", logprobs), ("avg_logits_entropy", entropies)):
            value, valid = found[MetricKey(name)]
            assert valid[row]
            assert value[row] == pytest.approx(np.mean(values[row, own].astype(np.float64)))


@pytest.mark.soak
def test_a_run_whose_responses_hold_context(config, tmp_path, rewarded, monkeypatch):
    """Every third token is context. States from the engine; then from the policy, packed."""
    made = decoding.Rollout

    def with_context(*, response_ids, rollout_logprobs, rollout_raw_logprobs, **fields):
        mask = np.arange(len(response_ids)) % 3 != 1
        return made(
            response_ids=response_ids,
            rollout_logprobs=np.where(mask, rollout_logprobs, np.float32(0)),
            rollout_raw_logprobs=np.where(mask, rollout_raw_logprobs, np.float32(0)),
            response_mask=mask,
            **fields,
        )

    monkeypatch.setattr(decoding, "Rollout", with_context)
    config.training.num_steps = 1
    config.hidden_states.dtype = "float32"
    for source, packed in (("rollout", False), ("policy", True)):
        config.hidden_states.source = source
        config.training.pack_sequences = packed
        config.training.micro_batch_tokens = 128 if packed else 0
        assert train(config, str(tmp_path / source)) == 0
    row, other = (read_rows(tmp_path / source)[0] for source in ("rollout", "policy"))
    for key in (
        "policy/loss", "policy/entropy", "policy/grad_norm", "metrics/effective_rank/mean",
        "metrics/effective_rank_velocity/mean", "rollout/logprob_mismatch/max",
    ):  # fmt: skip
        # The states are float32; sums over tokens have another order.
        assert other[key] == pytest.approx(row[key], rel=1e-3, abs=1e-5), key
    assert row["rollout/logprob_mismatch/max"] < 1e-4
    table = pq.read_table(tmp_path / "rollout" / "rollouts" / "step_000000.parquet").to_pydict()
    lengths = [sum(mask) for mask in table["response_mask"]]
    assert row["response/num_tokens"] == sum(lengths)
    assert row["response/length/mean"] == pytest.approx(np.mean(lengths))
    assert sum(lengths) < sum(map(len, table["response_ids"]))
    # A later study of the run measures the same rows.
    states, _ = study_sources.states_of_run(tmp_path / "rollout")
    ranks = table["metrics/effective_rank"]
    for rows, length, rank in zip(states[0], lengths, ranks, strict=True):
        assert len(rows) == length
        if length > 1:
            np.testing.assert_allclose(metrics_oracle.effective_rank(rows), rank, rtol=2e-3)
