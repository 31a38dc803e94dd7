"""The machine on which figures were measured, and what runs on it."""

import os
import pathlib
import platform
from collections.abc import Mapping

from semrl_jax.runs import workdir

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def description() -> str:
    """One line: processor, the cores this process may use, package versions and revision."""
    return f"{hardware()}; {versions()}"


def hardware() -> str:
    """Processor and the cores this process may use."""
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores"


def versions(others: Mapping[str, str] | None = None) -> str:
    """Package versions and revision, and those of other packages."""
    found = workdir.versions() | dict(others or {})
    return ", ".join(f"{name} {version[:12]}" for name, version in found.items())


def cpu_seconds(session: int) -> tuple[float, float]:
    """CPU seconds of the whole machine and of the processes of a session that run now; Linux."""
    total = [
        int(field) for field in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    ]
    user, nice, system, _idle, _wait, *interrupts = total
    own = 0
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # Fields from the third on: the second, the name, may have spaces.
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(fields[3]) == session:
            own += int(fields[11]) + int(fields[12])
    return (user + nice + system + sum(interrupts)) / TICKS_PER_S, own / TICKS_PER_S


def peak_mib(process: int) -> float:
    """Largest resident memory that a running process has had, in MiB; Linux."""
    for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines():
        field, _, value = line.partition(":")
        if field == "VmHWM":
            return int(value.split()[0]) / 1024
    raise RuntimeError(f"process {process} has ended.")


def _processor() -> str:
    """The processor's name as Linux reports it; on other systems, as Python reports it."""
    file = pathlib.Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
