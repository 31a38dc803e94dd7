"""The page of shaded responses."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax import data, models
from semrl_jax.jobs import view
from semrl_jax.models.of_config import build_policy
from semrl_jax.support.errors import UserError
from tests.browser import open_page
from tests.cases import refused
from tests.fixtures import random_params
from tests.tiny import tiny_config

CHOOSE = "byId('%s').selectedIndex = %d; draw()"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"


def write_samples(file, responses, **columns):
    tokenizer = data.character_tokenizer()
    count = len(responses)
    rows = {
        "group_id": list(range(count)), "prompt": ["Q:1+2\nA:"] * count, "reference": ["3"] * count,
        "correct": [False] * count, "finish_reason": ["eos"] * count,
        "prompt_ids": [tokenizer.encode("Q:1+2\nA:")] * count,
        "response_ids": [tokenizer.encode(text) for text in responses],
        **columns,
    }  # fmt: skip
    pq.write_table(pa.table(rows), file)
    return file


def column(correct, name="policy"):
    """A policy whose responses to problems 0, 1, ... have these verdicts."""
    responses = {
        f"problem {i}": view.Response(None, None, None, None, value, None, None)
        for i, value in enumerate(correct)
    }
    return view.Column(view.PolicySource(name, None), None, responses)


def test_problems_are_chosen_by_verdict_and_name():
    columns = [column([True, False, False]), column([True, True, False, True])]

    def chosen(problems=(), show="all", limit=9, **options):
        names = view.chosen_problems(columns, problems, show, limit, **options)
        return [int(name[-1]) for name in names]

    assert chosen() == [0, 1, 2]
    assert chosen(limit=1) == [0]
    assert chosen(show="changed") == [1]
    assert (chosen(show="correct"), chosen(show="incorrect")) == ([0, 1], [2])
    assert chosen(("problem 2", "problem 0")) == [2, 0]
    assert chosen(verdicts=("wrong", "correct")) == [1]
    assert (chosen(verdicts=("any", "correct")), chosen(verdicts=("wrong", "any"))) == (
        [0, 1],
        [1, 2],
    )
    drawn = {tuple(chosen(limit=2, seed=seed)) for seed in range(20)}
    assert drawn == {(0, 1), (0, 2), (1, 2)} and chosen(limit=2, seed=3) == chosen(limit=2, seed=3)
    with pytest.raises(UserError, match=r"fits --show=all and --verdicts=correct,wrong\."):
        chosen(verdicts=("correct", "wrong"))
    refused(r"--verdicts has 1 values for 2 policies; give one .* of po", chosen, verdicts=("any",))
    refused(r"--problem='problem 3' is not there; problems are", chosen, ("problem 3",))
    with pytest.raises(UserError, match="none of the 3 problems fits --show=changed"):
        view.chosen_problems(columns[:1], (), "changed", 9)
    refused("no problem in common", view.chosen_problems, [columns[0], column([])], (), "all", 9)


def test_another_problem_of_the_same_name_is_not_compared():
    """Runs may have been evaluated on other data; both number its problems from 0."""
    first, second = column([True, False]), column([True, True])
    second.responses["problem 1"] = second.responses["problem 1"]._replace(reference="7")
    assert view.chosen_problems([first, second], (), "all", 9) == ["problem 0"]


def test_a_directory_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(directory):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr("semrl_jax.runs.policies.os.scandir", refuse)
    with pytest.raises(UserError, match=f"--policy={tmp_path} cannot be read: Permission denied"):
        view.find_columns([str(tmp_path)], None, None)


def test_damaged_rows_are_named(tmp_path):
    for prompt, response in (([], [4]), (None, [4]), ([3], None), ([3], [-1]), ([3], [2**40]),
                             ([3], [None]), ("3", [4]), ([[3]], [4])):  # fmt: skip
        file = write_samples(tmp_path / "x.parquet", ["1"], prompt_ids=[prompt],
                             response_ids=[response])  # fmt: skip
        refused(r"x\.parquet: .* has a row without token ids", view.read_responses, file)
    binary = pa.array([b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 1, binary.buffers())
    with pytest.raises(UserError, match=r"x\.parquet cannot be read as Parquet: .*UTF8"):
        view.read_responses(write_samples(tmp_path / "x.parquet", ["1"], reference=text))


def test_files_without_token_ids_are_refused(tmp_path):
    pq.write_table(pa.table({"response": ["1"]}), tmp_path / "text.parquet")
    with pytest.raises(UserError, match=r"has no column 'prompt_ids' \(rollouts/ of a run"):
        view.read_responses(tmp_path / "text.parquet")
    (tmp_path / "broken.parquet").write_text("no")
    for name in ("broken", "missing"):
        refused(f"{name}.parquet cannot be read", view.read_responses, tmp_path / f"{name}.parquet")
    empty = write_samples(tmp_path / "empty.parquet", [""])
    refused("has no response with a token", view.read_responses, empty)


def test_episodes_with_several_conversations_are_refused(tmp_path):
    """Their tokens do not see all tokens before them, which a pass over one sequence shows them."""
    file = write_samples(tmp_path / "x.parquet", ["1", "12"], conversations=[None, [0, 1]])
    refused(r"x\.parquet: an episode has several conversations", view.read_responses, file)


def test_a_character_of_several_tokens_belongs_to_the_last():
    tokens = data.TokenBytes(data.character_tokenizer())
    tokens.update({3: b"a", 4: "é".encode()[:1], 5: "é".encode()[1:], 6: b"\xff"})
    found = list(view.token_texts(tokens, [3, 4, 5, 3, 1, 6]))
    assert found == ["a", "", "é", "a", "<eos>", "\ufffd"]


@pytest.fixture
def model(tmp_path):
    policy, tokenizer = build_policy(tiny_config())
    directory = tmp_path / "model"
    models.save_directory(directory, random_params(policy), policy.config, tokenizer)
    return directory


def test_the_model_of_a_run_is_read_by_the_family_of_its_record(tmp_path, model):
    record = {"run_id": "a", "config": {"model": {"path": str(model), "family": "no.such_family"}}}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    samples = write_samples(tmp_path / "samples.parquet", ["12+3=45 x"])
    columns = view.find_columns([str(tmp_path / "run")], [0], samples)
    assert columns[0].source.family == "no.such_family"
    with pytest.raises(UserError, match=r"model\.family='no\.such_family'"):
        view.write_view(tmp_path / "v.html", columns, ["problem 0"], stride=4, progress=print)


@pytest.fixture
def page(tmp_path, model):
    samples = write_samples(tmp_path / "samples.parquet", ["12+3=45 x", "12+3=46 x"])
    columns = view.find_columns([str(model), str(model)], None, samples)
    second = dict(columns[1].responses)
    second["problem 0"] = second["problem 1"]._replace(prompt=HOSTILE, extracted=HOSTILE)
    columns[0].responses["problem 0"] = columns[0].responses["problem 0"]._replace(prompt=HOSTILE)
    columns[1] = columns[1]._replace(responses=second)
    names = view.chosen_problems(columns, (), "all", 9)
    view.write_view(tmp_path / "view.html", columns, names, stride=4, progress=lambda line: None)
    return tmp_path / "view.html"


@pytest.mark.slow
def test_the_page_has_a_value_for_every_token(page):
    index = re.search(r'id="index">(.*?)</script>', page.read_text())[1]
    index = json.loads(index)
    assert (index["columns"], index["stride"]) == (["model", "model"], 4)
    cell = index["problems"][0]["cells"][0]
    assert "".join(cell["tokens"]) == "12+3=45 x"
    assert cell["ends"] == [4, 8]
    assert [len(cell[name]) for name, *_ in view.VALUES] == [9, 9, 2, 2, 2]
    assert cell["velocity"][0] is None and cell["acceleration"] == [None, None]
    assert all(-20 < value < 0 for value in cell["logprob"])
    with pytest.raises(UserError, match="is no run with a recorded evaluation"):
        view.find_columns([str(page.parent / "model")], None, None)


@pytest.mark.browser
def test_a_browser_shades_marks_and_runs_no_text(page, tmp_path):
    with open_page(page, tmp_path / "profile") as browser:
        colours = (
            "new Set([...document.querySelectorAll('details[open] pre.response span')]"
            ".map((node) => node.style.background)).size"
        )
        assert browser.run(colours) > 3
        assert browser.run("document.querySelectorAll('.differs').length") == 0
        browser.run(CHOOSE % ("against", 1))
        marked = "[...document.querySelectorAll('.differs')].map((n) => n.textContent).join('')"
        assert browser.run(marked) == "12+3=46"  # the word of the second policy, not the x
        browser.run(CHOOSE % ("value", 2))
        title = "document.querySelector('pre.response span').title"
        assert re.fullmatch(r"tokens 1 to 4: \d+(\.\d+)?", browser.run(title))
        assert HOSTILE in browser.run("document.querySelector('pre.text').textContent")
        assert browser.run("document.title") == "responses, shaded"
        browser.resize(400)
        assert browser.run("document.documentElement.scrollWidth") <= 400
        assert browser.errors == []


CALL = '<tool_call>{"name": "calculate"}</tool_call>'
TURNS = ["1+", "46 x", "=46"]  # of the policy, the environment, the policy


@pytest.fixture
def episode(tmp_path, model):
    """The page of one episode."""
    mask = [True] * len(TURNS[0]) + [False] * len(TURNS[1]) + [True] * len(TURNS[2])
    samples = write_samples(
        tmp_path / "samples.parquet", ["".join(TURNS)], response_mask=[mask],
        turn_rewards=[[0.0, 1.5]],
    )  # fmt: skip
    columns = view.find_columns([str(model)], None, samples)
    file = tmp_path / "episode.html"
    view.write_view(file, columns, ["problem 0"], stride=2, progress=lambda line: None)
    return file


@pytest.mark.slow
def test_only_the_policys_own_tokens_of_an_episode_have_values(episode):
    index = json.loads(re.search(r'id="index">(.*?)</script>', episode.read_text())[1])
    cell = index["problems"][0]["cells"][0]
    assert (cell["turns"], cell["rewards"], cell["ends"]) == ([2, 4, 3], [0, 1.5], [2, 4])
    for name in ("entropy", "logprob"):
        assert [value is None for value in cell[name]] == [False] * 2 + [True] * 4 + [False] * 3


@pytest.mark.browser
def test_a_browser_shows_an_episode_turn_by_turn(episode, tmp_path):
    with open_page(episode, tmp_path / "profile") as browser:
        body = "document.querySelector('#problems > details .columns > div')"
        nodes = f"[...{body}.children].slice(2).map((n) => n.tagName + ' ' + n.textContent)"
        assert browser.run(nodes) == [
            "DIV turn 1, reward 0", "PRE 1+", "DETAILS answer: 46 x46 x", "DIV turn 2, reward 1.5",
            "PRE =46",
        ]  # fmt: skip
        browser.run(CHOOSE % ("value", 2))
        spans = f"[...{body}.querySelectorAll('pre.response span')]"
        titles = browser.run(f"{spans}.map((n) => n.title.replace(/: .*/, ''))")
        context = ["not the policy's"] * 4
        assert titles == [*["tokens 1 to 2"] * 2, *context, *["tokens 3 to 4"] * 2,
                          "after the last whole window"]  # fmt: skip
        shaded = browser.run(f"{spans}.map((n) => n.style.background !== '')")
        assert shaded == [True] * 2 + [False] * 4 + [True] * 2 + [False]
        assert "5 tokens" in browser.run(f"{body}.textContent")
        # Calls are folded in any form, and no text is lost.
        for call in (CALL, '```json\n{"name": "f"}\n```', '<|python_tag|>{"name": "f"}', CALL[:30]):
            text = json.dumps(f"so {call}")
            show = "(from, to) => make('pre', '', text.slice(from, to))"
            parts = f"(text => episode(text, [text.length], [null], {show}))({text})"
            found = browser.run(f"{parts}.map((n) => [n.tagName, n.lastChild.textContent])")
            assert found == [["DIV", "turn 1, reward none"], ["PRE", "so "], ["DETAILS", call]]
        assert browser.errors == []
