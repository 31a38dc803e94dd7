"""Runs the code on its standard input with limits: the child process of `environments.tools.code`.

    python -sSPBu confined.py MEMORY_BYTES CPU_S HIDE_FILES LIBRARY ...

The process gives up its rights before it runs the code. A list of the system calls that computing
needs is allowed, and the kernel refuses all others: there is no process, thread, socket or signal,
and no file is opened for writing. With HIDE_FILES=1, Landlock lets it read the libraries of Python
and of the system only. If one of these cannot be set up, the exit code is 125, the last line of the
output has the reason, and the code does not run.

The file imports the standard library only, because it starts once per call.
"""

import _ast
import ctypes
import os
import platform
import resource
import sys

EXIT_UNCONFINED = 125
_LIBC = ctypes.CDLL(None, use_errno=True)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on every processor
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_SYSTEM_LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache",
    "/usr/share/zoneinfo", "/dev/null", "/dev/urandom",
)  # fmt: skip

# The system calls that are allowed, with their numbers on x86_64 and on aarch64; "-" where there is
# none. Python, NumPy and SymPy need no others.
_CALLS = """
    read 0 63               write 1 64              close 3 57              fstat 5 80
    lseek 8 62              mmap 9 222              mprotect 10 226         munmap 11 215
    brk 12 214              rt_sigaction 13 134     rt_sigprocmask 14 135   rt_sigreturn 15 139
    pread64 17 67           readv 19 65             writev 20 66            sched_yield 24 124
    mremap 25 216           madvise 28 233          dup 32 23               nanosleep 35 101
    getpid 39 172           exit 60 93              uname 63 160            getcwd 79 17
    readlinkat 267 78       gettimeofday 96 169     getrusage 98 165        sysinfo 99 179
    times 100 153           getuid 102 174          getgid 104 176          geteuid 107 175
    getegid 108 177         getppid 110 173         sigaltstack 131 132     getdents64 217 61
    futex 202 98            sched_getaffinity 204 123                       clock_gettime 228 113
    clock_getres 229 114    clock_nanosleep 230 115                         exit_group 231 94
    newfstatat 262 79       faccessat 269 48        faccessat2 439 439      getrandom 318 278
    statx 332 291           rseq 334 293            membarrier 324 283      gettid 186 178
    getcpu 309 168          ioctl 16 29             fcntl 72 25             openat 257 56
    prlimit64 302 261       stat 4 -                lstat 6 -               access 21 -
    readlink 89 -
"""
_PROCESSORS = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column, AUDIT_ARCH
# Calls of which one argument is checked: its index, and the values that are allowed.
_CHECKED = {
    "ioctl": (1, (0x5401, 0x5451)),  # TCGETS, which isatty needs; FIOCLEX
    "fcntl": (1, (0, 1, 2, 3, 1030)),  # duplicates and flags; F_SETOWN could send signals
    "prlimit64": (0, (0,)),  # of this process
}
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC


class _UnconfinedError(Exception):
    """A part of the confinement cannot be set up."""


def _check(result: int, what: str) -> int:
    if result < 0:
        raise _UnconfinedError(f"{what} failed: {os.strerror(ctypes.get_errno())}")
    return result


def _confine(memory_bytes: int, cpu_s: int, hide_files: bool, libraries: list[str]) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, then SIGKILL
    set_parent_death_signal, set_no_new_privileges, set_seccomp = 1, 38, 22
    _check(_prctl(set_parent_death_signal, 9), "the signal of the parent's end")
    _check(_prctl(set_no_new_privileges, 1), "no_new_privs")
    if hide_files:
        _hide_files(libraries)
    header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_LIBC.capset(header, no_capabilities), "capset")
    program = _filter()
    instructions = ctypes.create_string_buffer(program, len(program))
    fields = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(instructions))
    _check(_prctl(set_seccomp, 2, ctypes.addressof(fields)), "seccomp")


def _prctl(option: int, *arguments: int) -> int:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return _LIBC.prctl(option, *map(ctypes.c_ulong, padded))


def _hide_files(libraries: list[str]) -> None:
    """Leaves only the libraries readable; also signals and sockets outside, where Landlock can."""
    version = _check(_LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # of files
    handled = (ctypes.c_uint64 * 3)((1 << rights) - 1, 3, 3)  # and of TCP, and of signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _LIBC.syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(size), 0)
    _check(rules, "Landlock")
    for path in (*_SYSTEM_LIBRARIES, *libraries):
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = _READ_FILE | (_READ_DIRECTORY if os.path.isdir(path) else 0)
        rule = allowed.to_bytes(8, sys.byteorder) + file.to_bytes(4, sys.byteorder)
        _check(_LIBC.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), "Landlock")
        os.close(file)
    _check(_LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def _filter() -> bytes:
    """The seccomp program; see seccomp(2). A call that is not listed fails with ENOSYS."""
    if platform.machine() not in _PROCESSORS or sys.byteorder != "little":
        raise _UnconfinedError(f"processor {platform.machine()!r} is not supported")
    column, architecture = _PROCESSORS[platform.machine()]
    words = _CALLS.split()
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return code.to_bytes(2, "little") + bytes([if_true, if_false]) + value.to_bytes(4, "little")

    def load_argument(index: int) -> bytes:
        return step(load, 16 + 8 * index)  # its lower half; the kernel reads no more of these

    program = step(load, 4) + step(equal, architecture, 1) + step(give, kill) + step(load, 0)
    for name, number in zip(words[::3], words[column::3], strict=True):
        if number == "-":
            continue
        body = step(give, allow)
        if name == "openat":
            body = load_argument(2) + step(any_bit, _WRITES, 0, 1) + step(give, refuse) + body
        elif name in _CHECKED:
            index, values = _CHECKED[name]
            body = load_argument(index)
            body += b"".join(step(equal, value, 0, 1) + step(give, allow) for value in values)
            body += step(give, refuse)
        program += step(equal, int(number), 0, len(body) // 8) + body
    return program + step(give, unknown)


def _run(source: str) -> None:
    """Runs the code as a module; shows the value of its last line, or the traceback."""
    try:
        tree = compile(source, "<code>", "exec", _ast.PyCF_ONLY_AST)
        is_value = tree.body and isinstance(tree.body[-1], _ast.Expr)
        last = tree.body.pop().value if is_value else None
        names = {"__name__": "__main__"}
        exec(compile(tree, "<code>", "exec"), names)
        if last is not None:
            value = eval(compile(_ast.Expression(last), "<code>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as e:
        e.__traceback__ = e.__traceback__.tb_next  # without this function
        sys.__excepthook__(type(e), e, e.__traceback__)


def main() -> None:
    memory_bytes, cpu_s, hide_files, *libraries = sys.argv[1:]
    sys.path += libraries
    source = sys.stdin.buffer.read().decode()
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # the lowest free descriptor, 0
    import random

    random.seed(0)
    try:
        paths = [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *libraries]
        _confine(int(memory_bytes), int(cpu_s), hide_files == "1", paths)
    except (_UnconfinedError, OSError, ValueError) as e:
        print(e, flush=True)
        sys.exit(EXIT_UNCONFINED)
    sys.argv = [""]
    _run(source)


if __name__ == "__main__":
    main()
