"""One training run in several processes on this machine, for tests that end one of them."""

import socket

from tests.launch.conftest import TINY, start, xla_flags


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_processes(workdir, count, *flags, own_flags=None, own_launcher=None, devices=2):
    """Starts `launch.train` `count` times, with `devices` CPU devices each, as subprocesses.

    own_flags: flags of single processes, by process index.
    own_launcher: by process index, another module that starts training, and its first arguments.
    """
    port, launchers = free_port(), own_launcher or {}
    return [
        start(
            *launchers.get(index, ("launch.train",)), f"--config={TINY}", f"--workdir={workdir}",
            f"--config.distributed.coordinator=127.0.0.1:{port}",
            f"--config.distributed.num_processes={count}",
            f"--config.distributed.process_id={index}",
            "--config.distributed.heartbeat_timeout_s=10",
            *flags, *(own_flags or {}).get(index, ()),
            env={"XLA_FLAGS": xla_flags(devices)},
        )
        for index in range(count)
    ]  # fmt: skip


def finish(processes, timeout_s=600):
    """Waits for all and kills the rest; returns (exit code, stdout, stderr) of each."""
    try:
        found = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, found)]
