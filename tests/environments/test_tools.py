"""Environments with tools, in their processes: hostile tools, and tools without a schema."""

import json

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.pool import EnvironmentPool, Opening, task_seed
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import refused
from tests.environments.test_pool import USERS, nonzero, played, section, since
from tests.environments.tools.test_formats import MISTRAL, QWEN


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "pid"


@pytest.fixture(scope="module")
def tooled(path):
    """A tool that obeys within two seconds, called in blocks of JSON."""
    fields = {"timeout_s": 2.0, "max_observation_chars": 400, "memory_limit_gib": 1.0}
    with EnvironmentPool(section(f"{USERS}:Tooled:path={path}", **fields)) as environments:
        yield environments


def call(what):
    return f"```json\n{json.dumps({'name': 'obey', 'arguments': {'what': what}})}\n```"


def play(environments, *messages):
    return played(environments, environments.openings(seed=1, count=2)[1], *messages)


def text(answer):
    """What the policy reads: one message of the user with the answers of all calls."""
    assert not answer.error
    (message,) = answer.turn.messages
    assert message["role"] == "user" and (answer.turn.reward, answer.turn.done) == (0.0, False)
    before, after = "<tool_response>\n", "\n</tool_response>"
    assert message["content"].startswith(before) and message["content"].endswith(after)
    return message["content"].removeprefix(before).removesuffix(after)


def test_a_prompt_describes_the_tools(tooled):
    first, _ = tooled.openings(seed=1, count=2)
    task = {"number": 0}
    assert first == Opening(task, task_seed(task), first.messages, tooled.name)
    system, user = first.messages
    assert system["role"] == "system" and user == {"role": "user", "content": "Say something."}
    assert json.dumps(tooled.schemas[0]) in system["content"]


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("raise", "error: KeyError: 'two\\nlines'"),
        ("sys.exit", "error: SystemExit: 3"),
        ("allocate", "error: MemoryError"),
        ("read", "error: EOFError: EOF when reading a line"),
        ("print", "printed"),
        ("fork", "forked"),
        ("long", f"{'a' * 320}\n[99999680 more characters]"),
        ("say <|im_end|>", "<|im_end|>"),
    ],
)
def test_what_a_tool_does_is_an_answer(tooled, what, answer, capfd):
    before = tooled.counters
    *found, last = play(tooled, call(what), call("say next"), "a", "end")
    assert [text(each) for each in found[:2]] == [answer, "next"]
    assert found[2].turn == Turn([{"role": "user", "content": "no call: a"}], 1.0, False)
    assert last.turn == Turn((), 1.0, True)
    expected = {"num_episodes": 1, "num_turns": 4, "num_tool_calls": 2}
    expected |= {"num_failed_tool_calls": 1} if answer.startswith("error: ") else {}
    assert nonzero(since(before, tooled)) == expected
    assert "noise" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ('```json\n{"name": "obey", "argu\n```', "error: the call cannot be read: invalid JSON: "),
        (call("say 1") + "\n" + call("say 2"), "1\n</tool_response>\n<tool_response>\n2"),
    ],
)
def test_calls_are_read(tooled, message, answer):
    (found,) = play(tooled, message)
    assert text(found).startswith(answer)


def test_a_chat_template_has_its_own_form_of_calls():
    with EnvironmentPool(section(f"{USERS}:Tooled")) as environments:
        assert environments.speak(QWEN) == environments.schemas != []
        (opening,) = environments.openings(seed=1, count=1)
        assert opening.messages == [{"role": "user", "content": "Say something."}]
        assert environments.tool_reply() == [{"role": "tool", "content": "1"}]
        called = '<tool_call>\n{"name": "obey", "arguments": {"what": "say %d"}}\n</tool_call>'
        (found,) = play(environments, f"{called % 1}\n{called % 2}")
        assert found.turn.messages == [
            {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"},
        ]  # fmt: skip
        refused(r"environment\.tool_format='auto': the chat", environments.speak, MISTRAL)


def test_a_form_can_be_chosen():
    name = f"{USERS}:Tooled"
    with EnvironmentPool(section(name, tool_format="json")) as environments:
        assert environments.speak(MISTRAL) == []
        assert text(play(environments, call("say 1"))[0]) == "1"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("method", r"tools has 'obey', a method of the class; .* self.tools = \[self.obey\]"),
        ("text", "Tooled has tools='obey'; it must be a list of functions"),
        ("twice", "tools has 'obey' twice; give each function its own name"),
        ("long", "the schemas of tools have 100[0-9]+ characters, .* at most 60000 are allowed"),
    ],
)
def test_a_tool_without_a_schema_stops_the_run_before_it_starts(tools, message):
    name = f"{USERS}:Tooled:tools={tools}"
    assert refused(message, made, *named(name)[:2]).startswith("environment.name: ")
