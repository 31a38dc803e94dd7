"""Environments of OpenEnv: servers of the package itself, and one that breaks the protocol."""

import contextlib
import http
import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from semrl_jax.environments.interface import Turn
from semrl_jax.environments.kinds import openenv
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import raised, refused
from tests.environments.test_documentation import PAGE
from tests.environments.test_pool import played, section, since

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = pathlib.Path(os.environ.get("SEMRL_OPENENV_PYTHON", ROOT / ".venv-openenv/bin/python"))
SCHEMA = {"action": {"properties": {"message": {"type": "string"}}, "required": ["message"]}}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    message = r"cannot be made: ImportError: .*websockets.*; pip install -e '.\[openenv\]'"
    refused(message, made, *named("openenv:url=ws://x")[:2])


class BadServer:
    """Repeats the policy's message, and breaks the protocol as it says; room for some at once."""

    def __init__(self, room=100):
        from websockets.sync.server import serve

        self.room, self._numbers = room, itertools.count()
        self._server = serve(
            self._play, "127.0.0.1", 0, process_request=self._schema, compression=None
        )
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()

    @staticmethod
    def _schema(connection, request):
        if request.path == "/schema":
            return connection.respond(http.HTTPStatus.OK, json.dumps(SCHEMA))

    def _play(self, connection):
        def send(kind, **data):
            connection.send(json.dumps({"type": kind, "data": data}))

        def observe(text, reward=None, done=False):
            send("observation", observation={"text": text}, reward=reward, done=done)

        episode, again = next(self._numbers), False
        if self.room <= 0:
            send("error", code="CAPACITY_REACHED", message="1/1 sessions")
            return
        self.room -= 1
        try:
            for text in connection:
                request = json.loads(text)
                match request["type"], request.get("data", {}).get("message"):
                    case "state", _:
                        send("state", episode_id=episode)
                        if again:
                            observe("again")
                    case "reset", _:
                        observe(f"seed {request['data']['seed']}")
                    case _, "late":
                        time.sleep(3)
                        observe("late")
                    case _, "twice":
                        observe("one")
                        observe("two")
                    case _, "again":
                        observe("one")
                        again = True
                    case _, "other":
                        episode = next(self._numbers)
                        observe("of another")
                    case _, "close":
                        return
                    case _, "die":
                        connection.socket.shutdown(socket.SHUT_RDWR)
                        return
                    case _, "large":
                        observe("a" * 100_000_000)
                    case _, "bytes":
                        raw = b'{"type": "observation", "data": {"observation": {"text": "a\xffb"}'
                        connection.send(raw + b', "done": false}}', text=True)
                    case _, "text":
                        connection.send("hello")
                    case _, "number":
                        connection.send("5")
                    case _, "refuse":
                        errors = [{"loc": ["message"], "msg": "too rude"}]
                        send("error", code="VALIDATION_ERROR", message="Invalid", errors=errors)
                    case _, "fail":
                        send("error", code="EXECUTION_ERROR", message="it broke")
                    case _, "nan":
                        observe("", reward=float("nan"))
                    case _, message:
                        observe(message, reward=1, done=message == "end")
        finally:
            self.room += 1


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("websockets", reason="optional: pip install -e '.[openenv]'")
    with contextlib.closing(BadServer()) as found:
        yield found


@pytest.fixture(scope="module")
def environments(server):
    name = f"openenv:url={server.url}:observation=text"
    with EnvironmentPool(section(name, timeout_s=2.0, max_observation_chars=50)) as found:
        yield found


def play(environments, *messages):
    """The prompt and the answers to messages, in one episode."""
    (opening,) = environments.openings(seed=1, count=1)
    return opening, played(environments, opening, *messages)


def user(text):
    return [{"role": "user", "content": text}]


def test_text_becomes_an_action_and_an_observation_a_message(environments):
    opening, answers = play(environments, "one", "end")
    assert opening.messages == user(f"seed {opening.seed}")
    assert [answer.turn for answer in answers] == [
        Turn(user("one"), 1.0, False),
        Turn((), 1.0, True),
    ]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("late", "timeout: step took more than 2 s"),
        (
            "twice",
            "exception: RuntimeError: {url} answered a step with observation and observation",
        ),
        ("other", "exception: RuntimeError: {url} answered for another episode"),
        ("close", "exception: ConnectionError: {url} ended the episode: "),
        ("die", "exception: ConnectionError: {url} ended the episode: "),
        ("text", "exception: JSONDecodeError: "),
        ("number", "exception: TypeError: "),
        ("fail", "exception: RuntimeError: {url}: EXECUTION_ERROR: it broke"),
        ("nan", "invalid: reward must be a number"),
    ],
)
def test_a_broken_server_costs_the_episode(environments, server, message, error):
    other = environments.open(environments.openings(seed=2, count=1)[0])
    before = environments.counters
    _, (first, failed, later) = play(environments, "one", message, "two")
    assert not first.error
    assert failed.error.startswith(error.format(url=f"{server.url}/ws"))
    assert failed.turn == Turn((), 0.0, True) and later == failed
    failures = since(before, environments)
    assert sum(failures.values()) == failures["num_episodes"] + failures["num_turns"] + 1
    assert other.step("end").result(timeout=60).turn == Turn((), 1.0, True)
    other.end()


def test_a_second_answer_that_comes_later_costs_the_episode(environments, server):
    _, (first, failed) = play(environments, "again", "two")
    assert first.turn.messages == user("one")
    assert failed.error.startswith(f"exception: RuntimeError: {server.url}/ws ")


@pytest.mark.parametrize(
    ("message", "shown"),
    [("bytes", "a\N{REPLACEMENT CHARACTER}b"), ("refuse", "error: Invalid; ['message']: too rude")],
)
def test_an_odd_observation_is_a_message(environments, message, shown):
    _, answers = play(environments, message, "one")
    assert [answer.error for answer in answers] == ["", ""]
    assert answers[0].turn == Turn(user(shown), 0.0, False)


@pytest.mark.slow
def test_an_observation_of_100_mb_is_cut(server):
    fields = section(f"openenv:url={server.url}:observation=text", max_observation_chars=50)
    with EnvironmentPool(fields) as environments:
        _, answers = play(environments, "large", "one")
    assert [answer.error for answer in answers] == ["", ""]
    assert answers[0].turn == Turn(user("a" * 50), 0.0, False)


def test_an_episode_waits_until_the_server_has_room(server):
    with (
        contextlib.closing(BadServer(room=1)) as small,
        EnvironmentPool(section(f"openenv:url={small.url}")) as environments,
    ):
        first, second = environments.openings(seed=1, count=2)
        playing = environments.open(first)
        assert not playing.step("one").result(timeout=60).error
        waiting = environments.open(second)
        answer = waiting.step("end")
        time.sleep(0.5)
        assert not answer.done()
        playing.end()
        assert answer.result(timeout=60).turn.done
        waiting.end()


def test_a_server_without_room_says_how_to_make_it(server, monkeypatch):
    monkeypatch.setattr(openenv, "WAIT_S", 0.3)
    with contextlib.closing(BadServer(room=0)) as full:
        environment = openenv.Environment(full.url)
        message = "has no room; start it with max_concurrent_envs of at"
        raised(RuntimeError, message, environment.reset, {}, seed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("url=localhost:8000", "url='localhost:8000' must be like ws://HOST:PORT"),
        ("url=ws://127.0.0.1:9", r"http://127.0.0.1:9/schema cannot be read \(.*refused"),
        ("url={url}:action=text", "action='text' must be one of message"),
    ],
)
def test_mistakes_are_the_users(server, options, message):
    refused(message, made, *named(f"openenv:{options.format(url=server.url)}")[:2])


def test_a_field_that_no_observation_has_is_named(server):
    environment = openenv.Environment(server.url, observation="words.0")
    message = "observation='words.0' has no 'words' in .*seed"
    raised(ValueError, message, environment.reset, {}, seed=1)


@contextlib.contextmanager
def real_server(kind):
    """A server that the package openenv makes; its address."""
    pytest.importorskip("websockets", reason="optional: pip install -e '.[openenv]'")
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run benchmarks/peers/make_env.sh openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = pathlib.Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([PYTHON, script, kind, str(port)])
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_real_server():
    with real_server("echo") as url, EnvironmentPool(section(f"openenv:url={url}")) as environments:
        opening, answers = play(environments, "hello", "bye")
        assert opening.messages == user(f'{{"text": "Say something, {opening.seed}."}}')
        assert answers[0].turn == Turn(user('{"text": "hello"}'), 0.5, False)
        assert answers[1].turn == Turn((), 0.3, True)
        _, (failed,) = play(environments, "fail")
        assert re.fullmatch(r"exception: RuntimeError: .*: EXECUTION_ERROR: it broke", failed.error)
        # The processes have ended without a word, and the server has room again.
        assert [play(environments, "bye")[1][0].error for _ in range(6)] == [""] * 6


@pytest.mark.slow
def test_a_real_game():
    """The example of the page: the same observations, on another port."""
    (name,) = re.findall(r"environment\.name=(openenv:\S+)", PAGE)
    with (
        real_server("number") as url,
        EnvironmentPool(section(name.replace("ws://localhost:8000", url))) as environments,
    ):
        openings = environments.openings(seed=1, count=3)
        assert openings == environments.openings(seed=1, count=3)
        scores = []
        for opening in openings:
            low, high, done, score = 1, 20, False, 0.0
            episode = environments.open(opening)
            while not done:
                guess = (low + high) // 2
                turn = episode.step(f"[{guess}]").result(timeout=60).turn
                done, score = turn.done, score + turn.reward
                is_higher = (
                    not done and "higher" in turn.messages[-1]["content"].split("[GAME]")[-1]
                )
                low, high = (guess + 1, high) if is_higher else (low, guess - 1)
            episode.end()
            scores.append(score)
        assert scores == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_real_tools():
    with (
        real_server("tools") as url,
        EnvironmentPool(section(f"openenv:url={url}:prompt=What is 2 + 3?")) as environments,
    ):
        call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %s}}</tool_call>'
        opening, answers = play(environments, call % "3", call % '"x"', "5")
        system, asked = opening.messages
        assert '"name": "add"' in system["content"] and asked == user("What is 2 + 3?")[0]
        assert answers[0].turn.messages == user("<tool_response>\n5\n</tool_response>")
        assert "error" in answers[1].turn.messages[0]["content"]
        assert answers[2].turn == Turn((), 0.0, True)
