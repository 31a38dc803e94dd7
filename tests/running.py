"""Processes that a test waits for."""

import pathlib


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended, waited for or not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone, or going while it is read
        return False
