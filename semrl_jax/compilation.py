"""What JAX compiles: kept on disk for later starts, and named while somebody waits for it.

Loads JAX where it is called, not where it is imported.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator

MAX_KEPT_BYTES = 2**30  # one configuration takes a few MiB; above it the least recently used go
TOLD_FROM_S = 1.0  # reading a kept program takes milliseconds, compiling it from here on is told

# JAX announces the beginning of each compilation as a scalar, its end as a duration.
_COMPILES = "/jax/core/compile/backend_compile_duration"
_running: dict[int, str] = {}  # program by thread


def current() -> str:
    """The program that a thread of this process compiles now, "" where none does."""
    return next(iter(list(_running.values())), "")


def keep_programs() -> None:
    """Makes JAX keep compiled programs in a directory of the user's, for later processes.

    The key of a program has all that it depends on: the computation, the versions, XLA's flags and
    the instructions of the processor. A program that was read is the one that was compiled.

    JAX's own variables come first: with $JAX_COMPILATION_CACHE_DIR set nothing is done here,
    $JAX_ENABLE_COMPILATION_CACHE=0 keeps nothing, $JAX_COMPILATION_CACHE_MAX_SIZE is a limit in
    bytes other than MAX_KEPT_BYTES. The limit is applied here alone, at a start: JAX's own removal
    scans the directory at every program, and stops working once a process was killed in it. A
    directory that cannot be written is said in one line on standard error, and nothing is kept.
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
        print(
            f"compiled programs are not kept for later starts ({directory}: {reason}); set "
            "JAX_COMPILATION_CACHE_DIR to a directory that can be written",
            file=sys.stderr,
            flush=True,
        )
        return
    config.update("jax_compilation_cache_dir", str(directory))
    config.update("jax_compilation_cache_max_size", -1)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A program that cannot be read or written, as on a disk that is full by now, costs time alone.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def clean(directory: pathlib.Path, limit: int) -> None:
    """Removes what a killed writer left torn, and above `limit` bytes what was unused for longest.

    JAX neither writes a program in one piece nor replaces one that it cannot read. Other processes
    may use the directory meanwhile: what they lose they compile.
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
    """Whether an entry has its end; of other compressions than JAX's own, whether it has any."""
    if entry[:1] != b"\x78":  # of zlib
        return bool(entry)
    try:
        zlib.decompress(entry)
    except zlib.error:
        return False
    return True


@contextlib.contextmanager
def watching(say: Callable[[str], None]) -> Iterator[None]:
    """Lets `current` know what is compiled in the block, and says one line once that takes time."""
    import jax

    told = threading.Event()

    def begins(event: str, value: float | int, fun_name: str = "a program", **_: object) -> None:
        if event == _COMPILES:
            _running[threading.get_ident()] = fun_name.removeprefix("jit(").removesuffix(")")

    def ends(event: str, seconds: float | int, **_: object) -> None:
        if event != _COMPILES:
            return
        _running.pop(threading.get_ident(), None)
        if seconds >= TOLD_FROM_S and not told.is_set():
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
        _running.clear()  # the end of a compilation in another thread is not heard any more
