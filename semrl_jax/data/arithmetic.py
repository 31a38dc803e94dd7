"""The quickstart task: three-digit sums and differences, worked column by column.

A response first writes the problem, then its columns from the right, then the result twice:

    Q:380+882
    A:380+882:0+2+0=02,8+8+0=16,3+8+1=12;1262
    \\boxed{1262}

A column of a sum is `x+y+c=ds`: c is the incoming carry, d the outgoing carry, s the digit of the
result. A column of a difference is `x-y-c=bs`, with borrows instead of carries. A forgetful teacher
writes 0 for an incoming carry and continues from there. The reward of reinforcement learning is
only whether the last number is right, and the model must learn the carries again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

QUESTION_TEMPLATE = "Q:{input}\nA:"
NUM_COLUMNS = 3
NUM_HELD_OUT = 512
MAX_PROMPT_TOKENS = 12
MAX_RESPONSE_TOKENS = 53  # the end token included

_DRAWS = 1024  # problems per block, so that a longer sample begins with the shorter one
_HELD_OUT_STREAM, _PROMPT_STREAM, _DEMONSTRATION_STREAM, _FORGET_STREAM = range(4)
_HELD_OUT_SEED = 20250928


class Problem(NamedTuple):
    """`left operator right`, both in 100..999, the result not negative."""

    left: int
    operator: str  # "+" or "-"
    right: int


def held_out_problems() -> list[Problem]:
    """The 512 distinct problems of the test set, which the other functions exclude."""
    return _sample(_HELD_OUT_SEED, _HELD_OUT_STREAM, NUM_HELD_OUT, exclude=(), distinct=True)


def training_problems(seed: int, size: int) -> list[Problem]:
    """Problems to sample responses to; a problem may come twice.

    Both operands are uniform in 100..999, and the operator is + or - with equal chance. A draw with
    a negative result is discarded, which leaves two sums per difference.
    """
    return _sample(seed, _PROMPT_STREAM, size, exclude=held_out_problems())


def demonstration_problems(seed: int, size: int) -> list[Problem]:
    """Problems to demonstrate, from the same distribution as `training_problems`."""
    return _sample(seed, _DEMONSTRATION_STREAM, size, exclude=held_out_problems())


def demonstration_texts(
    seed: int, size: int, *, forget_probability: float = 0.8
) -> list[tuple[str, str]]:
    """(prompt, response) pairs of a teacher that forgets carries with this chance, in [0, 1]."""
    draws = np.random.default_rng((seed, _FORGET_STREAM)).random((size, NUM_COLUMNS))
    return [
        (prompt_text(problem), worked_response(problem, forget))
        for problem, forget in zip(
            demonstration_problems(seed, size), draws < forget_probability, strict=True
        )
    ]


def prompt_text(problem: Problem) -> str:
    """The question as the model sees it, 12 characters."""
    question = f"{problem.left}{problem.operator}{problem.right}"
    return QUESTION_TEMPLATE.replace("{input}", question)


def reference_answer(problem: Problem) -> str:
    """The true result, in digits."""
    if problem.operator == "+":
        return str(problem.left + problem.right)
    return str(problem.left - problem.right)


def worked_response(
    problem: Problem, forget: Sequence[bool] | np.ndarray = (False,) * NUM_COLUMNS
) -> str:
    """The worked text, 46 to 52 characters; columns to `forget` a carry in are from the right."""
    left, operator, right = problem
    sign = 1 if operator == "+" else -1
    columns, result, carry = [], 0, 0
    for i in range(NUM_COLUMNS):
        x, y = left // 10**i % 10, right // 10**i % 10
        written = 0 if forget[i] else carry
        total = x + sign * (y + written)
        carry, digit = abs(total // 10), total % 10  # // floors: a borrow is -1
        columns.append(f"{x}{operator}{y}{operator}{written}={carry}{digit}")
        result += digit * 10**i
    # No borrow remains: left >= right, and a forgotten borrow only makes the result larger.
    result += carry * 10**NUM_COLUMNS
    return f"{left}{operator}{right}:{','.join(columns)};{result}\n\\boxed{{{result}}}"


def _sample(
    seed: int, stream: int, size: int, *, exclude: Collection[Problem], distinct: bool = False
) -> list[Problem]:
    """Problems outside `exclude`; with `distinct`, each at most once."""
    rng = np.random.default_rng((seed, stream))
    excluded = set(exclude)
    problems: list[Problem] = []
    while len(problems) < size:
        left, right = rng.integers(100, 1000, size=(2, _DRAWS)).tolist()
        operators = rng.integers(2, size=_DRAWS).tolist()
        for x, operator, y in zip(left, operators, right, strict=True):
            problem = Problem(x, "+-"[operator], y)
            if (operator and x < y) or problem in excluded:
                continue
            problems.append(problem)
            if distinct:
                excluded.add(problem)
    return problems[:size]
