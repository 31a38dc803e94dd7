"""Questions that need a program: the answers, the tool, and the judgement."""

import json
import re
import sys

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.kinds.python import Environment
from semrl_jax.environments.pool import EnvironmentPool
from tests.environments.test_pool import played, section

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux confines code")

# Another way to compute each answer, from numbers of the question.
PROGRAMS = {
    "sum of all primes": "n = {0}\nsum(p for p in range(2, n) if pow(2, p, p) == 2 % p and "
    "all(p % d for d in range(2, int(p**0.5) + 1)))",
    "positive divisors": "n = {0}\nlow = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]\n"
    "len({{*low, *(n // d for d in low)}})",
    "decimal digits": "sum(map(int, str(pow({0}, {1}))))",
    "Fibonacci": "f = [0, 1]\nfor _ in range({0}):\n    f.append(f[-1] + f[-2])\nf[{0}] % {1}",
    "followed by": "n, k = {0}, 0\nwhile n > 1:\n    n, k = (n // 2, 3 * n + 1)[n % 2], k + 1\nk",
}
NUMBERS = {"Fibonacci": slice(-2, None), "followed by": slice(-2, -1)}  # else all


def program(question):
    (words,) = (words for words in PROGRAMS if words in question)
    numbers = re.findall(r"\d+", question)[NUMBERS.get(words, slice(None))]
    return PROGRAMS[words].format(*numbers)


@pytest.fixture(scope="module")
def environment():
    return Environment(cpu_s=20)


def test_answers_are_right(environment):
    tasks = environment.tasks(seed=1, count=30)
    assert tasks == environment.tasks(1, 30) != environment.tasks(2, 30)
    by_first_words = {task["question"][:20]: task for task in tasks}
    assert len(by_first_words) >= len(PROGRAMS)
    (tool,) = environment.tools
    for task in by_first_words.values():
        assert tool(program(task["question"])) == task["answer"]


def test_an_episode_runs_code():
    with EnvironmentPool(section("python")) as environments:
        (opening,) = environments.openings(seed=5, count=1)
        call = {"name": "python", "arguments": {"code": program(opening.task["question"])}}
        answer = opening.task["answer"]
        said = f"```json\n{json.dumps(call)}\n```", f"It is {answer}."
        found, last = played(environments, opening, *said)
    (message,) = found.turn.messages
    assert message["content"] == f"<tool_response>\n{answer}\n</tool_response>"
    assert last.turn == Turn((), 1.0, True)


@pytest.mark.parametrize(
    ("message", "reward"),
    [("1234", 1.0), ("1,234", 1.0), ("The sum is 1234.", 1.0), ("1235", 0.0), ("", 0.0)],
)
def test_the_answer_is_the_number(environment, message, reward):
    environment.reset({"question": "?", "answer": "1234"}, seed=0)
    assert environment.step(message) == Turn((), reward, True)
