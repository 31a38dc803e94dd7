"""Questions about a corpus: the files of a user, the tool, and the judgement."""

import json

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.kinds.search import Environment
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import refused
from tests.environments.test_pool import played, section

CAPITALS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo"}


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    texts = [f"The capital of {country} is {city}." for country, city in CAPITALS.items()]
    return write(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])


@pytest.fixture
def questions(tmp_path):
    rows = [{"question": f"Capital of {name}?", "answer": city} for name, city in CAPITALS.items()]
    return write(tmp_path / "questions.jsonl", rows)


def test_an_episode_finds_the_answer(corpus, questions):
    name = f"search:corpus={corpus}:questions={questions}:num_results=1"
    with EnvironmentPool(section(name)) as environments:
        found = environments.openings(seed=3, count=10)
        assert found == environments.openings(3, 10)
        assert {opening.task["answer"] for opening in found} == set(CAPITALS.values())
        country = found[0].task["question"].split()[-1].strip("?")
        query = {"name": "search", "arguments": {"query": f"capital {country}"}}
        call = f"```json\n{json.dumps(query)}\n```"
        answer, last = played(environments, found[0], call, CAPITALS[country])
    passage = f"[1] The capital of {country} is {CAPITALS[country]}."
    (message,) = answer.turn.messages
    assert message["content"] == f"<tool_response>\n{passage}\n</tool_response>"
    assert last.turn == Turn((), 1.0, True)


@pytest.mark.parametrize(
    ("answer", "message", "reward"),
    [
        ("Paris", "Paris", 1.0), ("Paris", " paris.", 1.0), ("Paris", "The answer is Paris.", 1.0),
        ("Paris", "<think>\nLima?\n</think>\n\nParis", 1.0), ("Paris", "Lima", 0.0),
        ("Paris", "", 0.0),
        ("Paris", "Paris or Lima", 0.0), (1969, "In July 1969", 1.0), (0.5, "1/2", 1.0),
        (["NYC", "New York"], "New York", 1.0), (["NYC", "New York"], "York", 0.0),
    ],
)  # fmt: skip
def test_answers_are_compared_by_the_grader(corpus, tmp_path, answer, message, reward):
    file = write(tmp_path / "one.jsonl", [{"question": "?", "answer": answer}])
    environment = Environment(corpus, file)
    environment.reset(environment.tasks(0, 1)[0], seed=0)
    assert environment.step(message) == Turn((), reward, True)


@pytest.mark.parametrize(
    "row", [{"question": "?"}, {"question": "?", "answer": []}, {"question": "?", "answer": [None]},
            {"question": 3, "answer": "a"}, {"question": "", "answer": "a"},
            {"question": "?", "answer": True}, {"question": "?", "answer": ["a", ""]}],
)  # fmt: skip
def test_a_row_that_is_no_question_is_named(corpus, tmp_path, row):
    file = write(tmp_path / "bad.jsonl", [{"question": "?", "answer": "a"}, row])
    refused(r"bad\.jsonl, line 2", Environment, corpus, file)


def test_a_file_that_is_not_there_is_one_line(corpus, tmp_path):
    name = f"search:corpus={corpus}:questions={tmp_path}/none.jsonl"
    assert "UserError" not in refused(r"none\.jsonl", made, *named(name)[:2])
