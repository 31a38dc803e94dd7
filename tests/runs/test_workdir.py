"""The run directory: its content before a run, and the settings that may change in a resume."""

import json
import pathlib

import pytest

from configs import recorded
from semrl_jax.runs import workdir as module
from semrl_jax.runs.workdir import open_workdir, versions
from semrl_jax.settings.moved import REMOVED
from semrl_jax.support.errors import UserError
from tests.cases import refused


def test_the_same_command_works_after_a_replica_did_not_start(config, tmp_path):
    """The log of the replica is kept, because the message names it."""
    workdir = open_workdir(str(tmp_path / "run"), config)
    (workdir.path / "replica0").mkdir()
    (workdir.path / "replica0" / "log.txt").write_text("no vLLM here\n")
    workdir.discard(f"the rollout replica did not start: ... ({workdir.path}/replica0/log.txt)")
    workdir.close()
    assert [path.name for path in workdir.path.iterdir()] == ["replica0"]
    again = open_workdir(str(tmp_path / "run"), config)
    again.close()
    assert not again.resumed and (again.path / "config.json").exists()


def test_a_lock_that_a_failed_start_removes_is_none(config, tmp_path, monkeypatch):
    """Else a third start would lock a new file, and two runs would write one directory."""
    failed, lock = open_workdir(str(tmp_path), config), module._lock

    def late(path, file):
        failed.discard()
        failed.close()
        lock(path, file)

    monkeypatch.setattr(module, "_lock", late)
    refused("belongs to a run that still runs", open_workdir, str(tmp_path), config)
    monkeypatch.undo()
    open_workdir(str(tmp_path), config).close()


def everything_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_user_mistake_leaves_no_files(config, tmp_path):
    """The latest user mistake: in the first step, with a replica that has started."""
    workdir = open_workdir(str(tmp_path / "new" / "run"), config)
    workdir.check_inputs({"data": "0"})
    for directory in ("checkpoints", "replica0", "replica1", "replica1_0", "tensorboard"):
        (workdir.path / directory).mkdir()
        if directory != "checkpoints":
            (workdir.path / directory / "log.txt").write_text("listening\n")
    (workdir.path / "metrics.jsonl").touch()
    (workdir.path / "metrics.writing").touch()
    (workdir.path / "starts.jsonl").touch()
    (workdir.path / "warm_start.writing").mkdir()
    workdir.discard(f"{workdir.path}/warm_start.writing: No space left on device")
    workdir.close()
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize(
    "kept", ["warm_start/config.json", "checkpoints/1/state", "nonfinite_batch.npz", "rollouts/x"]
)
def test_valuable_files_are_kept_together_with_the_record(config, tmp_path, kept):
    workdir = open_workdir(str(tmp_path / "run"), config)
    (workdir.path / kept).parent.mkdir(parents=True, exist_ok=True)
    (workdir.path / kept).touch()
    before = everything_in(tmp_path)
    workdir.discard()
    workdir.close()
    assert everything_in(tmp_path) == before


def test_an_existing_directory_or_run_is_kept(config, tmp_path):
    """A directory that the user made, and a run of an earlier attempt."""
    (tmp_path / "run").mkdir()
    workdir = open_workdir(str(tmp_path / "run"), config)
    workdir.discard()
    workdir.close()
    assert everything_in(tmp_path) == ["run"]
    open_workdir(str(tmp_path / "run"), config).close()
    again = open_workdir(str(tmp_path / "run"), config)
    again.discard()
    again.close()
    assert everything_in(tmp_path) == ["run", "run/.lock", "run/config.json"]


DEEP = "[" * 100_000
RECORD = '{"run_id": "a", "config": {"seed": %s}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "nested more than 100 deep"),
        (RECORD % ("[" * 900 + "]" * 900), "nested more than 100 deep"),
        ('{"run_id', "is not JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("{}", "is not the record of a run"),
        ('{"run_id": 1, "config": {}}', "is not the record of a run"),
        ('{"run_id": "a", "config": []}', "is not the record of a run"),
        ('{"model_type": "qwen2"}', "is not the record of a run"),
    ],
)
def test_an_invalid_config_file_is_named_and_nothing_is_written(config, tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    refused(rf"config\.json .*{message}.*name another workdir", open_workdir, str(tmp_path), config)
    assert everything_in(tmp_path) == ["config.json"]


@pytest.mark.parametrize("content", ['{"data": "0', DEEP, "[]", "\xff"])
def test_damaged_inputs_are_a_user_error(config, tmp_path, content):
    workdir = open_workdir(str(tmp_path / "run"), config)
    (workdir.path / "inputs.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"inputs\.json .* restore it or name a new workdir"):
        workdir.check_inputs({"data": "0"})
    workdir.close()


@pytest.mark.parametrize("name", [".lock", "config.writing"])
def test_nothing_is_written_through_a_link(config, tmp_path, name):
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    if name == ".lock":
        refused(r"\.lock is a symbolic link", open_workdir, str(tmp_path / "run"), config)
    else:
        open_workdir(str(tmp_path / "run"), config).close()
        record = json.loads((tmp_path / "run" / "config.json").read_text())
        assert record["config"]["seed"] == config.seed
    assert target.read_text() == "years of work"


def test_a_directory_with_the_name_of_a_file_is_refused(config, tmp_path):
    (tmp_path / "config.writing").mkdir()
    refused(r"config\.writing is a directory", open_workdir, str(tmp_path), config)


def test_a_refused_run_does_not_keep_the_directory_locked(config, tmp_path):
    file: pathlib.Path = tmp_path / "run" / "config.json"
    open_workdir(str(tmp_path / "run"), config).close()
    content = file.read_text()
    file.write_text(content.replace('"seed": ', '"seed": 1'))
    with pytest.raises(UserError, match="another config") as caught:  # keeps its frames
        open_workdir(str(tmp_path / "run"), config)
    file.write_text(content)
    open_workdir(str(tmp_path / "run"), config).close()
    assert caught


def test_an_object_store_is_no_directory(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("workdir=gs://bucket/run must be a directory", open_workdir, "gs://bucket/run", config)
    assert not list(tmp_path.iterdir())


def test_a_directory_whose_name_only_resembles_a_replicas_is_foreign(config, tmp_path):
    (tmp_path / "replica_of_the_mona_lisa").mkdir()
    refused("is not empty and has no config", open_workdir, str(tmp_path), config)


def test_a_resumed_run_may_have_other_devices_and_workers(config, tmp_path):
    open_workdir(str(tmp_path / "run"), config).close()
    changed = {
        "rollout.jax_tensor_parallelism": 2, "rollout.jax_data_parallelism": 4,
        "rewards.num_workers": 7, "metrics.num_threads": 3, "mesh.tensor": 2,
    }  # fmt: skip
    config.update_from_flattened_dict(changed)
    reopened = open_workdir(str(tmp_path / "run"), config)
    reopened.close()
    named = {line.partition(":")[0] for line in reopened.changed}
    # Evaluations follow the metrics of training.
    assert named == changed.keys() | {"evaluation.metric_options.num_threads"}


def test_a_setting_that_is_newer_than_the_run_and_follows_another_has_not_changed(config, tmp_path):
    workdir = open_workdir(str(tmp_path / "run"), config)
    workdir.close()
    file = workdir.path / "config.json"
    record = json.loads(file.read_text())
    del record["config"]["evaluation"]["metric_options"], record["config"]["evaluation"]["k"]
    file.write_text(json.dumps(record))
    assert config.metrics.stride == 4  # not the default
    reopened = open_workdir(str(tmp_path / "run"), config)
    reopened.close()
    assert reopened.changed == ()


def test_a_run_continues_without_a_removed_setting_that_it_had_off(config, tmp_path):
    workdir = open_workdir(str(tmp_path / "run"), config)
    workdir.close()
    file = workdir.path / "config.json"
    record = json.loads(file.read_text())
    for field, off in REMOVED.items():
        *sections, name = field.split(".")
        section = record["config"]
        for part in sections:
            section = section.setdefault(part, {})  # a section may be gone
        section[name] = off
    for did_nothing in ("abort", "keep"):
        record["config"]["rollout"]["in_flight"] = did_nothing
        file.write_text(json.dumps(record))
        reopened = open_workdir(str(tmp_path / "run"), config)
        reopened.close()
        assert reopened.changed == ()
    assert recorded.get_config(str(file)).seed == config.seed
    # Evaluations may change, also by a setting that is gone.
    record["config"]["evaluation"]["metric_options"]["window_growth"] = 1.25
    file.write_text(json.dumps(record))
    reopened = open_workdir(str(tmp_path / "run"), config)
    reopened.close()
    assert "metric_options.window_growth" in str(reopened.changed)
    record["config"]["metrics"]["window_growth"] = 1.25
    file.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"1\.25 -> None.*continue with the version that began"):
        open_workdir(str(tmp_path / "run"), config)


def test_a_run_from_before_sampling_ahead_keeps_its_lag_of_zero(config, tmp_path):
    """Its checkpoints hold no earlier weights."""
    workdir = open_workdir(str(tmp_path / "run"), config)
    workdir.close()
    record = json.loads((workdir.path / "config.json").read_text())
    del record["config"]["rollout"]["max_staleness"]
    (workdir.path / "config.json").write_text(json.dumps(record))
    open_workdir(str(tmp_path / "run"), config).close()
    config.rollout.max_staleness = 1
    with pytest.raises(UserError, match=r"another config \(rollout.max_staleness: 0 -> 1\)"):
        open_workdir(str(tmp_path / "run"), config)


def test_an_option_of_the_optimiser_may_neither_go_nor_come(config, tmp_path):
    """A run records no default for it."""
    for first, second in (({}, {"eps": 1e-3}), ({"eps": 1e-3}, {})):
        run = str(tmp_path / f"run{len(first)}")
        with config.unlocked():
            config.optimizer.options = first
            open_workdir(run, config).close()
            config.optimizer.options = second
        refused(r"another config \(optimizer.options.eps: ", open_workdir, run, config)


def test_a_run_starts_where_there_is_no_git(monkeypatch):
    assert len(versions()["git"]) in (0, 40)
    monkeypatch.setenv("PATH", "")
    assert versions()["git"] == "" and versions()["jax"]


@pytest.mark.parametrize("name", ["lr=[1e-3]", "all*", "what?", r"a\b"])
def test_a_path_that_orbax_takes_as_a_pattern_is_refused(config, tmp_path, name):
    for directory in (tmp_path / name, tmp_path / name / "run"):
        message = "cannot be read again in .* name a directory without"
        assert name in refused(message, open_workdir, str(directory), config)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("name", ["checkpoints", "rollouts"])
def test_a_directory_on_a_disk_that_is_not_there_is_named(config, tmp_path, name):
    disk, run = tmp_path / "disk", tmp_path / "run"
    open_workdir(str(run), config).close()
    (run / name).symlink_to(disk)
    refused(rf"{name} must be a directory, .* bring the place back", open_workdir, str(run), config)
    disk.mkdir()
    open_workdir(str(run), config).close()
