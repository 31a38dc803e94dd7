"""A full disk: a lost checkpoint does not end a run, a lost row does. The result stays the same."""

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


def train_on_full_disk(when, workdir):
    return run("tests.launch.full_disk", when, *FLAGS, f"--workdir={workdir}", timeout=300)


def finish(workdir):
    result = succeed("launch.train", *FLAGS, f"--workdir={workdir}", timeout=300)
    return result.stdout


@pytest.mark.soak
def test_failed_checkpoints_are_reported_and_the_run_continues(uninterrupted, warmed):
    result = train_on_full_disk("checkpoints:2:3", warmed)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "could not be written" in line]
    assert len(lines) == 2
    for step, line in zip((2, 3), lines):
        assert f"checkpoint of step {step} could not" in line and "good checkpoint: step 1" in line
    assert_same_run(warmed, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_failed_last_checkpoint_exits_with_1_and_the_same_command_continues(uninterrupted, warmed):
    result = train_on_full_disk("checkpoints:4:99", warmed)
    assert result.returncode == 1
    last = result.stdout.splitlines()[-1]
    assert last.startswith("not done: the checkpoint of step 6") and "same command" in last
    assert "Traceback" not in result.stdout
    assert "at step 3" in finish(warmed)
    assert_same_run(warmed, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_a_last_checkpoint_that_fails_after_a_signal_ends_with_code_1(uninterrupted, warmed):
    process = start(
        "tests.launch.full_disk", "checkpoints:2:99", *FLAGS, f"--workdir={warmed}",
        "--config.training.num_steps=2000",
    )  # fmt: skip
    read_until(process, "step    3/2000")
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, (out, err)
    last = out.splitlines()[-1]
    assert last.startswith("SIGTERM: the checkpoint of step") and "same command" in last
    assert "at step 1" in finish(warmed)
    assert_same_run(warmed, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_failed_row_ends_the_run_and_the_same_command_continues(uninterrupted, warmed):
    result = train_on_full_disk("row:3", warmed)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert (warmed / "metrics.jsonl").read_text().endswith('{"advantage')  # incomplete
    finish(warmed)
    assert_same_run(warmed, uninterrupted, NUM_STEPS)
