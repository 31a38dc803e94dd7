"""The tool `python`: runs code in a process of its own, without network, files and processes."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable

from semrl_jax.environments.tools import confined
from semrl_jax.support.errors import UserError

_VARIABLES = {
    "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:backslashreplace",
    "TZ": "UTC", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


def python_tool(
    *,
    cpu_s: int = 5,
    timeout_s: float = 30.0,
    memory_gib: float = 1.0,
    max_chars: int = 10_000,
    hide_files: bool = True,
) -> Callable[[str], str]:
    """Makes the tool `python(code)`: tools = [python_tool()].

    Each call is a new process without a state of earlier calls. The answer is what the code prints,
    on both streams in the order of printing, and then the value of its last line, if it is an
    expression. An exception is a traceback in the answer.

    What is promised, on Linux on x86_64 and aarch64: the kernel refuses the code every system call
    but those that computing needs. So it cannot use a network, start a process or a thread, send a
    signal, or write, change or delete a file. It has no variables of this process's environment. It
    is limited in CPU time, time, memory and output, and dies with the thread that called the tool.
    It can read the standard library, the packages installed for this Python, such as sympy, and the
    system's libraries. It can also learn whether another file exists, and its size and times.

    The same code gives the same answer, with fixed seeds of hashes and `random`, unless it uses the
    time, addresses of objects, generators seeded by the system, or as much time as the limit.

    Args:
      cpu_s, timeout_s: limits of a call in CPU time and in time, with its start; TimeoutError.
      memory_gib: of address space. The code gets a MemoryError.
      max_chars: after so many characters of output, the process is killed. The answer says so.
      hide_files: whether other files are hidden, which needs Landlock (Linux 5.13). If False, the
        code reads every file that this user can read.

    Raises UserError if a value is out of range, or the system cannot confine the code.
    """
    least = {"cpu_s": 1, "timeout_s": 0.1, "memory_gib": 0.125, "max_chars": 1}
    values = {
        "cpu_s": cpu_s, "timeout_s": timeout_s, "memory_gib": memory_gib, "max_chars": max_chars
    }  # fmt: skip
    for name, value in values.items():
        if not least[name] <= value < 1e9:
            raise UserError(f"python_tool has {name}={value}; it must be at least {least[name]}.")
    if sys.platform != "linux":
        raise UserError("python_tool confines code by the Linux kernel; use it on Linux.")
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    command = [
        sys.executable, "-sSPBu", confined.__file__,
        str(int(memory_gib * 2**30)), str(cpu_s), str(int(hide_files)), *sorted(libraries),
    ]  # fmt: skip

    def python(code: str) -> str:
        """Runs Python code and returns what it prints, and the value of the last line.

        Every call starts without the variables of earlier calls. Network, files, processes and
        threads cannot be used.

        Args:
          code: the Python code.
        """
        source = code.encode("utf-8", "replace")
        exit_code, output = _run(command, source, timeout_s, 4 * max_chars)
        text = output.decode("utf-8", "replace")
        if len(text) > max_chars or exit_code is None:
            return f"{text[:max_chars]}\n[the output is longer; the code was stopped]"
        if exit_code == -signal.SIGXCPU:
            raise TimeoutError(f"the code used more than {cpu_s} s of CPU time")
        end = f"[exit code {exit_code}]" if exit_code > 0 else ""
        if exit_code < 0:
            end = f"[ended by {signal.Signals(-exit_code).name}]"
        return "\n".join(filter(None, (text.removesuffix("\n"), end))) or "[no output]"

    exit_code, output = _run(command, b"", timeout_s, 4 * max_chars)
    if exit_code != 0:
        reason = output.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
        raise UserError(
            f"python_tool cannot confine code here ({reason or exit_code}); without Landlock, "
            "hide_files=False lets the code read files."
        )
    return python


def _run(
    command: list[str], source: bytes, timeout_s: float, max_bytes: int
) -> tuple[int | None, bytes]:
    """The exit code and the output; None if the output is longer; TimeoutError if it is late."""
    deadline = time.monotonic() + timeout_s
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with tempfile.TemporaryFile() as file:
        file.write(source)
        file.seek(0)
        process = subprocess.Popen(
            command,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_VARIABLES | kept,
            cwd="/",
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    output = bytearray()
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        try:
            while selector.select(max(0.0, deadline - time.monotonic())):
                chunk = os.read(process.stdout.fileno(), 65_536)
                output += chunk
                if len(output) > max_bytes:
                    return None, bytes(output)
                if not chunk:  # it has closed its output, and may still run
                    return process.wait(max(0.0, deadline - time.monotonic())), bytes(output)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
    raise TimeoutError(f"the code ran longer than {timeout_s:g} s")
