"""Names of the policies of a command."""

from pathlib import Path

from configs import default
from semrl_jax.runs.policies import PolicySource, policy_names


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
