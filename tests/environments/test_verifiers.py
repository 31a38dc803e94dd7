"""Tasksets and environments of the package verifiers, in an environment that has it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import refused
from tests.environments.test_documentation import PAGE
from tests.environments.test_pool import section

ROOT = pathlib.Path(__file__).parents[2]
TASKSETS = pathlib.Path(__file__).with_name("tasksets")
PYTHON = pathlib.Path(os.environ.get("SEMRL_VERIFIERS_PYTHON", ROOT / ".venv-verifiers/bin/python"))


def look(position):
    return (
        f'<tool_call>{{"name": "words_look", "arguments": {{"position": {position}}}}}</tool_call>'
    )


PROGRAM = """
import json, sys
from semrl_jax.environments.worker import called, made

def call(environment, name, **arguments):
    found = called(*environment, id=0, call=name, arguments=arguments, max_chars=10_000)
    return found[0] if name == "step" else found

def played(options, *episodes):
    environment, found = made("verifiers", options)[:2], []
    tasks = call(environment, "tasks", seed=1, count=5)
    prompts = call(environment, "openings", pairs=[[task, 0] for task in tasks])
    for messages in episodes:
        assert call(environment, "reset", task=tasks[0], seed=0) == prompts[0]
        texts = [message.replace("ANSWER", tasks[0].get("answer", "")) for message in messages]
        found.append([call(environment, "step", message=text)[:3] for text in texts])
    return tasks, prompts, found

answers = []
for each in json.loads(sys.argv[1]):
    try:
        answers.append(played(*each))
    except Exception as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
CALLS = {
    "words": (
        {"id": "vf-words", "count": 7},
        ["<think>Is it w?</think>ANSWER"],
        [look(1), look('"x"') + look(2), "nothing"],
        [look(0) + look(1) + look(2)],
    ),
    "user": ({"id": "vf-user"}, ["0", "1", "2"], ["0", "stop"]),
    "container": ({"id": "vf-container"},),
    "options": ({"id": "vf-words", "counts": 3},),
    "missing": ({"id": "vf-missing"},),
}


def run(program, *arguments, path):
    """What the program prints, as JSON, in the environment with the package."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run benchmarks/peers/make_env.sh verifiers")
    result = subprocess.run(
        [PYTHON, "-c", program, *map(json.dumps, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{path}"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def played():
    """The tasks, the prompts, and the answers in each episode of the first task, by name."""
    return dict(zip(CALLS, run(PROGRAM, list(CALLS.values()), path=TASKSETS), strict=True))


def answer(*texts):
    parts = (f"<tool_response>\n{text}\n</tool_response>" for text in texts)
    return [{"role": "user", "content": "\n".join(parts)}]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    message = "cannot be made: ImportError: .*verifiers.*; pip install verifiers==0.4.0"
    refused(message, made, *named("verifiers:id=x")[:2])


@pytest.mark.slow
def test_tools_rewards_and_stops(played):
    tasks, prompts, (right, wrong, stopped) = played["words"]
    (task, *_), ((system, question), *_) = tasks, prompts
    assert len(prompts) == 5 and len({task["answer"] for task in tasks}) == 5
    assert question == {"role": "user", "content": f"Word {int(task['answer'][1:])}?"}
    assert system["content"].startswith("Guess.") and '"name": "words_look"' in system["content"]
    assert right == [[[], 2.0, True]]
    first, (second, *_), third = wrong
    assert first == [answer(task["answer"][1]), 0.0, False]
    assert second[0]["content"].startswith("<tool_response>\nerror: ")
    assert second[0]["content"].endswith(answer(task["answer"][2])[0]["content"])
    assert third == [[], 0.2, True]  # looked twice
    assert stopped == [[[], 0.3, True]]  # by the rule of the task, after three looks


@pytest.mark.slow
def test_an_environment_with_a_user(played):
    _, prompts, (right, stopped) = played["user"]
    assert prompts == [[{"role": "user", "content": str(n)}] for n in range(5)]
    assert right == [
        [[{"role": "user", "content": "1"}], 0.0, False],
        [[{"role": "user", "content": "2"}], 0.0, False],
        [[], 1.0, True],
    ]
    assert stopped[1] == [[], pytest.approx(1 / 3 - 1.0), True]


@pytest.mark.slow
def test_mistakes_are_the_users(played):
    assert played["container"] == "runtime.run: tasks that need a container cannot be played"
    for name, message in {
        "options": "taskset.counts Extra",
        "missing": "'vf-missing' not found",
    }.items():
        line = played[name]
        assert line.startswith("environment.name: verifiers(id='vf-") and message in line
        assert "\n" not in line


@pytest.mark.slow
def test_example_of_the_page(tmp_path):
    (name,) = re.findall(r"environment\.name=(verifiers:\S+)", PAGE)
    (tmp_path / "my_taskset.py").write_bytes((TASKSETS / "vf_words.py").read_bytes())
    program = """
import json, sys
from semrl_jax.environments import pool
pool.START_TIMEOUT_S = 300.0  # the package takes 10 s of a core to import
with pool.EnvironmentPool(json.loads(sys.argv[1])) as environments:
    opening, *_ = openings = environments.openings(1, 100)
    episode = environments.open(opening)
    turn, error, *_ = episode.step(opening.task["answer"]).result(timeout=60)
    episode.end()
print(json.dumps([len(openings), turn[:3], error]))
"""
    assert run(program, section(name), path=tmp_path) == [100, [[], 2.0, True], ""]
