"""A full disk: a lost checkpoint does not end a run, a lost row does. The result stays the same."""

import shutil

import pytest

from tests.launch.comparison import assert_same_run
from tests.launch.conftest import ROOT, read_until, run, start, succeed

NUM_STEPS = 6
FLAGS = (
    f"--config={ROOT / 'tests' / 'launch' / 'kills_config.py'}",
    "--config.logging.plot_every_steps=0",  # files with figures are larger than the limit
    "--config.model.intermediate_size=1024",  # its arrays are larger than the limit too
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    succeed("launch.train", *FLAGS, f"--workdir={workdir}", timeout=300)
    return workdir


@pytest.fixture
def workdir(uninterrupted, tmp_path):
    """A run directory with the warm start done and no step taken."""
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted / "warm_start", workdir / "warm_start")
    shutil.copy(uninterrupted / "config.json", workdir)
    return workdir


def train_on_full_disk(when, workdir):
    return run("tests.launch.full_disk", when, *FLAGS, f"--workdir={workdir}", timeout=300)


def finish(workdir):
    result = succeed("launch.train", *FLAGS, f"--workdir={workdir}", timeout=300)
    return result.stdout


@pytest.mark.soak
def test_failed_checkpoints_are_reported_and_the_run_continues(uninterrupted, workdir):
    result = train_on_full_disk("checkpoints:2:3", workdir)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "could not be written" in line]
    assert len(lines) == 2
    for step, line in zip((2, 3), lines):
        assert f"checkpoint of step {step} could not" in line and "good checkpoint: step 1" in line
    assert_same_run(workdir, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_failed_last_checkpoint_exits_with_1_and_the_same_command_continues(uninterrupted, workdir):
    result = train_on_full_disk("checkpoints:4:99", workdir)
    assert result.returncode == 1
    last = result.stdout.splitlines()[-1]
    assert last.startswith("not done: the checkpoint of step 6") and "same command" in last
    assert "Traceback" not in result.stdout
    assert "at step 3" in finish(workdir)
    assert_same_run(workdir, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_a_last_checkpoint_that_fails_after_a_signal_ends_with_code_1(uninterrupted, workdir):
    process = start(
        "tests.launch.full_disk", "checkpoints:2:99", *FLAGS, f"--workdir={workdir}",
        "--config.training.num_steps=2000",
    )  # fmt: skip
    read_until(process, "step    3/2000")
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, (out, err)
    last = out.splitlines()[-1]
    assert last.startswith("SIGTERM: the checkpoint of step") and "same command" in last
    assert "at step 1" in finish(workdir)
    assert_same_run(workdir, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_failed_row_ends_the_run_and_the_same_command_continues(uninterrupted, workdir):
    result = train_on_full_disk("row:3", workdir)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert (workdir / "metrics.jsonl").read_text().endswith('{"advantage')  # incomplete
    finish(workdir)
    assert_same_run(workdir, uninterrupted, NUM_STEPS)
