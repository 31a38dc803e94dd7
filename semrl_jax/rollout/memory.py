"""Memory that this process may still take: the machine's, and its container's."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

# Of a control group of either version: limit, use, and what of the use the kernel gives up first.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes that can be taken without swapping, as the kernel estimates it, or before a limit of a
    control group (a container's) ends the process.

    Args:
      root: where /proc and /sys are looked for.
    """
    fields = dict(line.split(":") for line in _lines(root / "proc/meminfo"))
    of_machine = int(fields["MemAvailable"].split()[0]) * 1024
    return min([of_machine, *_left_in_groups(root)])


def _left_in_groups(root: pathlib.Path) -> Iterator[int]:
    """What each group that this process is in, and each group around it, has left."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", V1
        else:
            continue
        # In a container the group's own path may be the host's; its files are then at the top.
        own = top / group.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield from _left_in_group(folder, *names)


def _left_in_group(folder: pathlib.Path, limit: str, used: str, reclaimable: str) -> Iterator[int]:
    try:
        most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
    except OSError:
        return  # no such group here, or one without limits, as the outermost
    if most != "max":
        stat = dict(line.split() for line in _lines(folder / "memory.stat"))
        yield max(int(most) - now + int(stat.get(reclaimable, 0)), 0)


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
