"""Programs that only know an OpenAI endpoint, with OpenAI's own client."""

import contextlib
import json
import os
import pathlib
import threading

import pytest

from semrl_jax.environments.kinds import agent
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import refused, slow_after
from tests.environments.test_pool import played, section
from tests.running import wait_until

PROGRAM = """
import json, os

import openai

task = json.loads(os.environ["TASK"])
client = openai.OpenAI(max_retries=0)
messages = [{"role": "user", "content": task["question"]}]
add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
tools = [{"type": "function", "function": add}] if task.get("tools") else openai.NOT_GIVEN

def ask(stream=False):
    found = client.chat.completions.create(
        model="any", messages=messages, tools=tools, temperature=0.2, stream=stream
    )
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in found)
    message = found.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message

said = ask()
if said.tool_calls:
    for call in said.tool_calls:
        found = json.loads(call.function.arguments)
        text = str(found["a"] + found["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    said = ask()
match said.content:
    case "again":
        messages.append({"role": "user", "content": "Once more."})
        said = ask()
    case "other":
        del messages[:]
        messages.append({"role": "user", "content": "New."})
        ask()
    case "stream":
        messages.append({"role": "user", "content": "In pieces."})
        said.content = ask(stream=True)
    case "call":
        messages.append({"role": "user", "content": "In pieces."})
        with client.chat.completions.stream(model="any", messages=messages, tools=tools) as events:
            (call,) = events.get_final_completion().choices[0].message.tool_calls
        said.content = call.function.name
print(0.5 if said.content == task["answer"] else "wrong")
"""


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A pool, and the openings of both tasks."""
    directory = tmp_path_factory.mktemp("agent")
    (directory / "agent.py").write_text(PROGRAM)
    tasks = [
        {"question": "2 + 3?", "answer": "5"},
        {"question": "4 + 4?", "answer": "8", "tools": 1},
    ]
    (directory / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    name = f"agent:program={directory}/agent.py:tasks={directory}/tasks.jsonl"
    with EnvironmentPool(section(name, timeout_s=60.0)) as environments:
        openings = sorted(environments.openings(0, 9), key=lambda each: each.task["question"])
        assert len(openings) == 2  # of nine that were asked for: no task comes twice
        yield environments, openings


@pytest.mark.slow
@pytest.mark.parametrize("first", ["again", "stream"])
def test_further_questions_are_turns(asking, first):
    environments, (opening, _) = asking
    more, end = played(environments, opening, first, "5")
    assert opening.messages == [{"role": "user", "content": "2 + 3?"}]
    text = {"again": "Once more.", "stream": "In pieces."}[first]
    assert more.turn.messages == [{"role": "user", "content": text}] and not more.turn.done
    assert (end.turn.done, end.turn.reward) == (True, 0.5)


@pytest.mark.slow
def test_tools_of_the_program_are_called_in_the_policys_form(asking):
    environments, (_, opening) = asking
    call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 5}}</tool_call>'
    answer, end = played(environments, opening, call, "8")
    system = opening.messages[0]
    assert "add" in system["content"] and system["role"] == "system"
    assert answer.turn.messages == [
        {"role": "user", "content": "<tool_response>\n8\n</tool_response>"}
    ]
    assert end.turn.reward == 0.5


@pytest.mark.slow
def test_a_streamed_call_can_be_joined(asking):
    environments, (_, opening) = asking
    call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 5}}</tool_call>'
    _, end = played(environments, opening, "call", call)
    assert (end.turn.done, end.turn.reward) == (True, 1.0)  # no exception: the exit status is 0


ASKS = """
import json, os, re, urllib.request

def ask(body, path="/chat/completions", base=os.environ["OPENAI_BASE_URL"], **headers):
    url = base + path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)

wrong = [ask(b"no JSON"), ask(b"{}"), ask(b'{"messages": [1]}')]
assert all("cannot be read" in each["error"]["message"] for each in wrong), wrong
assert ask(None, "/models/policy")["id"] == "policy"
stranger = re.match("http://[^/]+", os.environ["OPENAI_BASE_URL"])[0] + "/v1"  # knows the port
for body in (b'{"messages": [{"role": "user", "content": "Hello."}]}', None):
    assert "OPENAI_BASE_URL" in ask(body, base=stranger)["error"]["message"]
ask(json.dumps({"messages": [{"role": "developer", "content": os.environ["SEED"]}]}).encode())
"""


def test_many_first_questions_leave_nothing_open(tmp_path):
    (tmp_path / "agent.py").write_text(ASKS)
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    environment = agent.Environment(str(tmp_path / "agent.py"), str(tmp_path / "tasks.jsonl"))

    def num_open():
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    before = num_open()
    for seed in range(6):
        assert environment.reset({}, seed) == [{"role": "system", "content": str(seed)}]
    assert environment.step("yes").reward == 1
    wait_until(lambda: num_open() <= before + 3)  # both files, and a thread that ends


@pytest.mark.slow
def test_another_conversation_has_its_own_number(asking):
    environments, (opening, _) = asking
    other, end = played(environments, opening, "other", "5")
    assert other.turn.messages == [{"role": "user", "content": "New."}]
    assert (other.turn.conversation, other.turn.done) == (1, False)
    assert (end.turn.done, end.turn.reward) == (True, 1.0)


def test_mistakes_are_one_line():
    name = "agent:program=/no/where.py:tasks=x"
    refused("program='/no/where.py' is no file", made, *named(name)[:2])


ODD = """
import json, os, socket, subprocess, sys, threading, time, urllib.request

task = json.load(sys.stdin)
assert os.environ.get("TASK", json.dumps(task)) == json.dumps(task)
url, messages = os.environ["OPENAI_BASE_URL"], []

def ask(text):
    asked = [*messages, {"role": "user", "content": text}]
    body = json.dumps({"messages": asked}).encode()
    with urllib.request.urlopen(f"{url}/chat/completions", body) as answer:
        messages[:] = [*asked, json.load(answer)["choices"][0]["message"]]
    return messages[-1]["content"]

match ask(str(len(task["text"]))):
    case "hang":
        subprocess.run(["sleep", "1000"])
    case "child":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(0.5)
    case "noisy":
        os.write(1, b"x" * 10**7 + b"\\n0.25\\n")
        os.write(2, b"A library says good-bye.")
        os._exit(0)
    case "wrong":
        print("no number")
    case "die":
        sys.exit("it broke")
    case "close":
        os.close(1)
    case "signal":
        os.kill(os.getpid(), 9)
    case "connections":
        port = int(url.rpartition(":")[2].partition("/")[0])
        many = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        print(0.5 if ask("Go on.") == "end" else 0)
    case "twice":
        threading.Thread(target=ask, args=["One."]).start()
        ask("Two.")
    case "nan":
        print("nan")
    case "unreadable":
        for message in ({"role": "user", "content": 5}, {"role": "owner", "content": ""}):
            messages.append(message)
            try:
                ask("Go on.")
            except urllib.error.HTTPError as error:
                print(0.5 if error.code == 400 else 0)
            messages.pop()
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A pool, openings by the length of the task's text, and a text in all their processes."""
    directory = tmp_path_factory.mktemp("odd")
    (directory / "agent.py").write_text(ODD)
    rows = [{"mark": str(directory), "text": text} for text in ("", "x" * 200_000)]
    (directory / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = f"agent:program={directory}/agent.py:tasks={directory}/tasks.jsonl"
    with EnvironmentPool(section(name, timeout_s=4.0)) as environments:
        openings = environments.openings(0, 2)
        yield environments, {len(each.task["text"]): each for each in openings}, str(directory)


def with_mark(mark):
    """Processes that have a text in their arguments or variables."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


@pytest.mark.parametrize(
    ("messages", "length", "reward", "error"),
    slow_after(
        5,
        [
            (["noisy"], 0, 0.25, ""),  # the number in the last line
            (["wrong"], 0, 1.0, ""),  # the exit status is 0
            (["die"], 0, 0.0, ""),
            (["nan"], 0, 0.0, "invalid: reward must be a number"),
            (["end"], 200_000, 1.0, ""),  # of a task that is too large for a variable
            (["hang"], 0, 0.0, "timeout: step took more than 4 s"),
            (["child"], 0, 0.5, ""),
            (["close"], 0, 1.0, ""),
            (["signal"], 0, 0.0, ""),
            (["connections", "end"], 0, 0.5, ""),
            (["twice", "end", "end"], 0, 1.0, ""),  # the second is another conversation
            (["unreadable"], 0, 0.5, ""),
        ],
    ),
)
def test_a_program_is_rewarded_costs_its_own_episode_and_leaves_nothing(
    odd, messages, length, reward, error
):
    environments, openings, mark = odd
    assert openings[length].messages == [{"role": "user", "content": str(length)}]
    episode = environments.open(openings[length])
    try:
        *_, last = [episode.step(each).result(timeout=60) for each in messages]
        assert "child" not in messages or with_mark(mark)
    finally:
        episode.end()
    assert (last.turn.reward, last.turn.done) == (reward, True)
    assert last.error.startswith(error) and bool(last.error) == bool(error)
    wait_until(lambda: not with_mark(mark))
