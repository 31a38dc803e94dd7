"""Questions that need a program: the policy runs Python code, reads its output, and answers.

A message without a call ends the episode: reward 1 if its answer equals the right number by the
rules of `rewards.grading`, else 0.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semrl_jax.environments.interface import Message, Turn
from semrl_jax.environments.tools.code import python_tool
from semrl_jax.rewards.grading import grade, prepare

SYSTEM = "Run code with the tool. Once you know the result, answer with this number alone."
MAX_PRIME = 20_000


class Environment:
    """Questions about whole numbers, whose answers take more arithmetic than a text can hold.

    Args:
      cpu_s, memory_gib: of a call of the tool, see `python_tool`.
    """

    def __init__(self, cpu_s: int = 5, memory_gib: float = 1.0):
        self.tools = [python_tool(cpu_s=cpu_s, timeout_s=4.0 * cpu_s, memory_gib=memory_gib)]
        prepare()

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        random_ = random.Random(seed)
        found = []
        for _ in range(count):
            question, answer = random_.choice(_QUESTIONS)(random_)
            found.append({"question": question, "answer": str(answer)})
        return found

    def reset(self, task: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self._answer = task["answer"]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task["question"]},
        ]

    def step(self, message: str) -> Turn:
        return Turn(reward=float(grade(message, self._answer).correct), done=True)


def _primes(random_: random.Random) -> tuple[str, int]:
    below = random_.randrange(1000, MAX_PRIME)
    total = sum(p for p in _all_primes() if p < below)
    return f"What is the sum of all primes below {below}?", total


def _divisors(random_: random.Random) -> tuple[str, int]:
    number = random_.randrange(10**6, 10**8)
    count = sum(1 + (n * n < number) for n in range(1, math.isqrt(number) + 1) if number % n == 0)
    return f"How many positive divisors does {number} have?", count


def _digit_sum(random_: random.Random) -> tuple[str, int]:
    base, exponent = random_.randrange(2, 100), random_.randrange(50, 300)
    total = sum(map(int, str(base**exponent)))
    return f"What is the sum of the decimal digits of {base}^{exponent}?", total


def _fibonacci(random_: random.Random) -> tuple[str, int]:
    index, modulus = random_.randrange(100, 2000), random_.randrange(1000, 10**6)
    a, b = 0, 1
    for _ in range(index):
        a, b = b, (a + b) % modulus
    return f"With F(1) = F(2) = 1, what is the Fibonacci number F({index}) modulo {modulus}?", a


def _collatz(random_: random.Random) -> tuple[str, int]:
    start = n = random_.randrange(1000, 10**6)
    steps = 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    question = (
        f"An even number n is followed by n / 2, an odd one by 3n + 1. After how many steps does "
        f"{start} become 1?"
    )
    return question, steps


@functools.cache
def _all_primes() -> list[int]:
    found: list[int] = []
    for n in range(2, MAX_PRIME):
        if all(n % p for p in found[: math.isqrt(n)]):
            found.append(n)
    return found


_QUESTIONS: list[Callable[[random.Random], tuple[str, int]]] = [
    _primes, _divisors, _digit_sum, _fibonacci, _collatz,
]  # fmt: skip
