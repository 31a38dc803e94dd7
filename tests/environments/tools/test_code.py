"""Code of a policy: what it computes, and hostile code."""

import pathlib
import subprocess
import sys
import time

import pytest

from semrl_jax.environments.tools import confined
from semrl_jax.environments.tools.code import python_tool
from semrl_jax.environments.tools.functions import Call, call, schemas
from tests.cases import refused, slow_after

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux confines code")


@pytest.fixture(scope="module")
def python():
    return python_tool(cpu_s=20, timeout_s=120.0, max_chars=1000)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("1 + 1", "2"),
        ("x = 3\nprint('a')\nx * 2", "a\n6"),
        ("x = 3", "[no output]"),
        ("", "[no output]"),
        ("None", "[no output]"),
        ("print('a\\n')", "a\n"),
        ("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", "1\n2\n3"),
        ("def f(n):\n    return n and n * f(n - 1) or 1\n[f(n) for n in (3, 4)]", "[6, 24]"),
        ("import numpy as np; np.linalg.inv(np.eye(2) * 2).tolist()", "[[0.5, 0.0], [0.0, 0.5]]"),
        ("import time; time.localtime(0).tm_hour", "0"),
        ("import sys; sys.stdout.isatty()", "False"),
        ("__name__", "'__main__'"),
        ("import os; os._exit(3)", "[exit code 3]"),
        ("import sys; print(1); sys.exit('bye')", "1\nbye\n[exit code 1]"),
        ("import sys; sys.exit()", "[no output]"),
        ("print('\\ud800')", "\\ud800"),
        ("'\ud800'", "'?'"),
        ("import os; os.write(1, b'\\xff\\xfe\\n')", "��\n3"),
        ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))", "[no output]"),
    ],
)  # fmt: skip
def test_code_is_answered(python, code, answer):
    assert python(code) == answer


def test_an_exception_is_a_traceback_of_the_code(python):
    assert python("def f():\n    1 / 0\nf()") == (
        'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n'
        '  File "<code>", line 2, in f\nZeroDivisionError: division by zero'
    )
    assert python("x = (") == (
        "  File \"<code>\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed"
    )


def test_a_call_starts_anew_and_repeats_itself(python):
    code = "import random\n(random.random(), hash('a'), set('abc'), 'x' in globals())\n"
    assert python(f"{code}") == python(f"x = 1\n{code}".replace("x = 1", "y = 1"))


HOSTILE = [
    ("import os\nwhile True:\n    os.fork()", "OSError: [Errno 38] Function not implemented"),
    ("import os; os.execv('/bin/true', ['true'])", "OSError: [Errno 38]"),
    ("import os; os.system('true')", "32512"),
    ("import subprocess; subprocess.run(['true'])", "OSError: [Errno 38]"),
    ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
    ("import socket; socket.socket()", "OSError: [Errno 38]"),
    ("import socket; socket.socketpair()", "OSError: [Errno 38]"),
    ("import os; os.kill(os.getppid(), 9)", "OSError: [Errno 38]"),
    ("import os; os.kill(-1, 9)", "OSError: [Errno 38]"),
    ("import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", "PermissionError"),
    ("import fcntl; fcntl.ioctl(1, 0x8901, b'1234')", "PermissionError"),
    (
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "PermissionError",
    ),
    ("import os; open(f'/proc/{os.getppid()}/environ').read()", "PermissionError"),
    ("open('/etc/passwd').read()", "PermissionError"),
    ("open('/proc/self/environ').read()", "PermissionError"),
    ("import os; os.listdir('/')", "PermissionError"),
    ("open('/tmp/written', 'w')", "PermissionError"),
    ("open('/dev/null', 'w')", "PermissionError"),
    ("open(__import__('random').__file__, 'a')", "PermissionError"),
    ("import os; os.chmod(__import__('random').__file__, 0)", "OSError: [Errno 38]"),
    ("import os; os.unlink(__import__('random').__file__)", "OSError: [Errno 38]"),
    ("import os; os.mkdir('/tmp/made')", "OSError: [Errno 38]"),
    ("import os; os.setuid(0)", "OSError: [Errno 38]"),
    ("bytearray(4 * 2**30)", "MemoryError"),
    ("x = []\nwhile True:\n    x.append(bytearray(10**7))", "MemoryError"),
    ("10**10**4", "ValueError: Exceeds the limit"),
    ("def f():\n    f()\nf()", "RecursionError"),
    (
        "import sys; sys.setrecursionlimit(10**9)\nf = lambda _: sorted('a', key=f)\nf(0)",
        # From Python 3.12 on, the stack of C has a limit of its own.
        "[ended by SIGSEGV]" if sys.version_info < (3, 12) else "RecursionError",
    ),
    ("(" * 300, "too many nested parentheses"),
    ("import ctypes; ctypes.string_at(0)", "[ended by SIGSEGV]"),
    ("import os; os.abort()", "[ended by SIG"),
    ("x = '\x00'", "null bytes"),
    ("input()", "EOFError"),
    ("raise BaseException", "BaseException"),
]


@pytest.mark.parametrize(("code", "text"), HOSTILE)
def test_hostile_code_is_refused(python, code, text):
    assert text in python(code)


def test_code_cannot_see_variables_descriptors_or_arguments(python, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert "API_KEY" not in python("import os; list(os.environ)")
    code = """
import os, sys
def is_open(descriptor):
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False
[d for d in range(3, 64) if is_open(d)], sys.argv
"""
    assert python(code) == "([], [''])"


@pytest.mark.parametrize("code", ["print('x' * 10**8)", "while True: print('x' * 999)"])
def test_output_beyond_the_limit_ends_the_code(python, code):
    text = python(code)
    assert text.startswith("xxx")
    assert text.endswith("\n[the output is longer; the code was stopped]")
    assert len(text) < 1050


@pytest.mark.parametrize(
    ("code", "message"),
    slow_after(
        2,
        [
            ("print('lost')\nwhile True: pass", "more than 1 s of CPU time"),
            ("import os, time; os.close(1); os.close(2); time.sleep(60)", "longer than 3 s"),
            ("import time; time.sleep(60)", "longer than 3 s"),
        ],
    ),
)
def test_code_that_does_not_end_is_an_error(code, message):
    timeout_s = 3.0 if "sleep" in code else 120.0
    python = python_tool(cpu_s=1, timeout_s=timeout_s)
    answer = call([python], Call("python", {"code": code}))
    assert (answer.error, "TimeoutError" in answer.text) == ("exception", True)
    assert message in answer.text


@pytest.mark.slow
def test_the_limit_of_cpu_time_cannot_be_ignored():
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert python_tool(cpu_s=1, timeout_s=120.0)(code) == "[ended by SIGKILL]"


def test_code_ends_with_its_caller():
    code = (
        "from semrl_jax.environments.tools.code import python_tool\n"
        "python = python_tool(timeout_s=600.0)\n"
        "print(flush=True)\n"
        "python('import time; time.sleep(600)')"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        caller.stdout.readline()
        children = pathlib.Path(f"/proc/{caller.pid}/task/{caller.pid}/children")
        while not (child := children.read_text().strip()):
            time.sleep(0.01)
        status = pathlib.Path(f"/proc/{child}/status")
        while "Seccomp:\t2" not in status.read_text():  # it is not confined yet
            time.sleep(0.01)
    finally:
        caller.kill()
        caller.communicate()
    deadline = time.monotonic() + 60
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_files_can_be_read_if_they_are_not_hidden(tmp_path):
    (tmp_path / "data.txt").write_text("content")
    python = python_tool(hide_files=False, timeout_s=120.0)
    assert python(f"open('{tmp_path}/data.txt').read()") == "'content'"
    assert "PermissionError" in python(f"open('{tmp_path}/data.txt', 'w')")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cpu_s": 0}, "cpu_s=0; it must be at least 1"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"memory_gib": 0.01}, "memory_gib=0.01"),
        ({"max_chars": 0}, "max_chars=0"),
    ],
)
def test_limits_are_checked(setting, message):
    refused(message, python_tool, **setting)


def test_a_system_that_cannot_confine_is_refused(tmp_path, monkeypatch):
    source = pathlib.Path(confined.__file__).read_text()
    broken = tmp_path / "confined.py"
    broken.write_text(source.replace("_LANDLOCK_CREATE, _LANDLOCK_ADD", "_X, _LANDLOCK_ADD", 1)
                      .replace('_LIBC = ', "_LANDLOCK_CREATE = 9999\n_LIBC = ", 1))  # fmt: skip
    monkeypatch.setattr(confined, "__file__", str(broken))
    assert "hide_files=False" in refused("Landlock failed: Function not implemented", python_tool)
    assert python_tool(hide_files=False)("1") == "1"


def test_the_tool_has_a_schema():
    [schema] = schemas([python_tool()])
    assert schema["function"]["parameters"]["required"] == ["code"]
