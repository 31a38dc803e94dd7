"""Names of the policies of a command."""

from semrl_jax.runs.policies import policy_names


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
