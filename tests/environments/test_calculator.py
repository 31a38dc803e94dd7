"""The calculator: its tasks, its tool, and its judgement."""

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.kinds.calculator import Environment, calculate
from tests.cases import raised


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 * 23", "391"), (" 2+3*4 ", "14"), ("-(2 - 5) * 7", "21"), ("2 - -3", "5"),
        ("1" * 50, "1" * 50), ("(" * 90 + "1" + ")" * 90, "1"),
    ],
)  # fmt: skip
def test_expressions(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9" * 60 + "*" + "9" * 60, "2 ** 9", "1 / 2", "1 +", "", "True + 1", "__import__('os')",
        "1\x00", "1+" * 150 + "1", "0.5",
    ],
)  # fmt: skip
def test_other_expressions_are_refused(expression):
    raised(ValueError, "an expression has", calculate, expression)


def test_a_task_is_solved_with_the_tool():
    environment = Environment(digits=4, terms=3)
    first, second = environment.tasks(seed=7, count=2)
    assert [first, second] == environment.tasks(seed=7, count=2) != environment.tasks(8, 2)
    _, question = environment.reset(first, seed=0)
    assert first["expression"] in question["content"]
    (tool,) = environment.tools
    assert environment.step(f"It is {tool(first['expression'])}.") == Turn((), 1.0, True)


def test_the_largest_tasks_have_answers():
    tasks = Environment(digits=9, terms=9).tasks(seed=0, count=300)
    assert max(len(task["answer"]) for task in tasks) > 50
    assert all(task["answer"].lstrip("-").isdecimal() for task in tasks)


@pytest.mark.parametrize(
    ("message", "reward"),
    [("-1,234", 1.0), ("1 or -1234", 1.0), ("-1234 or 1", 0.0), ("", 0.0), ("no", 0.0)],
)
def test_the_last_number_is_the_answer(message, reward):
    environment = Environment()
    environment.reset({"expression": "1 - 1235", "answer": "-1234"}, seed=0)
    assert environment.step(message) == Turn((), reward, True)


@pytest.mark.parametrize(("message", "reward"), [("It is 5.", 1.0), ("2.5", 0.0), (".5", 0.0)])
def test_the_digits_after_a_point_are_no_number(message, reward):
    environment = Environment()
    environment.reset({"expression": "2 + 3", "answer": "5"}, seed=0)
    assert environment.step(message) == Turn((), reward, True)
