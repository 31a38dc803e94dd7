"""A run that samples ahead goes through random faults, and loses or repeats nothing.

    SEMRL_SOAK_MINUTES=30 SEMRL_SOAK_SEED=0 pytest -m soak -n 0 -s tests/launch/test_soak_ahead.py

The processes are those of a user: launch.train and three launch.rollout. One replica reads the
weights from the trainer's memory, two get them through the connection. All connections lead through
proxies.
"""

import bisect
import collections
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from semrl_jax.runs.lifecycle import EXIT_PREEMPTED
from semrl_jax.runs.records import read_rows
from tests.launch.comparison import assert_same_run
from tests.launch.conftest import ROOT, environment, succeed
from tests.rollout.proxy import Proxy

MINUTES = float(os.environ.get("SEMRL_SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SEMRL_SOAK_SEED", "0"))
CONFIG = ROOT / "tests" / "launch" / "soak_config.py"
NUM_GROUPS = GROUP_SIZE = 4
MORE_STEPS = 5  # without faults, at the end
LONGEST_FAULT_S = 40.0
LONGEST_WAIT_S = 300.0  # from a row to the next, starts of the trainer included
LONGEST_SILENCE_S = 100.0  # of a trainer that runs: every wait is reported every 10 s
# Keys of the rows that count costs of failures, or that only a run with several replicas has.
COSTS = (
    "rollout/retries", "rollout/taken_over", "rollout/duplicates", "rollout/replica_failures",
    "rollout/weight_bytes", "rollout/token_bytes", "rollout/state_bytes", "replica/",
)  # fmt: skip
# Seconds between two faults of a kind, on average.
FAULTS = {
    "replica killed": 40, "replica stopped": 25, "connections cut": 20,
    "cut while weights or requests pass": 20, "cut while responses pass": 20,
    "delayed": 40, "throttled": 40, "silent": 40,
    "trainer killed": 75, "trainer ended": 400, "trainer stopped": 150,
}  # fmt: skip


class Service:
    """A process that is started again whenever a fault has ended it."""

    def __init__(self, log: pathlib.Path, *arguments: str):
        self._log, self._arguments = log, arguments
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()
        with open(self._log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments],
                cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                # Programs are compiled once for all starts.
                env=environment()
                | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONFAULTHANDLER": "1"},
            )  # fmt: skip

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stacks(self) -> str:
        """Ends it; returns the end of its log with the stacks of its threads."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGABRT)
        self.process.wait(30)
        return self.log()[-20_000:]

    def usage(self) -> tuple[int, int, int] | None:
        """MiB of memory, threads and open files; None if it has ended."""
        entry = pathlib.Path(f"/proc/{self.process.pid}")
        try:
            status = (entry / "status").read_text()
            found = [int(re.search(rf"{name}:\s*(\d+)", status)[1]) for name in ("VmRSS", "Thr.*")]
            return found[0] // 1024, found[1], len(list((entry / "fd").iterdir()))
        except (OSError, TypeError):
            return None


class World(contextlib.ExitStack):
    """The trainer, its replicas, and the faults that come and go."""

    def __init__(self, directory: pathlib.Path, seed: int):
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.workdir = directory / "run"
        self._began, self._timeline = time.monotonic(), directory / "timeline.txt"
        self._due = []  # (time, number, what is done then), sorted
        self._num_due = 0
        self.replicas, self.proxies = [], []
        for number, module in enumerate(("launch.rollout", *["tests.launch.far_replica"] * 2)):
            port = socket.socket()  # bound, so that no other process is given it
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            self.callback(port.close)
            port = port.getsockname()[1]
            log = directory / f"replica{number}.txt"
            replica = Service(log, module, f"--config={CONFIG}", f"--port={port}")
            self.callback(replica.kill)
            self.replicas.append(replica)
            self.proxies.append(self.enter_context(Proxy(f"127.0.0.1:{port}")))
        self.trainer = Service(directory / "trainer.txt", "launch.train", *self.arguments())
        self.callback(self.trainer.kill)
        lines = open(directory / "trainer.txt", errors="replace")  # noqa: SIM115 - ends with this
        self._lines = self.enter_context(lines)

    def arguments(self) -> list[str]:
        addresses = [f"--config.rollout.addresses={proxy.address}" for proxy in self.proxies]
        return [f"--config={CONFIG}", f"--workdir={self.workdir}", *addresses]

    def rows(self) -> list[dict]:
        return read_rows(self.workdir / "metrics.jsonl")

    def note(self, text: str) -> None:
        """Adds lines to a file that shows the faults between the lines of the trainer."""
        seconds = time.monotonic() - self._began
        with open(self._timeline, "a") as out:
            out.writelines(f"{seconds:8.1f} {line}\n" for line in text.splitlines())

    def note_lines(self) -> bool:
        """Notes what the trainer has printed; returns whether there was anything."""
        new = self._lines.read()
        self.note(new)
        return bool(new)

    def later(self, seconds: float, action) -> None:
        self._num_due += 1
        bisect.insort(self._due, (time.monotonic() + seconds, self._num_due, action))

    def do_due(self, all_of_them: bool = False) -> None:
        while self._due and (all_of_them or self._due[0][0] <= time.monotonic()):
            self._due.pop(0)[2]()

    def inject(self) -> None:
        """Begins a fault; its end comes by `do_due`."""
        rates = 1 / np.array(list(FAULTS.values()))
        kind = str(self.random.choice(list(FAULTS), p=rates / rates.sum()))
        number = self.random.integers(len(self.replicas))
        replica, proxy = self.replicas[number], self.proxies[number]
        # Most are short; some exceed every limit of a wait.
        seconds = float(np.exp(self.random.uniform(np.log(0.2), np.log(LONGEST_FAULT_S))))
        self.counts[kind] += 1
        self.note(f"FAULT {kind}, replica {number}, {seconds:.1f} s")
        match kind:
            case "replica killed":
                replica.kill()
                replica.start()
            case "replica stopped":
                self.stopped(replica, seconds)
            case "connections cut":
                proxy.cut()
            case "cut while weights or requests pass":
                proxy.up.cut_after = proxy.up.num_bytes + int(self.random.integers(1, 60_000))
            case "cut while responses pass":
                proxy.down.cut_after = proxy.down.num_bytes + int(self.random.integers(1, 60_000))
            case "delayed":
                for way in (proxy.up, proxy.down):
                    way.delay_s = float(self.random.uniform(0.01, 0.2))
                    self.later(seconds, lambda way=way: setattr(way, "delay_s", 0.0))
            case "throttled":
                for way in (proxy.up, proxy.down):
                    way.bytes_per_s = float(self.random.uniform(1e4, 1e6))
                    self.later(seconds, lambda way=way: setattr(way, "bytes_per_s", None))
            case "silent":
                way = (proxy.up, proxy.down)[self.random.integers(2)]
                way.stopped.set()
                self.later(seconds, way.stopped.clear)
            case "trainer killed":
                self.trainer.kill()
                self.trainer.start()
            case "trainer ended":
                self.trainer.send(signal.SIGTERM)  # `check` starts it again
            case "trainer stopped":
                self.stopped(self.trainer, min(seconds, 10.0))

    @property
    def trainer_is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            status = pathlib.Path(f"/proc/{self.trainer.process.pid}/status").read_text()
            return "State:\tT" in status
        return False

    def stopped(self, service: Service, seconds: float) -> None:
        service.send(signal.SIGSTOP)
        self.later(seconds, lambda: service.send(signal.SIGCONT))

    def check(self) -> None:
        """Nothing ends without a fault; a trainer that SIGTERM has ended is started again."""
        for replica in self.replicas:
            assert replica.process.poll() is None, replica.log()[-5000:]
        code = self.trainer.process.poll()
        if code == EXIT_PREEMPTED or code == -signal.SIGTERM:  # in its first moments
            self.trainer.start()
        else:
            assert code is None, (code, self.trainer.log()[-5000:])


def disturb(world: World, seconds: float) -> tuple[float, float, int, list[dict]]:
    """Injects faults for so long.

    Returns:
      The longest time without a new step, and without a line of a trainer that runs; the most MiB
      of a replica; and the trainer's memory, threads and open files by the seconds since its start,
      for each start.
    """
    end, next_fault = time.monotonic() + seconds, 0.0
    longest_s = silent_s = 0.0
    newest = heard = shown = time.monotonic()
    size, peak, lives = 0, 0, {}
    while (now := time.monotonic()) < end or not world.rows():
        world.do_due()
        world.check()
        file = world.workdir / "metrics.jsonl"
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            size, newest = found, now
        if world.note_lines() or world.trainer_is_stopped:
            heard = now
        longest_s = max(longest_s, now - newest)
        silent_s = max(silent_s, now - max(heard, world.trainer.started))
        assert longest_s < LONGEST_WAIT_S, world.trainer.stacks()
        assert silent_s < LONGEST_SILENCE_S, world.trainer.stacks()
        if now > next_fault and size:
            world.inject()
            next_fault = now + world.random.exponential(1 / sum(1 / s for s in FAULTS.values()))
        if usage := world.trainer.usage():
            life = lives.setdefault(world.trainer.started, {})
            if len(life) < now - world.trainer.started:  # once a second
                life[now - world.trainer.started] = usage
                peak = max(peak, *((replica.usage() or (0,))[0] for replica in world.replicas))
        if now - shown > 60:
            shown = now
            print(f"{end - now:.0f} s left, step {world.rows()[-1]['step']}, {usage}", flush=True)
        time.sleep(0.1)
    return longest_s, silent_s, peak, list(lives.values())


def finish(world: World) -> int:
    """Ends all faults; the run goes on for a few steps and ends. Returns their number."""
    world.do_due(all_of_them=True)
    world.trainer.kill()
    num_steps = world.rows()[-1]["step"] + MORE_STEPS
    more = f"--config.training.num_steps={num_steps}"
    succeed("launch.train", *world.arguments(), more, timeout=300)
    return num_steps


def show(rows: dict[str, object]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}", flush=True)


@pytest.mark.soak
def test_random_faults_change_nothing(tmp_path):
    began = time.monotonic()
    with World(tmp_path, SEED) as world:
        longest_s, silent_s, peak, lives = disturb(world, 60 * MINUTES)
        disturbed_s = time.monotonic() - began
        num_steps = finish(world)
        log = world.trainer.log()
    rows = world.rows()
    life = max(lives, key=len)
    last = max(life)
    first = min(at for at in life if at >= last / 2)  # all programs are loaded

    def total(name: str) -> int:
        return int(sum(row.get(f"rollout/{name}", 0) for row in rows))

    show(
        {
            "seed": SEED,
            "seconds with faults": round(disturbed_s),
            "steps": num_steps,
            "responses": num_steps * NUM_GROUPS * GROUP_SIZE,
            **dict(sorted(world.counts.items())),
            "faults": sum(world.counts.values()),
            "starts of the trainer": len(lives),
            "replicas set aside, in steps that count": total("replica_failures"),
            "set aside, lines": len(re.findall("is set aside", log)),
            "weights given again, lines": len(re.findall("has weights .* again", log)),
            "retries, in steps that count": total("retries"),
            "asked of an idle replica too": total("taken_over"),
            "longest time without a step, s": round(longest_s, 1),
            "and without a line of a running trainer, s": round(silent_s, 1),
            "trainer's peak MiB": max(usage[0] for one in lives for usage in one.values()),
            "replicas' peak MiB": peak,
            f"MiB, threads, files {first:.0f} s after its longest start": life[first],
            f"and after {last:.0f} s": life[last],
        }
    )
    expected = tmp_path / "expected"
    started = time.monotonic()
    succeed(
        "launch.train", f"--config={CONFIG}", f"--workdir={expected}",
        f"--config.training.num_steps={num_steps}", timeout=60 * MINUTES + 600,
    )  # fmt: skip
    show({"undisturbed run, s": round(time.monotonic() - started)})
    # Equal files have no response less or twice.
    assert_same_run(world.workdir, expected, num_steps, COSTS)
    assert len({row["reward/mean"] for row in rows[:-1]}) > 5  # lost work would show
    assert [row["rollout/staleness/max"] for row in rows[:-1]] == [
        min(step, 2) for step in range(num_steps)
    ]
    assert life[last][0] - life[first][0] < 100
