"""Arithmetic with a calculator: the policy calls it, gets the result, and answers.

A message without a call ends the episode: reward 1 if its last number is the result, else 0.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from semrl_jax.environments.interface import Message, Turn

SYSTEM = "Use the tool to compute. Once you know the result, answer with this number alone."
MAX_EXPRESSION_CHARS = 200
MAX_DIGITS = 100  # of any number; larger ones would take time
_NODES = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_NUMBER = re.compile(r"-?\d*\.?\d+")


class Environment:
    """Products and sums that a small model cannot compute without the tool.

    Args:
      digits: of each operand, at most.
      terms: operands of a task.
    """

    def __init__(self, digits: int = 3, terms: int = 2):
        if not (1 <= digits <= 9 and 2 <= terms <= 9):
            raise ValueError("digits must be from 1 to 9, and terms from 2 to 9")
        self.tools = [calculate]
        self._digits, self._terms = digits, terms

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        random_ = random.Random(seed)
        found = []
        for _ in range(count):
            text = str(random_.randrange(1, 10**self._digits))
            for _ in range(self._terms - 1):
                sign = random_.choice("+-*")
                text += f" {sign} {random_.randrange(1, 10**self._digits)}"
            found.append({"expression": text, "answer": calculate(text)})
        return found

    def reset(self, task: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self._answer = task["answer"]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {task['expression']}?"},
        ]

    def step(self, message: str) -> Turn:
        numbers = _NUMBER.findall(message.replace(",", ""))
        return Turn(reward=float(numbers[-1:] == [self._answer]), done=True)


def calculate(expression: str) -> str:
    """Computes an expression of whole numbers.

    Args:
      expression: whole numbers with + - * and parentheses, such as "17 * (23 - 4)".
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"an expression has at most {MAX_EXPRESSION_CHARS} characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("an expression has whole numbers, + - * and parentheses") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            found = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _NODES:
            found = _NODES[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(type(node).__name__)
    if abs(found) >= 10**MAX_DIGITS:
        raise ValueError("too large")
    return found
