"""Fixtures for small runs, and responses with given fields."""

import concurrent.futures
import json
import pathlib

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.cluster.links import Listener
from semrl_jax.cluster.peers import Peers
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.types import Rollout
from tests.tiny import tiny_config

TURNS = "Write about w12345. 2 of 17. More! user assistant"  # of tests.environments.users
# Keys whose values differ between two runs of one config.
VOLATILE = ("time/", "_per_s", "policy/mfu")


def make_scored(index=0, *, score=0.0, group_size=4, metrics=None, **fields) -> ScoredRollout:
    """The scored response with this index in a batch."""
    response_ids = fields.get("response_ids", np.array([5, 1], np.int32))
    rollout = Rollout(
        sample_id=str(index),
        group_id=index // group_size,
        sample_index=index % group_size,
        prompt_ids=np.array([3, 4], np.int32),
        response_ids=response_ids,
        rollout_logprobs=-np.arange(1, len(response_ids) + 1, dtype=np.float32),
        rollout_raw_logprobs=None,
        finish_reason=fields.get("finish_reason", "eos"),
        versions=(),
        metrics=metrics or {},
        response_mask=fields.get("response_mask"),
        conversations=fields.get("conversations"),
        effective_ranks=fields.get("effective_ranks"),
        turn_rewards=fields.get("turn_rewards"),
        step_ends=fields.get("step_ends"),
        step_rewards=fields.get("step_rewards"),
    )
    verdict = Verdict(
        score=score,
        correct=score > 0,
        boxed=True,
        extracted=fields.get("extracted"),
        error=fields.get("error", ""),
        parts=fields.get("parts", {}),
    )
    return ScoredRollout(rollout, fields.get("response", "text"), "7", verdict)


@pytest.fixture
def config():
    return tiny_config()


@pytest.fixture
def pair():
    """Two peers of one run, for calls from two threads."""
    key = b"secret of the test"
    listener = Listener("127.0.0.1", key)
    address = listener.address
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(Peers, 0, 2, listener=listener, key=key)
        second = pool.submit(Peers, 1, 2, address=address, key=key)
        peers = first.result(), second.result()
    yield peers
    for one in peers:
        one.close()


def read_rows(workdir) -> list[dict]:
    return [
        json.loads(line)
        for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    ]


def stable(rows, *others) -> list[dict]:
    """Rows without times, and without keys that contain one of `others`."""
    left_out = (*VOLATILE, *others)
    return [
        {key: value for key, value in row.items() if not any(part in key for part in left_out)}
        for row in rows
    ]


def scores_by_length(scored, config, step):
    """Replaces `loop.group_rewards`, because all rewards of an untrained policy would be equal."""
    lengths = np.array([len(item.rollout.response_ids) for item in scored], np.float32)
    tokens = np.array([item.rollout.response_ids[0] for item in scored], np.float32)
    return (lengths + tokens).reshape(-1, config.rollout.group_size)


@pytest.fixture
def rewarded(monkeypatch):
    """Rewards are `scores_by_length`."""
    from semrl_jax.training import loop

    monkeypatch.setattr(loop, "group_rewards", scores_by_length)


@pytest.fixture
def report():
    """For tests that look at the report of a run; see `reports_where_looked_at`."""


@pytest.fixture
def reports_where_looked_at(request, monkeypatch):
    """Drawing a report takes longer than a small run: only for tests that ask for `report`."""
    if "report" not in request.fixturenames:
        monkeypatch.setattr("semrl_jax.runs.run.write_report", lambda workdir: None)


def random_params(policy, seed=0):
    """Random parameters in NumPy; `Policy.init` compiles 40 small programs for them."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: random.normal(0, 0.2, leaf.shape).astype(leaf.dtype), policy.shapes()
    )


def save_model(directory, tokenizer=None, **changes):
    """Writes a random model of 16 numbers per token, or with other sizes."""
    tokenizer = tokenizer or data.character_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_layers": 1,
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 256,
    }  # fmt: skip
    config = models.DecoderConfig(**sizes | changes)
    params = models.Policy(config).init(jax.random.key(0))
    models.save_directory(directory, params, config, tokenizer)


def save_chat_model(directory, texts=TURNS, vocab_size=280, head_dim=16, **changes):
    """Writes a random Qwen2, and a tokenizer with a chat template that is trained on the texts."""
    texts = [texts] if isinstance(texts, str) else texts
    sizes = {"hidden_size": 2 * head_dim, "intermediate_size": 32, "head_dim": head_dim}
    tokenizer = data.train_tokenizer(texts, vocab_size)
    save_model(directory, tokenizer, tie_embeddings=True, **sizes | changes)
    return directory
