"""The probability of the reference answer as the reward."""

import dataclasses

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.runs import train
from semrl_jax.sampling.scoring import Scored
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.probability_reward import ProbabilityReward
from tests.fixtures import make_scored, read_rows
from tests.training.test_conversations import CONFIG
from tests.training.test_packing import mesh_of

TOKENIZER = data.character_tokenizer()
JUDGE = ProbabilityReward("A:", TOKENIZER, 40)
# Response, reference; the second has two marks, the third none, the last is too long.
CASES = [("1+2A:4", "3"), ("A:9\nA:7", "12"), ("1+2", "3"), ("9" * 30 + "A:1", "12345")]


def ids_of(text):
    return np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


def scored_of(cases):
    items = []
    for index, (response, reference) in enumerate(cases):
        item = make_scored(index, group_size=1, response_ids=ids_of(response), score=-1.0)
        rollout = dataclasses.replace(item.rollout, prompt_ids=ids_of("Q:1+2\n"))
        items.append(dataclasses.replace(item, rollout=rollout, reference=reference))
    return Scored(items)


def test_rewards_match_a_loop_over_the_policy():
    policy = models.Policy(dataclasses.replace(CONFIG, vocab_size=len(TOKENIZER)))
    params = policy.init(jax.random.key(0))
    plan = RowPlan(mesh_of(1), micro_batch_tokens=40)

    def logprobs(batch):
        return batch_logprobs(params, batch, policy=policy, plan=plan, temperature=1.0).logprobs

    def mean_probability(text, answer):
        """The answer comes after the prompt and this text; one pass for each of its tokens."""
        ids, found = ids_of("Q:1+2\n" + text), []
        for token in ids_of(answer):
            row = np.zeros((1, 64), np.int32)
            row[0, : len(ids)] = ids
            segments = (np.arange(64) < len(ids)).astype(np.int32)[None]
            positions = np.arange(64, dtype=np.int32)[None] * segments
            states = policy.final_states(params, row, positions, segments)[0, len(ids) - 1]
            logits = np.asarray(policy.logits(params, states[None, None]), np.float64)[0, 0]
            found.append(np.exp(logits - np.logaddexp.reduce(logits))[token])
            ids = np.append(ids, token)
        return np.mean(found)

    cases = [*CASES, ("9" * 26 + "A:1", "12345")]  # 39 tokens: a bucket of 64
    found = [item.verdict for item in JUDGE.judged(scored_of(cases), logprobs)]
    wanted = [
        np.clip(mean_probability(text, answer) - mean_probability("A:", answer), 0, 1)
        for text, answer in (("1+2A:", "3"), ("A:9\nA:", "12"), ("9" * 26 + "A:", "12345"))
    ]
    assert max(wanted) > 0
    np.testing.assert_allclose(
        [verdict.score for verdict in found], [*wanted[:2], 0, 0, wanted[2]], atol=1e-6
    )
    assert not any(verdict.correct for verdict in found)


@pytest.mark.parametrize(("with_response", "reward"), [(0.25, 0.0), (0.75, 0.25)])
def test_the_probability_without_a_response_is_subtracted(with_response, reward):
    def logprobs(batch):
        """The shorter rows ask after the mark alone, and get log 0.5."""
        lengths = (batch.segment_ids[:, -batch.response_mask.shape[1] :] > 0).sum(axis=1)
        return np.log(np.where(lengths == lengths.min(), 0.5, with_response))[:, None] + 0 * (
            batch.response_mask
        )

    (item,) = JUDGE.judged(scored_of(CASES[:1]), logprobs)
    np.testing.assert_allclose(item.verdict.score, reward, atol=1e-6)


def test_without_a_mark_nothing_is_asked():
    assert [item.verdict.score for item in JUDGE.judged(scored_of(CASES[2:]), None)] == [0.0, 0.0]


@pytest.mark.slow
def test_a_run_with_probabilities_as_rewards(config, tmp_path):
    config.rewards.probability_after = "+"
    config.training.num_steps = 2
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")[:2]
    assert all(0 <= row["reward/min"] <= row["reward/max"] <= 1 for row in rows)
    assert any(row["reward/max"] > 0 for row in rows) and "time/reward_model_s" in rows[0]
