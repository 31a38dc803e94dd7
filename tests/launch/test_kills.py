"""A run that is killed at any moment, also while it resumes, gives exactly the same results.

Each chain kills one run several times. Then the plain command finishes it, and it is compared with
an uninterrupted run. `pytest -m soak -n 0 -s` prints a line for each kill.
"""

import pathlib
import re
import shutil
import signal
import time
import uuid

import numpy as np
import pytest

from tests.launch.comparison import assert_same_run
from tests.launch.conftest import ROOT, start, succeed

CONFIG = ROOT / "tests" / "launch" / "kills_config.py"
NUM_STEPS = 6
MARK = "SEMRL_TEST_KILLS"  # in the environment of a run and of all processes that it starts

# "phase:call" and the maximum delay of the kill in seconds, see tests/launch/killed.py. "step:N"
# kills from outside, at most this delay after the line of step N, or of a later one if the run
# resumes there; N = 0 means the process start. "term:N" is a SIGTERM in place of a kill.
CHAINS = {
    "first_steps": ["generate:2 0.1", "update:1 0.05", "save:2 0.05"],
    "log": ["rollouts:2 0.02", "row:1 0.01", "cut_log:1 0.01", "report:1 0.5"],
    "seal": ["seal:2 0.15", "manifest:1 0.01", "prune:2 0.01", "resume:1 0.1", "save:1 0.1"],
    "sync": ["sync_weights:3 0.02", "evaluate:3 0.1", "score:20 0.02"],
    "warm_start": ["warm_start:1 0.5", "warm_start_saved:1 0.02", "resume:1 0.1"],
    "outside": ["step:0 5", "step:1 0.5", "step:3 0.4", "step:5 0.3"],
}
SPARSE = ["update:4 0.05", "generate:1 0.1", "row:2 0.01", "save:1 0.1"]
EXTERNAL = ["generate:2 0.1", "sync_weights:2 0.02", "update:2 0.05", "step:2 0.4"]
AHEAD_FLAGS = ("--config.rollout.max_staleness=2", "--config.rollout.in_flight=keep")
AHEAD = ["part:6 0.1", "offer:2 0.02"]  # FEW has the kill while a checkpoint is sealed
FEW = [
    "update:2 0.05",
    "term:2 0.05",
    "save:1 0.05",
    "seal:1 0.1",
]  # AHEAD has the one while sampling


def arguments(workdir, flags=()) -> list[str]:
    return [f"--config={CONFIG}", f"--workdir={workdir}", *flags]


def environment(mark: str) -> dict[str, str]:
    # Cache every program, because a killed run starts up to nine times and should compile once.
    return {MARK: mark, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def finished(workdir, flags=()) -> pathlib.Path:
    result = succeed(
        "launch.train", *arguments(workdir, flags), timeout=600, env=environment("none")
    )
    rewards = [float(v) for v in re.findall(r"reward ([+-]\d\.\d+)", result.stdout)]
    assert len(set(rewards)) > 1  # the run learns, so that lost work would show
    return workdir


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> pathlib.Path:
    """A finished run."""
    return finished(tmp_path_factory.mktemp("runs") / "uninterrupted")


@pytest.fixture(scope="module")
def uninterrupted_ahead(tmp_path_factory) -> pathlib.Path:
    """A finished run that samples two steps ahead."""
    return finished(tmp_path_factory.mktemp("runs") / "ahead", AHEAD_FLAGS)


def processes(mark: str) -> list[str]:
    """Command lines of the running processes with this mark."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:  # the process has ended meanwhile
            continue
    return found


def kill_once(kill: str, workdir, flags, random, mark: str) -> str:
    """Starts the run, ends it and waits until all its processes have ended; returns its output."""
    phase, within_s = kill.split()
    delay_s = random.uniform(0, float(within_s))
    asks = phase.startswith("term:")
    seen = ""
    if asks or phase.startswith("step:"):
        process = start("launch.train", *arguments(workdir, flags), env=environment(mark))
        if step := int(phase.partition(":")[2]):
            for line in process.stdout:
                seen += line
                found = re.match(r"step +(\d+)/", line)
                if found and int(found[1]) >= step:  # a resumed run may begin later
                    break
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM if asks else signal.SIGKILL)
    else:
        armed = (f"{phase}:{delay_s:.4f}", *arguments(workdir, flags))
        process = start("tests.launch.killed", *armed, env=environment(mark))
    out, err = process.communicate(timeout=30 if asks else 300)
    code = 75 if asks else -signal.SIGKILL
    assert process.returncode == code, (kill, process.returncode, out, err)
    if asks:
        assert "the same command resumes" in out
        assert "<html" in (workdir / "report.html").read_text()[:500]
    assert_no_orphans(mark)
    return seen + out


def assert_no_orphans(mark: str) -> None:
    """A child sees the end of its parent a moment later."""
    deadline = time.monotonic() + 15
    while orphans := processes(mark):
        assert time.monotonic() < deadline, f"they outlived their trainer: {orphans}"
        time.sleep(0.05)


def run_chain(uninterrupted, workdir, kills, *, seed, flags=(), warm=True) -> None:
    """Kills the run in `workdir` by all of `kills`, finishes it and compares."""
    if warm:
        shutil.copytree(uninterrupted / "warm_start", workdir / "warm_start")
        shutil.copy(uninterrupted / "config.json", workdir)
    random = np.random.default_rng(seed)
    mark = uuid.uuid4().hex
    for kill in kills:
        out = kill_once(kill, workdir, flags, random, mark)
        resumed = re.findall(r"at step (\d+)", out) or ["nothing"]
        finished = re.findall(r"step +(\d+)/", out) or ["none"]
        sealed = [file.parent.name for file in workdir.glob("checkpoints/*/manifest.0.json")]
        print(
            f"killed by {kill!r}: resumed {resumed[0]}, finished step {finished[-1]}, "
            f"sealed {sorted(sealed)}"
        )
    started = time.monotonic()
    result = succeed("launch.train", *arguments(workdir, flags), timeout=300, env=environment(mark))
    resumed = re.findall(r"at step (\d+)", result.stdout) or ["nothing"]
    print(f"then resumed {resumed[0]}, finished in {time.monotonic() - started:.0f} s")
    # The last sealed checkpoint is used: a kill loses only the work after it.
    assert resumed[0] == max(sealed, default="nothing"), (sealed, result.stdout)
    assert_same_run(workdir, uninterrupted, NUM_STEPS)
    assert_no_orphans(mark)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHAINS)
def test_killed_and_resumed_run_equals_an_uninterrupted_one(uninterrupted, tmp_path, name):
    seed = list(CHAINS).index(name)
    run_chain(uninterrupted, tmp_path / "run", CHAINS[name], seed=seed, warm=name != "warm_start")


@pytest.mark.soak
def test_killed_run_with_few_checkpoints_equals_an_uninterrupted_one(uninterrupted, tmp_path):
    """Whole steps are lost and repeated: the old rows, events and rollouts must not remain."""
    flags = ("--config.checkpoints.every_steps=4", "--config.checkpoints.keep=1")
    run_chain(uninterrupted, tmp_path / "run", SPARSE, seed=10, flags=flags)


@pytest.mark.soak
@pytest.mark.parametrize("replica", [CONFIG], indirect=True)
def test_a_replica_that_survives_its_trainers_samples_the_same(uninterrupted, tmp_path, replica):
    """Unfinished calls of the killed trainer must not disturb the next attempt."""
    flags = (f"--config.rollout.addresses={replica}",)
    run_chain(uninterrupted, tmp_path / "run", EXTERNAL, seed=11, flags=flags)


@pytest.mark.slow
def test_three_kills_and_a_signal(uninterrupted, tmp_path):
    run_chain(uninterrupted, tmp_path / "run", FEW, seed=12)


@pytest.mark.soak
def test_two_kills_of_a_run_that_samples_ahead(uninterrupted_ahead, tmp_path):
    """What was sampled and not trained on is sampled again, with the weights of then."""
    run_chain(uninterrupted_ahead, tmp_path / "run", AHEAD, seed=13, flags=AHEAD_FLAGS)


@pytest.mark.soak
def test_twenty_kills_of_a_run_that_samples_ahead(uninterrupted_ahead, tmp_path):
    """At random instants; four in a run, so that it gets on. A step takes about 0.2 s."""
    for number in range(5):
        kills = ["step:0 8", "step:1 0.5", "step:2 0.4", "step:3 0.3"]
        workdir = tmp_path / str(number)
        run_chain(uninterrupted_ahead, workdir, kills, seed=15 + number, flags=AHEAD_FLAGS)
