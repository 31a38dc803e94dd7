"""A sweep that is ended by a signal goes on, and repeats no run; one replica serves all runs."""

import signal

import pytest

from tests.launch.conftest import TINY, read_until, run, start, start_replica, succeed


@pytest.mark.soak
def test_a_sweep_goes_on_after_a_signal(tmp_path):
    output = tmp_path / "sweep"
    _, address = start_replica()
    arguments = [
        "launch.sweep", f"--config={TINY}", f"--output={output}", "--seeds=0",
        f"--replicas={address}",
        "--vary=shaping.target=none,advantage", "--config.warm_start.num_steps=0",
        "--config.training.num_steps=2",
    ]  # fmt: skip
    process = start(*arguments)
    read_until(process, "done: shaping.target=none, seed 0")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 75
    first = output / "target=none" / "seed0"
    written = (first / "metrics.jsonl").stat().st_mtime_ns
    done = succeed(*arguments, timeout=400)
    assert "2 of 2 runs" in done.stdout and "less the first" in done.stdout
    assert (first / "metrics.jsonl").stat().st_mtime_ns == written
    assert "done: shaping.target=advantage, seed 0" in done.stdout
    for name in ("sweep.csv", "sweep.png", "report.html"):
        assert (output / name).stat().st_size > 100
    wrong = run(*arguments, "--variant=training.lr=1", timeout=200)
    assert wrong.returncode == 2 and "did you mean training.learning_rate?" in wrong.stderr


@pytest.mark.slow
def test_an_output_that_is_a_file_is_one_line():
    done = run("launch.sweep", f"--config={TINY}", f"--output={__file__}", "--seeds=0")
    assert done.returncode == 2 and "Not a directory; name another path" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_seed_in_two_forms_is_one_seed(tmp_path):
    done = run("launch.sweep", f"--config={TINY}", f"--output={tmp_path}", "--seeds=1,01")
    assert done.returncode == 2 and "--seeds=1,01 has one twice" in done.stderr


@pytest.mark.slow
def test_no_seed_is_refused(tmp_path):
    done = run("launch.sweep", f"--config={TINY}", f"--output={tmp_path}", "--seeds=")
    assert done.returncode == 2 and "--seeds= must be whole numbers, such as 0,1,2" in done.stderr
