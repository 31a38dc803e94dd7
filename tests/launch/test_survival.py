"""A run that is ended by a signal, or sampled by another process, gives the same results."""

import pathlib
import signal

import pytest

from tests.launch.conftest import TINY, read_until, run, start

NUM_STEPS = 6
pytestmark = pytest.mark.slow


def train(workdir, *flags):
    return run("launch.train", f"--config={TINY}", f"--workdir={workdir}", *flags, timeout=300)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    result = train(workdir)
    assert result.returncode == 0, result.stderr
    return workdir


def test_sigterm_ends_a_wait_for_a_replica(tmp_path):
    process = start(
        "launch.train",
        f"--config={TINY}",
        f"--workdir={tmp_path / 'run'}",
        "--config.rollout.addresses=127.0.0.1:1",
    )
    read_until(process, "waiting for")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 75, err
    assert "stopped before training began" in out


@pytest.mark.soak
def test_sigterm_ends_the_process_within_the_grace_even_in_a_long_step(warmed):
    """Only the end of the grace period ends the run; there is no checkpoint yet."""
    process = start(
        "tests.launch.hung",
        f"--config={TINY}",
        f"--workdir={warmed}",
        "--config.training.grace_s=0.2",
        "--config.checkpoints.every_steps=100",
    )
    read_until(process, "hangs")
    process.send_signal(signal.SIGTERM)
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 75, out + err
    assert "no checkpoint within training.grace_s=0.2 s" in err
    assert train(warmed, "--config.checkpoints.every_steps=1").returncode == 0
