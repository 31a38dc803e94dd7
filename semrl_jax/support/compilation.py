"""Keeps JAX's compiled programs on disk for later starts, and names a program while it compiles.

JAX is loaded when a function is called, not when this module is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_KEPT_BYTES = 2**30  # a configuration takes a few MiB
TOLD_FROM_S = 1.0  # a long compilation, which is reported; a cached read takes ms

# JAX announces the beginning of each stage of a compilation as a scalar, its end as a duration.
COMPILES = "/jax/core/compile/backend_compile_duration"
STAGES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILES,
)


class _Stage(NamedTuple):
    """A stage that a thread is in: the program, and the `time.monotonic()` of its beginning."""

    program: str
    since: float


_running: dict[int, list[_Stage]] = {}  # by thread; the tracing of a program may trace others


def current() -> str:
    """What this process compiles now, as "decode_chunk" or "decode_chunk for 12 s"; "": nothing."""
    # Another thread may be between two of its changes, so that a list is empty.
    outermost = [stage for stages in list(_running.values()) for stage in stages[:1]]
    if not outermost:
        return ""
    stage = min(outermost, key=lambda stage: stage.since)
    seconds = time.monotonic() - stage.since
    return f"{stage.program} for {seconds:.0f} s" if seconds >= 1 else stage.program


def keep_programs() -> None:
    """Makes JAX keep compiled programs in a directory of the user, for later processes.

    The key of a program covers everything it depends on: the computation, the versions, XLA's flags
    and the instructions of the processor.

    JAX's own variables have priority. With $JAX_COMPILATION_CACHE_DIR, this function does nothing.
    With $JAX_ENABLE_COMPILATION_CACHE=0, nothing is kept. $JAX_COMPILATION_CACHE_MAX_SIZE replaces
    the limit MAX_KEPT_BYTES, in bytes. The limit is applied only here, because JAX's own removal
    scans the directory for every program, and stops working after a process was killed during it.
    If the directory cannot be written, nothing is kept and standard error gets one line.
    """
    import jax

    config = jax.config
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    limit = config.jax_compilation_cache_max_size
    directory = pathlib.Path("$XDG_CACHE_HOME or ~/.cache")
    try:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        base = pathlib.Path(cache) if os.path.isabs(cache) else pathlib.Path.home() / ".cache"
        directory = base / "semrl_jax" / "xla"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        clean(directory, MAX_KEPT_BYTES if limit == -1 else limit)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(2**20))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = getattr(error, "strerror", None) or error
        line = (
            f"compiled programs are not kept for later starts ({directory}: {reason}); set "
            "JAX_COMPILATION_CACHE_DIR to a directory that can be written"
        )
        print(line, file=sys.stderr, flush=True)
        return
    config.update("jax_compilation_cache_dir", str(directory))
    config.update("jax_compilation_cache_max_size", -1)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # If a program cannot be read or written, for example on a full disk, this only costs time.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def clean(directory: pathlib.Path, limit: int) -> None:
    """Removes incomplete files of killed writers, and above `limit` bytes the longest unused ones.

    JAX does not write a program atomically, and does not replace one that it cannot read.
    """
    checked = directory / "checked"
    since = checked.stat().st_mtime if checked.exists() else 0.0
    checked.touch()
    kept = []
    for file in directory.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            found = file.stat()
            if found.st_mtime >= since and not _is_whole(file.read_bytes()):
                file.unlink()
            else:
                kept.append((max(found.st_atime, found.st_mtime), found.st_size, file))
    excess = sum(size for _, size, _ in kept) - limit
    for _, size, file in sorted(kept):
        if excess <= 0:
            break
        file.unlink(missing_ok=True)
        excess -= size


def _is_whole(entry: bytes) -> bool:
    """Whether an entry is complete; with a compression other than zlib, whether it is not empty."""
    if entry[:1] != b"\x78":  # the first byte of zlib
        return bool(entry)
    try:
        zlib.decompress(entry)
    except zlib.error:
        return False
    return True


@contextlib.contextmanager
def watching(say: Callable[[str], None]) -> Iterator[None]:
    """Tracks compilations for `current`; says the first long one, and frees their memory."""
    import jax

    told = threading.Event()

    def begins(event: str, value: float | int, fun_name: str = "a program", **_: object) -> None:
        if event in STAGES:
            name = fun_name.partition(" at ")[0].removeprefix("jit(").removesuffix(")")
            stages = _running.setdefault(threading.get_ident(), [])
            stages.append(_Stage(name, time.monotonic()))

    def ends(event: str, seconds: float | int, **_: object) -> None:
        thread = threading.get_ident()
        # Nothing if the stage began before the block, or the block has ended in another thread.
        if event in STAGES and (stages := _running.get(thread)):
            stages.pop()
            if not stages:
                _running.pop(thread, None)
        if event != COMPILES or seconds < TOLD_FROM_S:
            return
        _return_memory()
        if not told.is_set():
            told.set()
            directory = jax.config.jax_compilation_cache_dir
            kept = directory and jax.config.jax_enable_compilation_cache
            later = f"; later starts read them from {directory}" if kept else ""
            say(f"compiling programs{later}")

    jax.monitoring.register_scalar_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)
    try:
        yield
    finally:
        jax.monitoring.unregister_scalar_listener(begins)
        jax.monitoring.unregister_event_duration_listener(ends)
        _running.clear()  # ends of compilations in other threads are no longer received


def _return_memory() -> None:
    """glibc keeps what the compiler freed, up to gigabytes; other C libraries have no such call."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
