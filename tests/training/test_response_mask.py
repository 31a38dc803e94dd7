"""Context between the policy's tokens is attended to, and no other number depends on it."""

import dataclasses

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax.analysis import study_sources
from semrl_jax.metrics import MetricKey
from semrl_jax.rollout.engines import decoding
from semrl_jax.runs import train
from semrl_jax.training.policy_update import TokenPass, batch_logprobs
from semrl_jax.training.probes.tokens import token_indicators
from tests.cases import slow_after
from tests.fixtures import read_rows
from tests.oracles import algorithms as oracle
from tests.oracles import metrics as metrics_oracle
from tests.oracles import shaping as shaping_oracle
from tests.shaping.test_advantages import BASELINES, METRICS, shape, state_with
from tests.training.test_packing import batch_of
from tests.training.test_update import (
    OPTIONS,
    PLANS,
    assert_near,
    make_batch,
    make_values,
    plan_of,
    setup,
    update,
)

MASK = np.array(
    [[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0]], bool
)


def response_with(prompt, *response):
    """A batch of one response of ten tokens: three by the policy, three of context, two, two."""
    mask = np.array([1, 1, 1, 0, 0, 0, 1, 1, 0, 0], bool)
    batch = batch_of([(len(prompt), len(mask))], [mask])
    ids = batch.token_ids.copy()
    ids[batch.segment_ids == 1] = [*prompt, *response]
    return batch._replace(token_ids=ids)


@pytest.mark.slow
def test_context_acts_through_attention_alone():
    policy, params = setup()
    plan = plan_of(PLANS["packed"])
    start, middle, tokens = [1, 2], [3, 4, 5], [6, 7]
    batches = {
        "as it is": response_with(start, *tokens, 8, *middle, *tokens, 9, 10),
        "other inside": response_with(start, *tokens, 8, 3, 20, 5, *tokens, 9, 10),
        "other behind": response_with(start, *tokens, 8, *middle, *tokens, 21, 22),
    }
    values = make_values(batches["as it is"])
    logprobs, losses, gradients = {}, {}, {}
    for name, batch in batches.items():
        found = batch_logprobs(params, batch, policy=policy, temperature=0.8, plan=plan)
        logprobs[name] = found.logprobs[0]
        after, _, scalars = update(policy, params, batch, values, plan)
        losses[name] = scalars["policy/loss"]
        gradients[name] = jax.tree.map(lambda a, b: np.asarray(a - b), params, after)
    assert (logprobs["as it is"][:3] < 0).all() and (logprobs["as it is"][6:8] < 0).all()
    assert not logprobs["as it is"][3:6].any() and not logprobs["as it is"][8:].any()
    # What is behind the last token of the policy changes nothing.
    np.testing.assert_array_equal(logprobs["other behind"], logprobs["as it is"])
    assert losses["other behind"] == losses["as it is"]
    jax.tree.map(np.testing.assert_array_equal, gradients["other behind"], gradients["as it is"])
    # What is inside changes the tokens after it.
    np.testing.assert_array_equal(logprobs["other inside"][:3], logprobs["as it is"][:3])
    assert (np.abs(logprobs["other inside"] - logprobs["as it is"])[6:8] > 1e-4).all()
    # Embeddings have a gradient where the token is attended to, not behind.
    embedding = gradients["as it is"]["embed"]["embedding"]
    assert all(np.abs(embedding[token]).max() > 0 for token in (*start, *middle, *tokens))
    assert not embedding[[9, 10, 20, 21, 22]].any()


@pytest.mark.parametrize("aggregation", slow_after(1, ["token_mean", "response_mean"]))
def test_the_loss_matches_float64_over_the_tokens_of_the_policy(aggregation):
    policy, params = setup()
    batch = make_batch(context=True)
    values, mask = make_values(batch), batch.response_mask
    plan = plan_of(PLANS["packed"])
    found = batch_logprobs(
        params, batch, policy=policy, temperature=0.8, plan=plan, with_entropies=True
    )
    counts = mask.sum(axis=1, keepdims=True)
    share = 1 / mask.sum() if aggregation == "token_mean" else 1 / (len(mask) * counts)
    options = dataclasses.asdict(OPTIONS)
    expected = oracle.policy_loss(
        found.logprobs, found.entropies, *values, np.where(mask, share, 0),
        eps=options["clip_epsilon"], c_kl=options["kl_coefficient"],
        c_ent=options["entropy_coefficient"], estimator=options["kl_estimator"],
    )  # fmt: skip
    _, _, scalars = update(policy, params, batch, values, plan, aggregation)
    for name, value in zip(("loss", "clip_fraction", "approx_kl", "entropy", "kl"), expected):
        np.testing.assert_allclose(scalars[f"policy/{name}"], value, rtol=1e-4, atol=1e-6)


def test_values_at_context_reach_nothing():
    """Old and reference log-probabilities and advantages there: NaN, or numbers."""
    policy, params = setup()
    batch = make_batch(context=True)
    plan = plan_of(PLANS["three rows"])
    values = make_values(batch)
    numbers = [np.nan_to_num(x, nan=3.0) for x in values]
    after, _, scalars = update(policy, params, batch, values, plan)
    same, _, same_scalars = update(policy, params, batch, numbers, plan)
    assert_near(after, same, 0)
    assert scalars == same_scalars


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
