"""A dry run names what would end the run, and writes nothing."""

import collections

import pytest

from semrl_jax.runs import dry_run as module
from semrl_jax.runs.dry_run import Summary, _check_run, dry_run
from semrl_jax.runs.workdir import check_workdir, open_workdir
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from tests.cases import refused

Usage = collections.namedtuple("Usage", "total used free")


def test_checkpoints_must_fit_onto_the_disk(config, tmp_path, monkeypatch, capsys):
    # 12 000 bytes per checkpoint, 2 that are kept and one that is written.
    summary, workdir = Summary(Reporter()), tmp_path / "new" / "run"
    config.checkpoints.keep = 2
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage(0, 0, 36_000))
    _check_run(config, str(workdir), False, 12_000.0, summary)
    disk, state, _ = capsys.readouterr().out.splitlines()
    assert "3 checkpoint(s)" in disk and "a new run" in state
    config.checkpoints.extra_steps = (1,)
    with pytest.raises(UserError, match=r"4 checkpoints .* make room"):
        _check_run(config, str(workdir), False, 12_000.0, summary)
    (workdir / "checkpoints" / "1").mkdir(parents=True)  # this one is there already
    _check_run(config, str(workdir), True, 12_000.0, summary)
    assert "resumes, checkpoints of steps [1]" in capsys.readouterr().out


def test_a_directory_is_looked_at_without_a_change(config, tmp_path):
    path = tmp_path / "run"
    assert not check_workdir(str(path), config, {}) and not path.exists()
    workdir = open_workdir(str(path), config)
    refused("still runs", check_workdir, str(path), config, {})
    workdir.check_inputs({"data": "a"})
    workdir.close()
    before = sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())
    assert check_workdir(str(path), config, {"data": "a"})
    refused("began with other data", check_workdir, str(path), config, {"data": "b"})
    config.seed = 1
    refused("another config", check_workdir, str(path), config, {})
    assert before == sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())


@pytest.mark.slow
def test_a_dry_run_checks_and_writes_nothing(config, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    assert dry_run(config, str(workdir)) == 0
    out = capsys.readouterr().out
    names = ["training", "evaluation"]  # the templates of the prompts
    names += ["model", "data", "rewards", "training", "replicas", "memory", "disk", "workdir"]
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [*names, "dry"]
    assert "6 prompts, 8 held-out problems" in out and max(map(len, out.splitlines())) <= 100
    assert not list(tmp_path.iterdir())

    monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", "x" * 40)
    for field, value, message in (
        ("model.path", str(tmp_path / "none"), "does not exist"),
        ("rewards.function", "nowhere:grade", "cannot be imported"),
        ("evaluation.benchmarks", ("nowhere.jsonl",), "nowhere.jsonl"),
        ("rollout.addresses", ("127.0.0.1:1",), "cannot be reached within 1 s"),
    ):
        wrong = config.copy_and_resolve_references()
        wrong.update_from_flattened_dict({field: value, "rollout.connect_timeout_s": 1.0})
        refused(message, dry_run, wrong, str(workdir))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_adapters_and_a_critic_in_a_dry_run(config, tmp_path, capsys):
    """Adapters take a part of the memory; the base is counted once, for reference and critic."""
    config.update_from_flattened_dict(
        {"algorithms.name": "ppo", "rollout.group_size": 1, "algorithms.loss.kl_coefficient": 0.1}
    )
    found = []
    for rank in (0, 2):
        config.lora.rank = rank
        assert dry_run(config, str(tmp_path / "run")) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if "update" in line and "MiB" in line)
        parts = [part.rsplit(" ", 2) for part in line.strip().split(", ")]
        found.append({name: float(size) for name, size, _ in parts})
    everything, adapters = found
    assert {"reference", "critic"} < everything.keys() and "base" not in everything
    assert "base" in adapters and "reference" not in adapters
    assert adapters["base"] == everything["reference"]
    assert adapters["critic"] < 0.3 * everything["critic"]
