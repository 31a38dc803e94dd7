"""Names of the policies of a command."""

import json
from pathlib import Path

from configs import default
from launch.convert import restored_policy
from semrl_jax import data
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs import policies
from semrl_jax.runs.policies import PolicySource, model_of, policy_names
from tests.cases import refused
from tests.fixtures import save_model


def test_policies_are_named_by_as_little_of_their_paths_as_tells_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert policy_names(["a/run", "b/checkpoints/20"]) == ["run", "b"]
    assert policy_names(["a/run/", "x/../b/run/checkpoints/2", "m"]) == [
        "a/run",
        "b/run",
        f"{tmp_path.name}/m",
    ]
    assert policy_names(["a/run", "a/run/checkpoints/2"]) == ["run", "run"]  # differ by the step
    assert policy_names(["Qwen/a", "meta/a"]) == ["Qwen/a", "meta/a"]


def test_a_policy_has_the_family_of_its_run_unless_the_config_names_one():
    config = default.get_config()
    own, plain = PolicySource("a", Path("a"), family="x"), PolicySource("b", Path("b"))
    found = [source.of_model(config).model for source in (own, plain)]
    assert [(model.path, model.family) for model in found] == [("a", "x"), ("b", "")]
    config.model.family = "y"
    assert own.of_model(config).model.family == "y"


def test_a_run_is_read_with_the_model_that_it_began_with(tmp_path, monkeypatch):
    config, run = default.get_config(), tmp_path / "run"
    config.model.path = "model"  # relative to where the run was started
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    policy, tokenizer = build_policy(config)
    found = {"architecture": policy.config.hash, "tokenizer": data.tokenizer_hash(tokenizer)}
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"run_id": "a", "config": config.to_dict()}))
    (run / "inputs.json").write_text(json.dumps(found))
    source = PolicySource("a", model_of(run), run / "checkpoints" / "1")
    monkeypatch.setattr(policies, "checkpoint_problem", lambda folder: "")
    source.check(policy)
    save_model(tmp_path / "elsewhere" / "model", data.train_tokenizer(["ab"], 280))
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused("began with another tokenizer than model has", source.check, policy)
    save_model(tmp_path / "elsewhere" / "model", rope_theta=7.0)
    other, _ = build_policy(config)
    refused("began with another architecture than model has", source.check, other)
    refused("another architecture", restored_policy, source.checkpoint, source.model, "")
    monkeypatch.chdir(run)
    refused("run began with model.path='model'; .* where the run was started: ", model_of, run)
