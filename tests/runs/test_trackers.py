"""Trackers get every row once, the settings, and the final figures."""

import importlib.util
import io
import json
import os
import sqlite3
import subprocess
import sys
import threading

import pytest

from semrl_jax.runs.records import MetricWriter
from semrl_jax.runs.trackers import Kept, check_trackers, open_trackers
from tests.cases import refused
from tests.launch.comparison import logged_events
from tests.launch.conftest import ROOT

ROW = {"reward/mean": 0.5, "eval/a/greedy_accuracy": 0.25}


class Memory:
    """A tracker that keeps what it gets."""

    def __init__(self, repeats):
        self.repeats, self.rows, self.final = repeats, [], None

    def write(self, step, scalars):
        self.rows.append((step, dict(scalars)))

    def close(self, final):
        self.final = dict(final)


def write(path, steps, first_step, trackers, **scalars):
    writer = MetricWriter(path, first_step, trackers)
    for step in steps:
        writer.write(step, scalars or {"reward/mean": float(step)})
    writer.close()


def test_a_resumed_run_gives_a_lasting_tracker_no_row_twice(tmp_path):
    lasting = Memory(repeats=False)
    write(tmp_path, range(5), 0, [lasting])
    replaced = Memory(repeats=True)
    write(tmp_path, range(3, 7), 3, [lasting, replaced])  # steps 3 and 4 are repeated
    assert [step for step, _ in replaced.rows] == list(range(7))
    # The last row may have had an evaluation only, so it comes again.
    assert [step for step, _ in lasting.rows] == [0, 1, 2, 3, 4, 4, 5, 6]
    assert lasting.final == replaced.final == {"final/reward/mean": 6.0}
    new = Memory(repeats=False)  # of a run that continues another one
    MetricWriter(tmp_path, 7, [new], is_first=True).close()
    assert [step for step, _ in new.rows] == list(range(7))


def test_final_figures_are_the_last_ones_and_no_value_is_missing(tmp_path):
    tracker = Memory(repeats=True)
    writer = MetricWriter(tmp_path, 0, [tracker])
    writer.write(0, ROW | {"policy/loss": float("nan")})
    writer.write(1, {"reward/mean": 1.0})
    writer.close()
    assert tracker.rows == [(0, ROW), (1, {"reward/mean": 1.0})]
    assert tracker.final == {"final/reward/mean": 1.0, "final/eval/a/greedy_accuracy": 0.25}


def test_a_failing_tracker_is_reported_once(tmp_path):
    class Failing(Memory):
        def write(self, step, scalars):
            raise ConnectionError("gone")

    warnings = []
    write(tmp_path, range(3), 0, [Kept(Failing(repeats=False), warnings.append)])
    assert warnings == ["Failing gets no more rows: ConnectionError: gone"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_ends_tensorboard_alone(tmp_path, config, monkeypatch):
    full = io.BufferedWriter(io.FileIO("/dev/full", "w"))
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: full)
    warnings, ended = [], threading.Event()

    def train():
        write(tmp_path, range(20), 0, open_trackers(config, tmp_path, "0", warnings.append), **ROW)
        ended.set()

    threading.Thread(target=train, daemon=True).start()
    assert ended.wait(30), "the run waits for ever"
    assert len(warnings) == 1 and "TensorBoard gets no more rows: OSError" in warnings[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20


def test_rows_of_a_long_run_wait_for_the_disk_once(tmp_path, config, monkeypatch):
    """A resumed run writes all its rows again; an event and a flush for each value took minutes."""
    syncs = []
    monkeypatch.setattr("os.fsync", syncs.append)
    write(tmp_path, range(50), 0, [], **ROW)
    trackers = open_trackers(config, tmp_path, "0", pytest.fail)
    writer = MetricWriter(tmp_path, 50, trackers)
    assert len(syncs) == 1
    writer.write(50, {"reward/mean": 1.0, "eval/a b/pass@1": 0.5})
    writer.close()
    events = logged_events(tmp_path / "tensorboard")
    assert [step for tag, step, _ in events if tag == "reward/mean"] == list(range(51))
    assert ("eval/a_b/pass_1", 50, 0.5) in events


def test_a_missing_package_is_named(config, monkeypatch, tmp_path):
    check_trackers(config.logging)
    config.logging.wandb = "mine"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"logging\.wandb='mine' needs: pip install wandb; or", check_trackers, config.logging)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)  # a directory that wandb leaves is no package
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trackio").mkdir()
    if getattr(importlib.util.find_spec("trackio"), "origin", None) is None:
        config.logging.wandb, config.logging.trackio = "", "mine"
        refused(r"logging\.trackio='mine' needs", check_trackers, config.logging)


PROGRAM = """
import sys, pathlib
from tests.tiny import tiny_config
from semrl_jax.runs.records import MetricWriter
from semrl_jax.runs.trackers import open_trackers
config, workdir = tiny_config(), pathlib.Path(sys.argv[1])
config.logging[sys.argv[2]] = "project"
for first, last in ((0, 3), (2, 5)):  # the second start resumes at step 2
    writer = MetricWriter(workdir, first, open_trackers(config, workdir, "0123456789ab", print))
    for step in range(first, last):
        of_evaluation = {"eval/a/pass@1": 0.5, "eval/a/pass@1/gain": 0.25} if last == 5 else {}
        writer.write(step, {"reward/mean": float(step), **of_evaluation})
    writer.close()
"""


def run_offline(package, tmp_path, **environment):
    """Runs the program with the real package; returns what it printed."""
    pytest.importorskip(package, reason=f"optional: pip install -e '.[{package}]'")
    workdir = tmp_path / "run"
    workdir.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(workdir), package],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return workdir, result.stdout


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    workdir, out = run_offline("wandb", tmp_path, WANDB_MODE="offline")
    assert out == ""
    files = sorted((workdir / "wandb").glob("offline-run-*-0123456789ab/*.wandb"))
    content = b"".join(file.read_bytes() for file in files)
    assert files and b"final/reward/mean" in content and b"training.num_steps" in content


@pytest.mark.slow
def test_trackio_offline(tmp_path):
    _, out = run_offline("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert out == ""

    (database,) = (tmp_path / "trackio").glob("project*.db")
    rows = sqlite3.connect(database).execute("SELECT step, metrics FROM metrics ORDER BY id")
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, row["reward/mean"]) for step, row in logged if "reward/mean" in row] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0), (4, 4.0)
    ]  # fmt: skip
    final = {"reward/mean": 4.0, "eval/a/pass@1": 0.5, "eval/a/pass@1/gain": 0.25}
    assert logged[-1] == (4, {f"final/{name}": value for name, value in final.items()})


@pytest.mark.slow
def test_mlflow_in_a_local_store(tmp_path, monkeypatch):
    uri = f"file://{tmp_path}/store"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _, out = run_offline("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri)
    assert out == ""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("project").experiment_id
    (run,) = client.search_runs([experiment])  # the second start continued the first one's
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["training.num_steps"] == "3"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0), (4, 4.0)
    ]  # fmt: skip
    assert run.data.metrics["final/reward/mean"] == 4.0
    assert run.data.metrics["eval/a/pass_at_1/value"] == 0.5
    assert run.data.metrics["eval/a/pass_at_1/gain"] == 0.25
