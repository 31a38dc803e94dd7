"""A run is copied with its checkpoints, and continues from the copy if its disk is lost."""

import contextlib
import json
import shutil
import sys

import fsspec
import pytest

from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.copies import PROBE, RESTORING, Copies, Store, StoreError
from semrl_jax.runs.workdir import check_early, check_workdir, open_workdir
from tests.cases import refused
from tests.runs.test_checkpoints import assert_same, at_step, make_state, names


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.fixture
def bucket():
    """An empty place in memory, which takes the names of objects as a bucket does."""
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/run"


@pytest.fixture
def copied(config, bucket):
    config.checkpoints.copy_to = bucket
    config.checkpoints.keep = 2
    return config


def train(config, run, state, steps, warn=print, **options):
    """Opens the run directory, and saves a checkpoint and the rows before it, as a run does."""
    workdir = open_workdir(str(run), config)
    checkpoints = Checkpoints(
        run / "checkpoints", **(config.checkpoints.to_dict() | options), warn=warn
    )
    restored = checkpoints.restore(state)
    for step in steps:
        with open(run / "metrics.jsonl", "a") as rows:
            rows.write(json.dumps({"step": step - 1}) + "\n")
        (run / "rollouts").mkdir(exist_ok=True)
        (run / "rollouts" / f"step_{step - 1:06d}.parquet").write_bytes(bytes([step]))
        checkpoints.save(at_step(state, step))
        checkpoints.wait()
    checkpoints.close()
    workdir.close()
    return restored


def files_of(url):
    return sorted(Store(url).sizes())


def contents(url):
    return {name: Store(url).read(name) for name in files_of(url)}


def checkpoints_in(url):
    return sorted({name.split("/")[1] for name in files_of(url) if name.startswith("checkpoints/")})


def test_a_run_whose_disk_is_lost_continues_from_its_copy(copied, bucket, state, tmp_path):
    (tmp_path / "run" / "replica0").mkdir(parents=True)  # not of the run, but of this machine
    (tmp_path / "run" / "replica0" / "log.txt").touch()
    train(copied, tmp_path / "run", state, (1, 2, 3))
    assert names(tmp_path / "run" / "checkpoints") == checkpoints_in(bucket) == ["2", "3"]
    run_id = json.loads((tmp_path / "run" / "config.json").read_text())["run_id"]
    assert not [name for name in files_of(bucket) if "replica" in name or "lock" in name]
    shutil.rmtree(tmp_path / "run")

    assert check_workdir(str(tmp_path / "other"), copied, {})  # a dry run finds it, writes nothing
    assert not (tmp_path / "other").exists()
    restored = train(copied, tmp_path / "other", state, (4,))
    assert_same(restored, at_step(state, 3))
    assert json.loads((tmp_path / "other" / "config.json").read_text())["run_id"] == run_id
    rows = (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2, 3]
    assert (tmp_path / "other" / "rollouts" / "step_000001.parquet").read_bytes() == b"\x02"
    assert checkpoints_in(bucket) == ["3", "4"]


def test_the_newest_whole_copy_is_taken(copied, bucket, state, tmp_path, capsys):
    """A kill has left a part of the newest one. The one before was altered."""
    train(copied, tmp_path / "run", state, (1, 2, 3), keep=3)
    store = fsspec.filesystem("memory")
    store.rm_file("/bucket/run/checkpoints/3/manifest.0.json")
    name = "/bucket/run/checkpoints/2/meta/metadata"
    store.pipe_file(name, store.cat_file(name).replace(b'"step": 2', b'"step": 4'))
    restored = train(copied, tmp_path / "other", state, ())
    assert_same(restored, at_step(state, 1))
    assert "the copy of checkpoint 2 is not used" in capsys.readouterr().out
    assert names(tmp_path / "other" / "checkpoints") == ["1"]
    train(copied, tmp_path / "other", state, (2,))
    assert checkpoints_in(bucket) == ["1", "2"]  # 3 was of a future that is lost


def test_a_restore_that_a_kill_interrupts_begins_again(copied, state, tmp_path, monkeypatch):
    train(copied, tmp_path / "run", state, (1,))
    run, get = tmp_path / "other", Store.get

    def interrupted(self, files):
        get(self, dict(list(files.items())[:1]))
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_workdir(str(run), copied)
    assert (run / RESTORING).exists() and (run / "config.json").exists()
    monkeypatch.undo()
    copied.checkpoints.copy_to, url = "", copied.checkpoints.copy_to
    refused("only a part of the files of its copy", open_workdir, str(run), copied)
    copied.checkpoints.copy_to = url
    assert_same(train(copied, run, state, ()), at_step(state, 1))
    assert not (run / RESTORING).exists()


def test_an_older_directory_is_brought_up_to_the_copy(copied, state, tmp_path):
    """For example a disk that was restored from an older snapshot."""
    train(copied, tmp_path / "run", state, (1,))
    shutil.copytree(tmp_path / "run", tmp_path / "snapshot")
    train(copied, tmp_path / "run", state, (2,))
    assert_same(train(copied, tmp_path / "snapshot", state, ()), at_step(state, 2))


def test_a_store_that_fails_is_tried_again(copied, bucket, state, tmp_path, monkeypatch):
    put, lines, failing = Store.put, [], [True]

    def fail_once(self, files):
        if failing and any("checkpoints" in name for name in files):
            failing.pop()
            raise StoreError("ClientError: Reduce your request rate.")
        put(self, files)

    monkeypatch.setattr(Store, "put", fail_once)
    train(copied, tmp_path / "run", state, (1,), warn=lines.append)
    assert checkpoints_in(bucket) == ["1"] and len(lines) == 1  # the end of the run tried again
    assert "checkpoint 1 could not be copied to memory://bucket/run (ClientError: Red" in lines[0]


def test_the_next_start_copies_what_the_end_of_the_run_could_not(
    copied, bucket, state, tmp_path, monkeypatch
):
    """Also if that start has nothing left to train."""
    put, lines = Store.put, []

    def fail(self, files):
        if any("checkpoints" in name for name in files):
            raise StoreError("ClientError: Reduce your request rate.")
        put(self, files)

    monkeypatch.setattr(Store, "put", fail)
    train(copied, tmp_path / "run", state, (1,), warn=lines.append)
    assert "the same command tries again" in lines[-1] and checkpoints_in(bucket) == []
    monkeypatch.undo()
    assert_same(train(copied, tmp_path / "run", state, ()), at_step(state, 1))
    assert checkpoints_in(bucket) == ["1"]
    # A start from an older checkpoint, because the newest one is damaged here, removes no good one.
    train(copied, tmp_path / "run", state, (2,))
    (tmp_path / "run" / "checkpoints" / "2" / "meta" / "metadata").write_text("{}")
    assert_same(train(copied, tmp_path / "run", state, ()), at_step(state, 1))
    assert checkpoints_in(bucket) == ["1", "2"]


def test_only_whole_rows_are_copied(bucket, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st')  # while it is being written
    copies = Copies(bucket, tmp_path, set, print)
    copies.offer(1)
    copies.close()
    assert Store(bucket).read("metrics.jsonl") == b'{"step": 0}\n'


def test_a_start_that_fails_leaves_no_copy(copied, bucket, state, tmp_path):
    train(copied, tmp_path / "run", state, ())
    assert files_of(bucket) == []


def test_copies_on_another_disk(copied, state, tmp_path):
    copied.checkpoints.copy_to = str(tmp_path / "disk" / "copy")
    train(copied, tmp_path / "run", state, (1, 2, 3))
    assert names(tmp_path / "disk" / "copy" / "checkpoints") == ["2", "3"]
    shutil.rmtree(tmp_path / "run")
    assert_same(train(copied, tmp_path / "run", state, ()), at_step(state, 3))


def test_a_place_that_cannot_hold_copies_is_refused(config, bucket, state, tmp_path, monkeypatch):
    run = str(tmp_path / "run")

    def refused_at(url, message):
        config.checkpoints.copy_to = url
        refused(message, check_early, run, config)
        refused(message, open_workdir, run, config)
        assert not (tmp_path / "run").exists()

    refused_at("nowhere://a/b", "nowhere.*cannot be used")
    for near in (f"{run}/copy", f"{tmp_path}/x/../run/copy", f"local://{run}", str(tmp_path)):
        refused_at(near, "must not be in the run directory .* or around it")
    for typo in ("s3:/bucket/run", "s3//bucket/run", "gs://"):
        refused_at(typo, "is no address such as s3://BUCKET/NAME and no directory")
    assert names(tmp_path) == []
    for url, package in (("gs://bucket/run", "gcsfs"), ("s3://bucket/run", "s3fs")):
        monkeypatch.setitem(sys.modules, package, None)
        refused_at(url, r"needs another package .*pip install 'semrl_jax\[buckets\]'")
    (tmp_path / "file").write_text("not a directory")
    refused_at(str(tmp_path / "file"), r"cannot be used \(FileExistsError.*check address")
    fsspec.filesystem("memory").pipe_file("/bucket/run/notes", b"mine")
    refused_at(bucket, "holds files, but no config.json")
    fsspec.filesystem("memory").pipe_file("/bucket/run/config.json", b"[]")
    refused_at(bucket, "holds files, but no config.json of a run")
    fsspec.filesystem("memory").store.clear()
    config.checkpoints.copy_to = bucket
    train(config, tmp_path / "other", state, (1,))
    config.training.learning_rate *= 2
    refused_at(bucket, "copy_to=memory://bucket/run holds a run with another config")
    config.checkpoints.copy_to = ""
    open_workdir(run, config).close()
    config.checkpoints.copy_to = bucket
    refused("holds another run", open_workdir, run, config)


def test_a_run_does_not_write_into_the_copy_of_another(copied, bucket, state, tmp_path):
    """Both found an empty place when they started."""
    lines = []
    with contextlib.closing(open_workdir(str(tmp_path / "other"), copied)):
        train(copied, tmp_path / "run", state, (1,))
        there = contents(bucket)
        copies = Copies(bucket, tmp_path / "other", set, lines.append)
        copies.offer(1)
        copies.close()
    assert "(it holds another run); the next checkpoint tries again" in lines[0]
    assert contents(bucket) == there


def test_a_half_restored_directory_takes_no_other_run(copied, bucket, state, tmp_path):
    train(copied, tmp_path / "run", state, (1,))
    (tmp_path / "run" / RESTORING).touch()
    copied.checkpoints.copy_to = "memory://bucket/other"
    train(copied, tmp_path / "other", state, (2,))
    refused("holds another run", open_workdir, str(tmp_path / "run"), copied)


def test_what_a_kill_leaves_is_not_a_copy(copied, bucket, tmp_path):
    for name in (PROBE, "config.json.writing", "metrics.jsonl.writing"):
        fsspec.filesystem("memory").pipe_file(f"/bucket/run/{name}", b"{")
    assert not check_workdir(str(tmp_path / "run"), copied, {})
    open_workdir(str(tmp_path / "run"), copied).close()


def test_a_good_checkpoint_is_not_replaced_by_a_bad_copy(copied, bucket, state, tmp_path):
    train(copied, tmp_path / "run", state, (1,))
    shutil.copytree(tmp_path / "run", tmp_path / "snapshot")
    train(copied, tmp_path / "run", state, (2,))
    for step in (1, 2):
        fsspec.filesystem("memory").pipe_file(f"/bucket/run/checkpoints/{step}/meta/metadata", b"")
    assert_same(train(copied, tmp_path / "snapshot", state, ()), at_step(state, 1))


def test_files_that_the_store_has_lost_are_copied_again(bucket, tmp_path):
    for name in ("config.json", "inputs.json", "checkpoints/1/manifest.0.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    copies = Copies(bucket, tmp_path, set, print)
    copies.publish(1)
    fsspec.filesystem("memory").store.clear()
    copies.publish(1)
    assert files_of(bucket) == ["checkpoints/1/manifest.0.json", "config.json", "inputs.json"]


def test_answers_that_the_run_has_dropped_leave_the_copy(bucket, tmp_path):
    answers = [f"answers/{step:06d}.0.jsonl" for step in range(3)]
    for name in ("config.json", "checkpoints/1/manifest.0.json", *answers):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    copies = Copies(bucket, tmp_path, set, print)
    for left in (answers, answers[1:], []):
        for name in set(answers) - set(left):
            (tmp_path / name).unlink(missing_ok=True)
        copies.publish(1)
        others = ["checkpoints/1/manifest.0.json", "config.json"]
        assert files_of(bucket) == [*left, *others]


def test_incomplete_copies_are_removed_and_do_not_count(bucket, tmp_path):
    """The checkpoint that other processes are sending stays."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "3" / "manifest.0.json").write_text("{}")
    store, copies = Store(bucket), Copies(bucket, tmp_path, lambda steps: {*steps[-2:]}, print)
    copies.clear(4)
    for name in ("1/manifest.0.json", "2/part", "4/part", "5/part"):
        store.write(f"checkpoints/{name}", b"{}")
    copies.publish(3)
    assert checkpoints_in(bucket) == ["1", "3", "4"]
