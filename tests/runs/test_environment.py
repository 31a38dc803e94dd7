"""Training with an environment, from the config to the weights."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax import data
from semrl_jax.environments.journal import Journal
from semrl_jax.runs import train
from semrl_jax.support.errors import UserError
from tests.fixtures import read_rows, save_chat_model
from tests.oracles import algorithms as oracle
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")

STOPS = 40  # one token in seven ends a turn: an untrained policy never writes the end token


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory with a random Qwen2 and a trained tokenizer."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def config(model):
    config = tiny_config()
    config.model.path = str(model)
    config.data.task = "environment"
    config.data.num_prompts = 8
    config.environment.name = "tests.environments.users:Vowels"
    config.environment.num_workers = 4
    config.rollout.stop_token_ids = tuple(range(0, 280, 280 // STOPS))
    config.rollout.max_prompt_tokens = 64
    config.rollout.max_response_tokens = 96
    config.evaluation.num_problems = 4
    config.training.num_steps = 2
    return config


def rollouts_of(workdir, step=0):
    return pq.read_table(workdir / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.mark.slow
def test_a_run_with_an_environment(config, model, tmp_path, capsys, monkeypatch):
    answers, forget, kept = tmp_path / "run" / "answers", Journal.forget, []

    def forget_and_look(journal, trained, sealed):
        forget(journal, trained, sealed)
        kept.append({file.name for file in answers.iterdir()})

    monkeypatch.setattr(Journal, "forget", forget_and_look)
    assert train(config, str(tmp_path / "run")) == 0
    # The save after step 2 waits until the checkpoint of step 1 is sealed.
    assert len(kept) == 2 and kept[1] <= {"000001.0.jsonl"} and not answers.exists()
    assert "turns " in capsys.readouterr().out
    row = read_rows(tmp_path / "run")[0]
    assert row["episode/turns/max"] == 3 and row["episode/num_episodes"] == 16 + 4
    assert row["episode/failed_fraction"] == row["reward/verifier_error_fraction"] == 0
    assert row["policy/grad_norm"] > 0 and row["reward/group_std"] > 0
    tokenizer = data.load_tokenizer(model)
    several = 0
    for found in rollouts_of(tmp_path / "run"):
        mask, ids = np.array(found["response_mask"]), np.array(found["response_ids"])
        logprobs = np.array(found["rollout_logprobs"])
        assert (logprobs[~mask] == 0).all() and (logprobs[mask] < 0).all()
        starts = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int)])) == 1)
        assert len(starts) == len(found["turn_rewards"])
        assert found["score"] == pytest.approx(sum(found["turn_rewards"]))
        several += len(starts) > 1
        context = tokenizer.decode(ids[~mask])
        assert context.count("<|im_start|>user\n") == len(starts) - 1
        assert context.count("More!<|im_end|>") == len(starts) - 1
    assert several > 4


def test_self_play_needs_credit_by_turn(config, tmp_path):
    config.environment.name = "tests.environments.users:BothSides"
    with pytest.raises(UserError, match=r"is self-play; set algorithms.advantage.credit=turn"):
        train(config, str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_credits_and_measures_turns(config, tmp_path):
    config.algorithms.advantage.credit = "turn"
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "run")) == 0
    row, found = read_rows(tmp_path / "run")[0], rollouts_of(tmp_path / "run")
    masks = [np.array(item["response_mask"]) for item in found]
    mask = np.zeros((len(masks), max(map(len, masks))), bool)
    for padded, own in zip(mask, masks):
        padded[: len(own)] = own

    def estimate(returns, lengths):
        return oracle.group_relative([returns])[0] if len(returns) > 1 else [0.0]

    rewards = [item["turn_rewards"] for item in found]
    expected = oracle.by_turn(estimate, rewards, mask, config.rollout.group_size)
    for name in ("mean", "max", "min"):
        of = getattr(expected[mask], name)()
        assert row[f"advantage/{name}"] == pytest.approx(of, rel=1e-4, abs=1e-5)
    for label in ("effective_rank", "effective_rank_velocity", "effective_rank_acceleration"):
        columns = [item[f"turn_{label}"] for item in found]
        assert list(map(len, columns)) == list(map(len, rewards))
        mean = np.nanmean(np.concatenate(columns))
        assert row[f"metrics/{label}/turn/mean"] == pytest.approx(mean, rel=1e-5)
