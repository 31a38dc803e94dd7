"""Where compiled programs are kept, which are removed, and how a compilation is reported."""

import ctypes
import os
import pathlib
import time
import zlib

import jax
import jax.numpy as jnp
import pytest

from semrl_jax.support import compilation

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """JAX without settings of a cache; $XDG_CACHE_HOME is `tmp_path`."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # JAX's own
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "semrl_jax" / "xla"
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_users_cache(unset, capfd):
    compilation.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
    assert unset.stat().st_mode & 0o077 == 0  # whoever can write there can run code here
    assert capfd.readouterr() == ("", "")


def test_a_relative_cache_home_is_ignored(unset, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    compilation.keep_programs()
    assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/.cache/semrl_jax/xla"


@pytest.mark.parametrize(
    "name, value",
    [("jax_compilation_cache_dir", "/elsewhere"), ("jax_enable_compilation_cache", False)],
)
def test_the_users_choice_comes_first(unset, name, value):
    jax.config.update(name, value)
    compilation.keep_programs()
    assert getattr(jax.config, name) == value
    assert not unset.exists()
    assert jax.config.jax_persistent_cache_min_compile_time_secs != 0.0


def test_a_directory_that_cannot_be_written_is_reported_in_one_line(unset, capfd):
    unset.parent.mkdir()
    unset.write_text("")  # a file instead of the directory
    compilation.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1
    assert f"not kept for later starts ({unset}: File exists)" in err


def test_incomplete_programs_are_removed(tmp_path):
    whole = zlib.compress(bytes(range(256)) * 100)
    entries = {"whole": whole, "torn": whole[:-7], "empty": b"", "other": b"\x28\xb5\x2f\xfd"}
    for name, content in entries.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
    (tmp_path / "notes").write_bytes(b"x")
    compilation.clean(tmp_path, 2**20)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"whole-cache", "other-cache", "notes", "checked"}
    # A file older than the last check is not read again, so it stays although it is incomplete.
    old = time.time() - 1000
    (tmp_path / "old-cache").write_bytes(whole[:-7])
    os.utime(tmp_path / "old-cache", (old, old))
    compilation.clean(tmp_path, 2**20)
    assert (tmp_path / "old-cache").exists()


def test_the_longest_unused_programs_are_removed(unset):
    jax.config.update("jax_compilation_cache_max_size", 250)
    unset.mkdir(parents=True)
    for age, name in enumerate(("newest", "used", "oldest", "old")):
        file = unset / f"{name}-cache"
        file.write_bytes(b"a" * 100)
        written = time.time() - 1000 * (age + (name == "oldest") * 10)
        read = time.time() if name == "used" else written
        os.utime(file, (read, written))
    compilation.keep_programs()
    assert {file.name for file in unset.glob("*-cache")} == {"newest-cache", "used-cache"}
    assert jax.config.jax_compilation_cache_max_size == -1  # JAX itself removes nothing


def test_the_program_that_compiles_has_a_name(monkeypatch):
    monkeypatch.setattr(compilation, "TOLD_FROM_S", 0.0)
    lines, seen = [], []

    def a_program(x):
        return x + 17

    def look(*_, **__):
        seen.append(compilation.current())

    with compilation.watching(lines.append):
        jax.monitoring.register_scalar_listener(look)
        try:
            for size in (3, 4):
                jax.jit(a_program)(jnp.ones(size)).block_until_ready()
        finally:
            jax.monitoring.unregister_scalar_listener(look)
        assert "a_program" in seen and compilation.current() == ""
        assert len(lines) == 1
        assert lines[0].startswith("compiling programs; later starts read them from ")
        lines.clear()
    jax.jit(a_program)(jnp.ones(5))
    assert not lines  # watching has ended


def test_another_thread_may_ask_at_any_moment(monkeypatch):
    """Such as the one that redraws the bar, between two changes of a thread that compiles."""
    seen = []

    class Switching(dict):
        def setdefault(self, *arguments):
            found = super().setdefault(*arguments)
            seen.append(compilation.current())
            return found

        def pop(self, *arguments):
            seen.append(compilation.current())
            return super().pop(*arguments)

    monkeypatch.setattr(compilation, "_running", Switching())
    with compilation.watching(lambda line: None):
        jax.jit(lambda x: x - 29)(jnp.ones(7)).block_until_ready()
    assert seen[0] == seen[-1] == ""


def test_memory_that_was_freed_goes_back_after_a_compilation(monkeypatch):
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    size, statm = 2**16, pathlib.Path("/proc/self/statm")
    blocks = [libc.malloc(size) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps glibc from returning the others
        libc.free(block)
    before = int(statm.read_text().split()[1])
    monkeypatch.setattr(compilation, "TOLD_FROM_S", 0.0)
    with compilation.watching(lambda line: None):
        jax.jit(lambda x: x - 23)(jnp.ones(6)).block_until_ready()
    returned = (before - int(statm.read_text().split()[1])) * os.sysconf("SC_PAGE_SIZE")
    libc.free(blocks[-1])
    assert returned > 1000 * size
