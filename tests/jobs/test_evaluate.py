"""An evaluation is not continued with other rows, or with another reward model."""

import json
from types import SimpleNamespace

import pytest

from semrl_jax.jobs import evaluate
from semrl_jax.runs.policies import find_policies
from tests.cases import refused
from tests.fixtures import save_model
from tests.tiny import tiny_config


class Sampled(Exception):
    """All is as before, and the next responses would be sampled."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Evaluates a random model on a file until it would sample."""
    save_model(tmp_path / "model")
    (source,) = find_policies(str(tmp_path / "model"), None)
    config = tiny_config()
    config.evaluation.held_out, config.evaluation.scores = False, ("pass_at_k",)
    config.evaluation.benchmarks = (f"{tmp_path}/sums.jsonl:verifier=tests.verifiers:by_row",)

    def sample(*_):
        raise Sampled

    monkeypatch.setattr(evaluate, "sample_calls", sample)

    def start():
        try:
            evaluate.evaluate(config, [source], tmp_path / "results")
        except Sampled:
            return "goes on"

    return start


def write_row(directory, bonus):
    row = {"question": "1+1", "answer": "2", "bonus": bonus, "solvable": True}
    (directory / "sums.jsonl").write_text(json.dumps(row))


def test_rows_that_the_verifier_gets_must_be_the_same(start, tmp_path):
    write_row(tmp_path, 1)
    assert start() == start() == "goes on"
    write_row(tmp_path, 2)
    refused(r"responses with other columns of sums \(digest .*, now digest ", start)


def test_the_reward_model_must_be_the_same(start, tmp_path, monkeypatch):
    weights = tmp_path / "model.safetensors"
    files = SimpleNamespace(directory=tmp_path, texts=SimpleNamespace(identity="a"))
    monkeypatch.setattr(evaluate, "_find_reward_model", lambda *_: files)
    monkeypatch.setattr(evaluate.Scorer, "load", lambda *_: None)
    write_row(tmp_path, 1)
    weights.write_bytes(b"1")
    assert start() == start() == "goes on"
    weights.write_bytes(b"2")
    refused(r"responses with other reward model \(digest .*, now digest ", start)
    weights.write_bytes(b"1")
    files.texts.identity = "b"
    refused(r"responses with other texts of the reward model \('a', now 'b'\)", start)
