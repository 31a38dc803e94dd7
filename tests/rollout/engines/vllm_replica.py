"""A vLLM replica in its own process, in the environment that make_env.sh makes."""

import contextlib
import os
import pathlib
import subprocess
import threading

from semrl_jax.rollout.client import RolloutClient
from tests.rollout.caller import Caller

ROOT = pathlib.Path(__file__).parents[3]
PYTHON = pathlib.Path(os.environ.get("SEMRL_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
TOKEN = "a-token-for-tests-of-vllm"
START_S = 400.0
LAUNCHER = "launch.rollout"
OBSERVED_LAUNCHER = "tests.rollout.engines.vllm_observed"


def environment(**variables):
    """The environment of this process, without the settings of the tests for JAX."""
    assert PYTHON.exists(), (
        f"{PYTHON} is missing: run third_party/vllm_patch/make_env.sh, or set SEMRL_VLLM_PYTHON."
    )
    return {
        **os.environ, "XLA_FLAGS": "", "SEMRL_ROLLOUT_TOKEN": TOKEN, "VLLM_LOGGING_LEVEL": "ERROR",
        # The engine runs in the replica's process, so one process less has to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **variables,
    }  # fmt: skip


class ReplicaProcess:
    """`launch.rollout --engine=vllm` on a free port; a thread reads its `lines` of output."""

    def __init__(self, model_path, *flags, launcher=LAUNCHER, variables=None):
        self.lines = []
        self._listening = threading.Event()
        self.process = subprocess.Popen(
            [
                str(PYTHON), "-m", launcher, "--engine=vllm", "--port=0",
                "--until_stdin_closes",  # as when pytest is killed
                "--config=configs/quickstart.py", f"--config.model.path={model_path}",
                "--config.rollout.vllm_enforce_eager=True", *flags,
            ],
            cwd=ROOT, env=environment(**(variables or {})), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "listens on" in line:
                self._listening.set()
        self._listening.set()

    def address(self):
        """Its host:port; fails with its output if the process ends first."""
        assert self._listening.wait(START_S), self.lines
        found = [line.split()[-1] for line in self.lines if "listens on" in line]
        assert found, self.lines
        return found[0]

    def client(self):
        """A client whose calls fail after a minute if the engine hangs."""
        return RolloutClient(
            (self.address(),), TOKEN, run_id="run", attempt_id="attempt", connect_timeout_s=10.0,
            sync_timeout_s=60.0, generate_timeout_s=60.0, stall_timeout_s=30.0,
        )  # fmt: skip

    def caller(self):
        """For calls that the client does not make; close it."""
        return Caller(self.address(), TOKEN)

    def wait(self, timeout_s):
        """The exit code, after all output was read."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def descendants(self):
        return descendants(self.pid)

    def kill(self):
        self.process.kill()
        self.process.wait()


def descendants(pid):
    """Process ids of its children and of their descendants."""
    found, unseen = [], [pid]
    while unseen:
        tasks = pathlib.Path(f"/proc/{unseen.pop()}/task")
        for task in tasks.glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(child) for child in task.read_text().split()]
                found += children
                unseen += children
    return found


@contextlib.contextmanager
def running(model_path, *flags, **settings):
    """A replica that is killed after the block."""
    replica = ReplicaProcess(model_path, *flags, **settings)
    try:
        yield replica
    finally:
        replica.kill()


@contextlib.contextmanager
def serving(model_path, *flags, **settings):
    """A client of a replica that must end with exit code 0 after the block."""
    with running(model_path, *flags, **settings) as replica, replica.client() as client:
        client.replica = replica
        yield client
        replica.process.terminate()
        assert replica.wait(30) == 0, replica.lines
