"""Trains with several processes on this machine, on CPUs.

    python -m launch.local --processes=2 --devices_per_process=2 -- \\
        --config=configs/quickstart.py --workdir=runs/two

Starts --processes copies of launch.train with the arguments after the two dashes. They are joined
over loopback. Every printed line begins with [its process]. When one of them fails, the others get
SIGTERM and, --grace_s later, SIGKILL. SIGTERM and SIGINT are passed on to all. If this command
itself is killed, they are killed too (Linux). Exit codes: 0 all done, 2 wrong setting,
otherwise the exit code of the first process that failed (launch.train: 75 ended by a signal, 76
another process was lost; 128 + N: killed by signal N).
"""

import contextlib
import functools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from absl import flags

from launch import cli
from semrl_jax.support.errors import UserError
from semrl_jax.support.guard import die_with_parent

PROCESSES = flags.DEFINE_integer(
    "processes", None, "number of processes of launch.train", lower_bound=1, upper_bound=256
)
DEVICES = flags.DEFINE_integer(
    "devices_per_process", 1, "CPU devices of each process", lower_bound=1, upper_bound=4096
)
GRACE_S = flags.DEFINE_float(
    "grace_s", 60.0, "from SIGTERM to SIGKILL; must be above training.grace_s to save a checkpoint"
)


def main() -> int:
    count = cli.required(PROCESSES)
    if not GRACE_S.value > 0:
        raise UserError(f"--grace_s={GRACE_S.value} must be above 0.")
    if not TRAIN_ARGUMENTS:
        raise UserError("the arguments of launch.train are needed, after --; see --help.")
    command = [sys.executable, "-m", "launch.train", *TRAIN_ARGUMENTS]
    return Job(command, count, DEVICES.value, GRACE_S.value).run()


class Job:
    """`count` processes of `command`; `grace_s` lies between a signal to end and SIGKILL."""

    def __init__(self, command: list[str], count: int, devices: int, grace_s: float):
        self._command, self._count, self._devices = command, count, devices
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen] = []
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._kill_at = float("inf")
        self._signal = 0
        self._printing = threading.Lock()

    def run(self) -> int:
        """Starts all and waits for all; returns the first exit code that is not 0, or 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.end)
        first, address, readers = 0, _free_address(), []
        try:
            # Start all processes before the first thread: preexec_fn is unsafe with other threads.
            for index in range(self._count):
                self._processes.append(self._start(index, address))
            if self._signal:  # it arrived while the processes were being started
                self._send(self._signal)
            readers = [self._watch(index) for index in range(len(self._processes))]
            for _ in self._processes:
                index, code = self._next_end()
                first = first or code
                if code and not self._signal:
                    self._say(f"process {index} ended with exit code {code}; ending all others")
                    self.end(signal.SIGTERM)
        finally:
            self._send(signal.SIGKILL)  # to processes that they started and left
        for reader in readers:
            reader.join(timeout=5.0)
        return first

    def end(self, number: int, _frame=None) -> None:
        """Asks all to end, and kills the rest after the grace; a second SIGINT kills at once."""
        if self._signal == number == signal.SIGINT:
            self._kill_at = 0.0
        if not self._signal:
            self._kill_at = time.monotonic() + self._grace_s
            self._signal = number
            self._send(number)

    def _start(self, index: int, address: str) -> subprocess.Popen:
        inherited = os.environ.get("XLA_FLAGS", "")
        forced = "--xla_force_host_platform_device_count"
        environment = {
            "JAX_PLATFORMS": "cpu",  # unless the environment says otherwise
            **os.environ,
            "XLA_FLAGS": f"{re.sub(forced + r'=[0-9]+', '', inherited)} {forced}={self._devices}",
            "PYTHONUNBUFFERED": "1",
        }
        place = {"coordinator": address, "num_processes": self._count, "process_id": index}
        settings = [f"--config.distributed.{field}={value}" for field, value in place.items()]
        dies_with_this = functools.partial(die_with_parent, os.getpid(), signal.SIGKILL)
        return subprocess.Popen(
            [*self._command, *settings],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # In a session of its own, a process gets the SIGINT of Ctrl-C only once, from here.
            start_new_session=True,
            preexec_fn=dies_with_this if sys.platform == "linux" else None,
        )

    def _watch(self, index: int) -> threading.Thread:
        """Prints a process's lines, and puts its exit code into the queue."""
        process = self._processes[index]

        def read():
            for line in process.stdout:
                self._write(b"[%d] %s\n" % (index, line.rstrip(b"\r\n")))

        def wait():
            self._ended.put((index, process.wait()))

        threading.Thread(target=wait, daemon=True).start()
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        return reader

    def _next_end(self) -> tuple[int, int]:
        """Waits for the next process to end; returns its index and its exit code as in a shell."""
        while True:
            # Python handles signals between two of these waits.
            with contextlib.suppress(queue.Empty):
                index, code = self._ended.get(timeout=0.2)
                return index, code if code >= 0 else 128 - code
            if time.monotonic() >= self._kill_at:
                self._say("SIGKILL to the processes that are left")
                self._kill_at = float("inf")
                self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Sends a signal to the processes; SIGKILL also to the processes that they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)  # the session's group: start_new_session
                else:
                    process.send_signal(number)

    def _say(self, line: str) -> None:
        self._write(f"python -m launch.local: {line}\n".encode())

    def _write(self, line: bytes) -> None:
        # If the reader of this output has ended, the run continues.
        with self._printing, contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    # Everything after the two dashes belongs to launch.train, also flags with the same names.
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    TRAIN_ARGUMENTS = sys.argv[split + 1 :]
    del sys.argv[split:]
    cli.run(main, __doc__)
