"""A new run directory continues from a checkpoint of another run, which stays as it is."""

import contextlib
import json
import shutil

import pytest

from semrl_jax.runs.copies import RESTORING
from semrl_jax.runs.workdir import check_early, check_workdir, open_workdir
from tests.cases import refused
from tests.runs.test_checkpoints import assert_same, at_step, names
from tests.runs.test_copies import bucket, copied, state, train  # noqa: F401 - fixtures


@pytest.fixture
def source(config, state, tmp_path):  # noqa: F811
    """The directory of a run with checkpoints of steps 1 to 3."""
    config.checkpoints.keep = 3
    run = tmp_path / "run"
    train(config, run, state, (1, 2, 3))
    (run / "inputs.json").write_text('{"data": "a"}')
    (run / "warm_start").mkdir()
    (run / "warm_start" / "config.json").write_text("{}")
    (run / "starts.jsonl").write_text('{"step": 0}\n')
    (run / "rollouts" / "eval_000002.parquet").touch()
    return run


def contents(directory):
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def record(run):
    return json.loads((run / "config.json").read_text())


def test_a_new_directory_has_what_the_run_had_at_the_checkpoint(config, source, state, tmp_path):  # noqa: F811
    before, fork = contents(source), tmp_path / "fork"
    config.training.resume_from = str(source / "checkpoints" / "2")
    config.checkpoints.keep = 1
    assert check_workdir(str(fork), config, {"data": "a"})  # a dry run writes nothing
    refused("began with other data", check_workdir, str(fork), config, {"data": "b"})
    assert not fork.exists()
    assert_same(train(config, fork, state, ()), at_step(state, 2))
    assert names(fork / "rollouts") == ["step_000000.parquet", "step_000001.parquet"]
    assert (fork / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    assert (fork / "warm_start" / "config.json").is_file()
    assert not (fork / "starts.jsonl").exists() and not (fork / RESTORING).exists()
    assert record(fork)["run_id"] != record(source)["run_id"]
    assert record(fork)["config"]["checkpoints"]["keep"] == 3  # which the run began with
    # The same command resumes, also if the other run is no longer there.
    train(config, fork, state, (3,))
    assert contents(source) == before
    shutil.rmtree(source)
    assert_same(train(config, fork, state, ()), at_step(state, 3))
    assert names(fork / "checkpoints") == ["3"]


def test_what_cannot_be_continued_is_one_line(config, source, tmp_path):
    before, fork = contents(source), str(tmp_path / "fork")

    def refused_from(path, message, directory=fork):
        config.training.resume_from = str(path)
        refused(message, check_early, directory, config)
        refused(message, open_workdir, directory, config)

    refused_from(source, "must be a checkpoint of a run, such as RUN/checkpoints/20")
    refused_from(tmp_path / "no/checkpoints/1", "no has no config.json of a run")
    refused_from(source / "checkpoints/4", r"is not there, .*; name one of the steps \[1, 2, 3\]")
    refused_from(source / "checkpoints/2", "holds a run with another config", str(source))
    (source / "checkpoints" / "3" / "manifest.0.json").unlink()
    refused_from(source / "checkpoints/3", r"was not completed; name one of the steps \[1, 2\]")
    config.training.learning_rate *= 2
    refused_from(
        source / "checkpoints/1", r"1 holds a run with another config \(training\.learning_rate"
    )
    config.training.learning_rate /= 2
    (source / "checkpoints" / "2" / "meta" / "metadata").write_text("{}")
    config.training.resume_from = str(source / "checkpoints" / "2")
    refused("run/checkpoints/2/meta/metadata has been altered", open_workdir, fork, config)
    assert names(tmp_path) == ["run"] and before.keys() > contents(source).keys()
    config.training.resume_from = str(source / "checkpoints" / "1")
    open_workdir(fork, config).close()
    refused_from(source / "checkpoints/2", r"training\.resume_from: .* -> .*restore the setting")
    refused_from("", r"training\.resume_from: .* -> ''\)")


def test_a_fork_that_a_kill_interrupts_begins_again(config, source, state, tmp_path, monkeypatch):  # noqa: F811
    config.training.resume_from, fork = str(source / "checkpoints" / "2"), tmp_path / "fork"
    (fork / "checkpoints" / "3").mkdir(parents=True)
    (fork / RESTORING).touch()
    config.training.resume_from, path = "", config.training.resume_from
    refused("has only a part of the files of its copy", open_workdir, str(fork), config)
    config.training.resume_from = path
    assert_same(train(config, fork, state, ()), at_step(state, 2))
    assert names(fork / "checkpoints") == ["2"]


def test_a_fork_has_a_copy_of_its_own(copied, source, bucket, state, tmp_path):  # noqa: F811
    copied.training.resume_from, fork = str(source / "checkpoints" / "2"), tmp_path / "fork"
    refused("copy_to=.* holds a run with another config", open_workdir, str(fork), copied)
    copied.checkpoints.copy_to = f"{bucket}/fork"
    train(copied, fork, state, (3,))
    shutil.rmtree(fork)
    assert_same(train(copied, fork, state, ()), at_step(state, 3))


def test_functions_of_a_program_are_those_of_the_new_directory(config, source, tmp_path):
    given = {run: tmp_path / run / "given" for run in ("run", "fork")}
    settings = record(source)
    settings["config"]["rewards"]["functions"] = [f"{given['run']}/rewards.pkl:a:weight=2"]
    (source / "config.json").write_text(json.dumps(settings))
    given["fork"].mkdir(parents=True)
    config.training.resume_from = str(source / "checkpoints" / "2")
    config.rewards.functions = (f"{given['fork']}/rewards.pkl:a:weight=2",)
    with contextlib.closing(open_workdir(str(tmp_path / "fork"), config)) as fork:
        assert fork.changed == ()
