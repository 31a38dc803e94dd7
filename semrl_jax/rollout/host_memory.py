"""The memory of this process, on the machine and in its container: all, and what is still free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Iterator

# Names in control groups, versions 2 and 1: files of limit and use, and the entry of memory.stat
# for the part of the use that the kernel reclaims first.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def give_back() -> None:
    """Returns freed memory to the system; glibc would keep that of arrays below 32 MiB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes that this process can allocate without swapping and without exceeding a memory limit.

    The smaller of the kernel's estimate for the machine and what each control group (a container)
    leaves. Tests set `root`, the directory with proc and sys.
    """
    return min([_of_machine(root, "MemAvailable"), *_left_in_groups(root)])


def total_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes, swap included, that the machine and each control group let this process allocate."""
    swap = _of_machine(root, "SwapTotal")
    found = [_of_machine(root, "MemTotal")]
    for folder, (limit, _, _) in _groups(root):
        for text in _lines(folder / limit):
            if text != "max":
                found.append(int(text))
    return min(found) + swap


def _of_machine(root: pathlib.Path, name: str) -> int:
    """A line of /proc/meminfo, in bytes; 0 without such a line.

    Without the file, as on macOS, all memory counts as free, and swap is not known.
    """
    if not (fields := dict(line.split(":") for line in _lines(root / "proc/meminfo"))):
        is_swap = name == "SwapTotal"
        return 0 if is_swap else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(fields.get(name, "0").split()[0]) * 1024


def _left_in_groups(root: pathlib.Path) -> Iterator[int]:
    """Bytes left in each control group of this process, and in each group around it."""
    for folder, (limit, used, reclaimable) in _groups(root):
        try:
            most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        except OSError:
            continue  # the group is not visible here, or has no limit, as the outermost one
        if most != "max":
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            yield max(int(most) - now + int(stat.get(reclaimable, 0)), 0)


def _groups(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[str, str, str]]]:
    """The control groups of this process and the groups around them; the names of their files."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", V1
        else:
            continue
        # In a container the path may be the host's. Then the files are in the top directory.
        own = top / group.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield folder, names


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
