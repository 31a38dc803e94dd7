"""Programs of responses: which run, what is their answer, and what hostile ones cannot do."""

import contextlib
import types

import pytest

from semrl_jax.environments.tools.code import python_tool
from semrl_jax.evaluation import programs
from semrl_jax.evaluation.programs import program_of, run_program
from semrl_jax.rewards import VerifierPool
from semrl_jax.support.errors import UserError
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def python():
    return python_tool(cpu_s=1, timeout_s=10.0)


def block(code):
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"First.\n{block('x = 1')}\n", "x = 1\n"),
        (f"{block('x = 1')} then\n{block('print(x)')}", "x = 1\n\nprint(x)\n"),
        ("```Python3\nprint(1)\n", "print(1)\n"),  # truncated
        (block("print('```')") + "\n", "print('```')\n"),
        (f"{block('print(1)')}\nSo it is \\boxed{{2}}.", ""),  # the box is the answer
        (f"\\boxed{{2}}\n{block('print(1)')}", "print(1)\n"),
        (f"{block('print(1)')}\nSo it is \\boxed{{2", "print(1)\n"),
        ("```\nprint(1)\n```", ""),
        ("The answer is 7.", ""),
        ("", ""),
    ],
)
def test_the_programs_of_a_response(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("def solution():\n    return 6 * 7", "42"),
        ("def solution():\n    return 6 * 7\nprint(solution() + 1)", "43"),
        ("def solution():\n    return 6 * 7\nx = solution()", None),
        ("x = 3\nprint('x is')\nprint(x)", "3"),
        ("print(3, end='')", "3"),
        ("x = 3\nx + 1", "4"),
        ("from sympy import Rational\nRational(2, 4)", "1/2"),
        ("def main():\n    print(5)\nif __name__ == '__main__':\n    main()", "5"),
        ("print(1)\nx.append(2)", None),
        ("None", None),
        ("", None),
    ],
)
def test_the_answer_of_a_program(program, answer):
    # The import of SymPy takes seconds on a busy machine.
    found, error = run_program(python_tool(cpu_s=10, timeout_s=60.0), program)
    assert found == (answer or "")
    assert error.startswith("program: ") is (answer is None)


HOSTILE = {
    "loop": ("while True: pass", "timeout: the code used more than 1 s"),
    "fork": ("import os\nos.fork()\nprint(7)", "Function not implemented"),
    "process": ("import subprocess\nsubprocess.run(['ls'])\nprint(7)", "program: "),
    "file": ("open('made', 'w').write('x')\nprint(7)", "Operation not permitted"),
    "network": ("import socket\nsocket.socket()\nprint(7)", "Function not implemented"),
    "input": ("print(input())", "EOFError"),
    "output": ("while True: print('7' * 1000)", "program: [the output is longer"),
    "memory": ("x = bytearray(2**33)\nprint(7)", "MemoryError"),
    "exit": ("print(7)\nraise SystemExit", "program: 7"),
    "kill": ("import os\nos._exit(0)", "no output"),
    "error": ("print(7)\n1 / 0", "ZeroDivisionError"),
    "syntax": ("def f(:", "SyntaxError"),
    "nesting": ("(" * 100_000, "program: "),
    "null": ("print(1)\0", "program: "),
    "surrogate": ("print('\ud800')", "program: "),
    "own end": (f"print(7)\nprint({programs._END!r})\n1 / 0", "ZeroDivisionError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_program_has_no_answer(python, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, error = HOSTILE[kind]
    answer, found = run_program(python, program)
    assert answer == "" and error in found and len(found) < 250 and "\n" not in found
    assert not list(tmp_path.iterdir())


def graded(responses, reference="42", mode="auto", template="pal"):
    """Verdicts of the benchmark's verifier."""
    config = tiny_config()
    config.evaluation.run_programs = mode
    problems = [types.SimpleNamespace(data_source="set", template=template)]
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(VerifierPool(function="benchmark", num_workers=1))
        graders = programs.with_programs(stack, config, problems, {"set": pool, "other": pool})
        assert graders["other"] is pool
        return [graders["set"].submit(response, reference).result() for response in responses]


@pytest.mark.slow
def test_what_a_program_gives_is_graded():
    right, text, wrong, error = graded(
        [
            block("def solution():\n    return 42"),
            "It is \\boxed{42}.",
            block("print(41)"),
            "\\boxed{42}\n" + block("print(42)\n1 / 0"),
        ]
    )
    assert right.correct and right.extracted == "42" and not right.error
    assert text.correct and not wrong.correct and wrong.extracted == "41"
    assert not error.correct and error.extracted is None and error.error_kind == "program"
    assert "ZeroDivisionError" in error.error
    (power,) = graded([block("print('x**2 + 1')")], "x^2+1")
    (pair,) = graded([block("print([1, 2])")], "1,2")
    assert power.correct and pair.correct


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "template", "runs"),
    [("auto", "cot", False), ("always", "cot", True), ("never", "pal", False)],
)
def test_programs_run_where_they_are_asked_for(mode, template, runs):
    (verdict,) = graded([block("print(6 * 7)")], mode=mode, template=template)
    assert verdict.correct is runs


def test_a_system_that_cannot_confine_programs_is_named(monkeypatch):
    def refused(**options):
        raise UserError("python_tool cannot confine code here (Landlock).")

    monkeypatch.setattr(programs, "python_tool", refused)
    with pytest.raises(UserError, match=r"run_programs='auto': .*Landlock.*'never'") as caught:
        graded([""])
    assert "\n" not in str(caught.value)
