"""The machine on which figures were measured."""

import os
import pathlib
import platform

from semrl_jax.runs.workdir import versions


def description() -> str:
    """One line: processor, the cores this process may use, package versions and revision."""
    packages = ", ".join(f"{name} {version[:12]}" for name, version in versions().items())
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores; {packages}"


def _processor() -> str:
    """The processor's name as Linux reports it; on other systems, as Python reports it."""
    file = pathlib.Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
