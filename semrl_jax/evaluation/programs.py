"""Answers that a program in the response computes: it runs, and what it gives is graded.

A response to a PAL or ToRA prompt has programs between ```python and ```. All of them run as one,
in the sandbox of the tool `python`, see `environments.tools.code`. The answer is the last line of
what the program prints. The value of a last line that is an expression is printed, and so is that
of a function `solution()` that the program defines and never names.

Source: the evaluation of Qwen2.5-Math and of hf618/VERL (3de68f1), which runs programs of pal
prompts only and takes all that they print. Departures: the sandbox; an answer is the last line; a
program that fails has no answer, and its error message is none; a box after the last program counts
in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import ml_collections

from semrl_jax.data import PromptExample
from semrl_jax.environments.tools.code import python_tool
from semrl_jax.rewards import Verdict, VerifierPool
from semrl_jax.rewards.extraction import has_complete_box
from semrl_jax.support.errors import UserError

TEMPLATES = ("jiuzhang_tora", "pal", "tool-integrated", "tora")  # that ask for programs
CPU_S, TIMEOUT_S = 5, 20.0  # of a program
MAX_REASON = 200  # characters
_BLOCK = re.compile(r"```[ \t]*py(?:thon)?3?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M | re.I)
_END = "[the program has ended]"
# Parsed in the sandbox: a hostile text may crash the parser.
_RUN = """
import ast
tree = ast.parse({program!r})
last = tree.body[-1] if tree.body else None
called = any(isinstance(node, ast.Name) and node.id == "solution" for node in ast.walk(tree))
names, value = {{"__name__": "__main__"}}, None
if isinstance(last, ast.Expr):
    tree.body.pop()
exec(compile(tree, "<program>", "exec"), names)
if isinstance(last, ast.Expr):
    value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
elif not called and callable(names.get("solution")):
    value = names["solution"]()
if value is not None:
    print(value)
print()
print({end!r})
"""


def program_of(response: str) -> str:
    """The programs of a response, one after the other; "" if a box after them is its answer."""
    blocks = list(_BLOCK.finditer(response))
    if not blocks or has_complete_box(response[blocks[-1].end() :]):
        return ""
    return "\n".join(block[1] for block in blocks)


def run_program(python: Callable[[str], str], program: str) -> tuple[str, str]:
    """The answer and "", or "" and what went wrong; `python` is the tool."""
    try:
        output = python(_RUN.format(program=program, end=_END))
    except TimeoutError as error:
        return "", f"timeout: {error}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if lines[-1:] != [_END]:
        return "", f"program: {(lines or ['no output'])[-1]:.{MAX_REASON}}"
    if len(lines) < 2:
        return "", "program: it printed nothing"
    return lines[-2], ""


@dataclasses.dataclass(frozen=True)
class ProgramGrader:
    """Runs the programs of responses, and lets a verifier grade what they give."""

    verifier: VerifierPool  # grades the answers, and responses without a program
    python: Callable[[str], str]
    threads: ThreadPoolExecutor

    def submit(self, response: str, reference: str, columns: str = "") -> Future[Verdict]:
        """See `VerifierPool.submit`. `Verdict.error` says why a program has no answer."""
        if not (program := program_of(response)):
            return self.verifier.submit(response, reference, columns)
        return self.threads.submit(self._graded, program, reference, columns)

    def _graded(self, program: str, reference: str, columns: str) -> Verdict:
        answer, error = run_program(self.python, program)
        # Python's notation; a list of solutions is written without brackets, as in the source.
        answer = answer.replace("**", "^")
        if answer[:1] == "[" and answer[-1:] == "]" and reference.strip()[:1] not in ("[", "("):
            answer = answer[1:-1]
        text = f"\\boxed{{{answer}}}" if answer else ""
        verdict = self.verifier.submit(text, reference, columns).result()
        return dataclasses.replace(verdict, error=verdict.error or error)


def runs_programs(config: ml_collections.ConfigDict, problem: PromptExample) -> bool:
    """Whether `evaluation.run_programs` runs the programs of responses to this problem."""
    chosen = config.evaluation.run_programs
    return chosen == "always" or (chosen == "auto" and problem.template in TEMPLATES)


def with_programs(
    stack: contextlib.ExitStack,
    config: ml_collections.ConfigDict,
    problems: Iterable[PromptExample],
    graders: Mapping[str, VerifierPool],
) -> dict[str, VerifierPool | ProgramGrader]:
    """The graders of benchmarks; where programs run, as `ProgramGrader`, which the stack closes.

    UserError if this system cannot confine programs.
    """
    names = {p.data_source for p in problems if runs_programs(config, p)} & graders.keys()
    if not names:
        return dict(graders)
    try:
        python = python_tool(cpu_s=CPU_S, timeout_s=TIMEOUT_S)
    except UserError as error:
        raise UserError(
            f"evaluation.run_programs={config.evaluation.run_programs!r}: {error} "
            "evaluation.run_programs='never' grades the texts alone."
        ) from None
    threads = ThreadPoolExecutor(config.rewards.num_workers, "programs")
    stack.callback(threads.shutdown, cancel_futures=True)
    return {
        name: ProgramGrader(grader, python, threads) if name in names else grader
        for name, grader in graders.items()
    }
