"""Helper for tests that wait for processes."""

import pathlib


def is_running(pid: int) -> bool:
    """Whether this process exists and has not ended; a zombie has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended, perhaps during the read
        return False
