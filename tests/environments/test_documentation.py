"""The examples of docs/environments.md do what the page says."""

import contextlib
import pathlib
import re

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.pool import EnvironmentPool, task_seed
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named, names
from tests.environments.test_pool import played, section

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
EXAMPLE, TOOLS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_example_can_be_won_in_seven_turns(tmp_path, monkeypatch):
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 15
    (tmp_path / "guess.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with EnvironmentPool(section("guess:Guess")) as environments:
        low, high, total = 0, 99, 0.0
        (opening,) = environments.openings(seed=1, count=1)
        episode = environments.open(opening)
        with contextlib.ExitStack() as stack:
            stack.callback(episode.end)
            for _ in range(7):
                guess = (low + high) // 2
                answer = episode.step(str(guess)).result(timeout=60)
                assert not answer.error
                total += answer.turn.reward
                if answer.turn.done:
                    break
                higher = answer.turn.messages[0]["content"] == "higher"
                low, high = (guess + 1, high) if higher else (low, guess - 1)
    assert total == 1.0 and answer.turn.done


def test_example_of_tools_has_ten_lines_and_is_solved(tmp_path, monkeypatch):
    _, _, lines = TOOLS.partition("class Products")
    assert len([line for line in lines.splitlines() if line.strip()]) == 10
    (tmp_path / "products.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with EnvironmentPool(section("products:Products")) as environments:
        (opening,) = environments.openings(seed=1, count=1)
        a, b = opening.task["factors"]
        call = f'```json\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n```'
        answer, last = played(environments, opening, call, f"{a * b}")
    assert answer.turn.messages[0]["content"] == f"<tool_response>\n{a * b}\n</tool_response>"
    assert last.turn == Turn((), 1.0, True)


def test_page_names_every_environment_and_limit():
    assert all(f"`{name}`" in PAGE for name in names())
    for field in ("tool_format", "max_turns", "max_observation_chars", "timeout_s", "name"):
        assert f"environment.{field}" in PAGE


@pytest.mark.slow
def test_the_packages_of_the_page_can_be_played():
    found = re.findall(r"environment\.name='?((?:reasoning_gym|textarena):[^'\n]+)", PAGE)
    assert len(found) == 4
    for name in found:
        environment, *_ = made(*named(name)[:2])
        (task,) = environment.tasks(seed=1, count=1)
        assert environment.reset(task, task_seed(task)) and environment.step("")


def test_the_page_has_the_games():
    from semrl_jax.environments.kinds.textarena import MOVES, ONE_PLAYER

    page = " ".join(PAGE.split())
    assert f"{len(ONE_PLAYER)} games for one player" in page and ", ".join(MOVES) in page
