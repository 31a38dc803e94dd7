"""What was written for TRL runs as it is."""

import json
import pathlib
import re

import pytest

from semrl_jax.environments.interface import Turn
from semrl_jax.environments.kinds.trl import Environment
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import refused
from tests.environments import trl_users
from tests.environments.test_documentation import PAGE
from tests.environments.test_pool import played, section

USERS = "tests.environments.trl_users"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(*texts):
    parts = (f"<tool_response>\n{text}\n</tool_response>" for text in texts)
    return [{"role": "user", "content": "\n".join(parts)}]


def test_a_class_makes_prompts_tools_and_rewards():
    name = f"trl:environment_factory={USERS}:Lamps"
    with EnvironmentPool(section(name)) as environments:
        openings = environments.openings(seed=1, count=20)
        assert len({opening.seed for opening in openings}) == 20
        system, question = openings[0].messages
        assert question == {"role": "user", "content": "Which lamp is on?"}
        assert all(f'"name": "{tool}"' in system["content"] for tool in ("look", "wait"))
        assert "get_reward" not in system["content"] and "_penalty" not in system["content"]
        found = []
        for opening in openings:
            looks = (call("look", lamp=n) for n in range(3))
            *answers, last = played(environments, opening, *looks, "It is on.")
            assert not any(answer.error for answer in answers)
            lit = [each.turn.messages == answer("on") for each in answers]
            found.append(lit.index(True))
            # The score is 0.75 when the lamp was found last, else that of a wrong guess.
            total = sum(each.turn.reward for each in answers)
            assert total == pytest.approx(0.75 if lit[2] else -0.1, abs=2**-20)
            assert last.turn == Turn((), 0.0, True)
        assert set(found) == {0, 1, 2}  # drawn from the global generator, which has a seed


def test_tools_and_rewards_of_a_dataset(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)}
        for n in range(10)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = Environment(
        tools=f"{USERS}:add", reward_funcs=f"{USERS}:exact", train_dataset=path
    )
    tasks = environment.tasks(seed=1, count=20)
    assert sorted(task["answer"] for task in tasks) == sorted(row["answer"] for row in rows)
    assert environment.tasks(seed=1, count=3) == tasks[:3] != environment.tasks(seed=2, count=3)
    system, question = environment.reset(rows[4], seed=0)
    assert question == rows[4]["prompt"][0] and '"name": "add"' in system["content"]
    assert environment.step(call("add", a=4, b=1)) == Turn(answer("5"), 0.0, False)
    assert environment.step("5") == Turn([], 1.0, True)


def test_environment_tools_and_rewards_together():
    environment = Environment(
        environment_factory=f"{USERS}:Lamps", tools=f"{USERS}:add",
        reward_funcs=f"{USERS}:lit,{USERS}:lit",
    )  # fmt: skip
    environment.reset({"game": 1}, seed=0)
    environment._environments[0].lamp = 2
    turn = environment.step(call("wait") + call("add", a=1, b=2))
    assert turn == Turn(answer("done", "3"), 1.0, False)  # twice 0.5
    turn = environment.step(call("look", lamp=3) + call("look", lamp=0))
    assert turn.messages == answer("error: ValueError: There are three lamps.", "off")
    assert turn.reward == pytest.approx(-1.1, abs=2**-19)  # None, None, and -0.1
    assert environment.step(call("look", lamp=2)).reward == pytest.approx(1.85, abs=2**-19)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "set environment_factory or train_dataset, which make the prompts"),
        (f"environment_factory={USERS}:Lamp", r"has no attribute 'Lamp'\.$"),
        (f"environment_factory={USERS}.Lamp", r"trl_users.Lamp' must be 'package.module:name'\.$"),
        ("train_dataset=none.jsonl", "FileNotFoundError: .*none.jsonl"),
    ],
)
def test_mistakes_are_the_users(options, message):
    refused(message, made, *named(f"trl:{options}".strip(":"))[:2])


def test_a_class_without_rewards_is_refused():
    with EnvironmentPool(section(f"trl:environment_factory={USERS}:NoReward")) as environments:
        refused("set reward_funcs, or give the class", environments.openings, seed=1, count=1)


def test_examples_of_the_page(tmp_path, monkeypatch):
    source = pathlib.Path(trl_users.__file__).read_text().replace("Lamps", "MyEnvironment")
    (tmp_path / "my_module.py").write_text(source)
    row = {"prompt": "What is 1 + 1?", "answer": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = re.findall(r"environment\.name=(trl:\S+)", PAGE)
    for name, prompt in zip(names, ("Which lamp is on?", "What is 1 + 1?"), strict=True):
        with EnvironmentPool(section(name)) as environments:
            (opening,) = environments.openings(seed=1, count=1)
            assert opening.messages[-1]["content"] == prompt
            ((turn, error, *_),) = played(environments, opening, "2")
            assert (turn.reward, turn.done, error) == (float("1 + 1" in prompt), True, "")
