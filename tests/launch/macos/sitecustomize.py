"""Takes from a Python process on Linux what macOS does not have; see tests/launch/test_macos.py."""

import builtins
import ctypes
import io
import os
import platform
import resource
import sys
import sysconfig
import types

FUNCTIONS = (
    "sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fallocate", "posix_fadvise",
    "pidfd_open", "eventfd", "copy_file_range", "fdatasync", "pipe2", "getrandom", "waitid",
)  # fmt: skip
LIBRARY = ("prctl", "malloc_trim", "mallopt", "syscall")
DIRECTORIES = ("/proc", "/sys", "/dev/shm")

for name in FUNCTIONS:
    delattr(os, name)


def without_directories(function):
    def call(path, *arguments, **options):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(DIRECTORIES):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)

    return call


builtins.open = io.open = without_directories(open)
for name in ("open", "listdir", "scandir", "readlink"):
    setattr(os, name, without_directories(getattr(os, name)))


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in LIBRARY:
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


ctypes.CDLL = Library
set_limit = resource.setrlimit


def setrlimit(kind, limits):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    set_limit(kind, limits)


resource.setrlimit = setrlimit
# What Python asks about its own system, before the system has another name.
sysconfig.get_config_vars()
platform.uname()
proxies = dict.fromkeys(("_get_proxy_settings", "_get_proxies"), dict)
sys.modules["_scproxy"] = types.SimpleNamespace(**proxies)
sys.platform = "darwin"
