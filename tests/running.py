"""The state of a process, and waits for a state."""

import pathlib
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; a zombie has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended before or during the read
        return False
