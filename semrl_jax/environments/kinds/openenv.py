"""Environments that an OpenEnv server plays. One connection to its WebSocket is one episode.

The protocol numbers no messages. So every request is followed by one for the server's state, and
the kinds of the answers and the id of the episode must fit: an answer that comes twice, or belongs
to another episode, ends the episode.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from semrl_jax.environments.interface import Message, Turn
from semrl_jax.environments.tools.formats import choose_format, schema_of
from semrl_jax.environments.tools.functions import Answer

MAX_BYTES = 1 << 27  # of a message; the package's own clients accept 100 MB
WAIT_S = 10.0  # for the server: to answer, and to notice the end of earlier episodes
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # of environments with tools


class Environment:
    """An environment of an OpenEnv server, which plays as many episodes at once as it allows.

    If the server offers tools, the policy calls them, and a message without a call ends the
    episode.

    Args:
      url: of the server, such as "ws://localhost:8000".
      action: the field of an action that gets the policy's message; "": the only required field. If
        there are several, the message must be a whole action, a JSON object.
      observation: the field of an observation that the policy reads, such as "text" or
        "messages.0.content"; "": all fields, as JSON.
      prompt: text before the first observation.
    """

    def __init__(self, url: str, action: str = "", observation: str = "", prompt: str = ""):
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise ImportError(f"{error}; pip install -e '.[openenv]'") from None
        base = re.sub("^http", "ws", url.rstrip("/")).removesuffix("/ws")
        if not re.match(r"wss?://.", base):
            raise ValueError(f"url={url!r} must be like ws://HOST:PORT")
        os.environ.setdefault("NO_PROXY", "localhost,127.0.0.1")  # a proxy cannot reach these
        self._url, self._connect, self._broken = f"{base}/ws", connect, WebSocketException
        self._path, self._prompt = observation.split(".") if observation else (), prompt
        schema = _action_schema(f"http{base.removeprefix('ws')}/schema")
        fields = schema.get("properties", {})
        if action and action not in fields:
            raise ValueError(f"action={action!r} must be one of {', '.join(fields)}")
        required = schema.get("required", ())
        self._action = action or (required[0] if len(required) == 1 else "")
        self._is_text = fields.get(self._action, {}).get("type") == "string"
        self._has_tools = schema.get("title") in TOOL_ACTIONS
        self._form, self._schemas = choose_format(None, "hermes"), []
        self._connection: Any = None
        self._episode_id: Any = None

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        numbers = random.Random(seed)
        return [{"game": numbers.getrandbits(32)} for _ in range(count)]

    def reset(self, task: Mapping[str, Any], seed: int) -> list[Message]:
        if self._connection is None:
            data = self._joined(seed)
            if self._has_tools:
                tools = self._asked("step", {"type": "list_tools"})["observation"]["tools"]
                names = ("name", "description", "input_schema")
                self._schemas = [schema_of(*(tool[name] for name in names)) for tool in tools]
        else:
            data = self._asked("reset", {"seed": seed})
        text = "\n\n".join(part for part in (self._prompt, self._shown(data)) if part)
        return self._form.told([{"role": "user", "content": text}], self._schemas)

    def _joined(self, seed: int) -> Mapping[str, Any]:
        """Connects and resets, as soon as the server has room."""
        deadline = time.monotonic() + WAIT_S
        while True:
            # Never closed, since that would wait for the server. The process's end closes it.
            self._connection = self._connect(
                self._url,
                max_size=MAX_BYTES,
                compression=None,
                ping_interval=None,  # a step may keep the server busy
            ).__enter__()
            try:
                return self._asked("reset", {"seed": seed})
            except _CapacityError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def step(self, message: str) -> Turn:
        if self._has_tools:
            return self._call_tools(message)
        try:
            data = self._asked("step", self._action_of(message))
        except _RefusedError as error:  # the policy's mistake
            return Turn(f"error: {error}")
        done = data.get("done")
        return Turn("" if done is True else self._shown(data), data.get("reward") or 0.0, done)

    def _call_tools(self, message: str) -> Turn:
        answers, reward = [], 0.0
        for call in self._form.parse(message):
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            try:
                if call.error:
                    raise _RefusedError(call.error)
                data = self._asked("step", action)
            except _RefusedError as error:
                answers.append(Answer(f"error: {error}"))
                continue
            reward += data.get("reward") or 0.0
            answers.append(Answer(_tool_answer(data["observation"])))
            if data.get("done"):
                return Turn(reward=reward, done=True)
        return Turn(self._form.messages(answers), reward, done=not answers)

    def _action_of(self, message: str) -> Mapping[str, Any]:
        if self._is_text:
            return {self._action: message}
        try:
            value = json.loads(message)
        except (ValueError, RecursionError):
            value = message
        if self._action:
            return {self._action: value}
        if not isinstance(value, dict):
            raise _RefusedError("write an action as a JSON object, and nothing else")
        return value

    def _shown(self, data: Mapping[str, Any]) -> str:
        """What the policy reads of an observation."""
        value = {key: each for key, each in data["observation"].items() if key != "metadata"}
        for key in self._path:
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (LookupError, ValueError, TypeError):
                raise ValueError(
                    f"observation={'.'.join(self._path)!r} has no {key!r} in {_text(value):.80}"
                ) from None
        return _text(value or "")

    def _asked(self, kind: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The observation, reward and done that answer a request."""
        if kind == "step":  # A full server speaks first.
            with contextlib.suppress(TimeoutError, self._broken):
                self._connection.recv(timeout=0, decode=False)
                raise RuntimeError(f"{self._url} sent a message that was not asked for")
        with contextlib.suppress(self._broken):  # it may have said why
            self._connection.send(json.dumps({"type": kind, "data": fields}))
            self._connection.send('{"type": "state"}')
        answer, data = self._received()
        code = data.get("code")
        if answer == "error" and code == "CAPACITY_REACHED":
            raise _CapacityError(
                f"{self._url} has no room; start it with max_concurrent_envs of at least "
                "data.prompts_per_step times rollout.group_size"
            )
        if answer == "error" and code != "VALIDATION_ERROR":
            raise RuntimeError(f"{self._url}: {code}: {data.get('message')}")
        after, state = self._received()
        if answer not in ("observation", "error") or after not in ("state", "error"):
            raise RuntimeError(f"{self._url} answered a {kind} with {answer} and {after}")
        if answer == "error":
            reasons = [f"{each.get('loc')}: {each.get('msg')}" for each in data.get("errors", ())]
            raise _RefusedError("; ".join([str(data.get("message")), *reasons]))
        if kind == "reset":
            self._episode_id = state.get("episode_id")
        elif state.get("episode_id") != self._episode_id:
            raise RuntimeError(f"{self._url} answered for another episode")
        return data

    def _received(self) -> tuple[str, Mapping[str, Any]]:
        """The type and the data of the next message."""
        try:
            raw = self._connection.recv(decode=False)
        except self._broken as error:
            raise ConnectionError(f"{self._url} ended the episode: {error}") from error
        message = json.loads(raw.decode("utf-8", "replace"))
        return message["type"], message["data"]


class _CapacityError(RuntimeError):
    """The server plays as many episodes as it can."""


class _RefusedError(ValueError):
    """The server does not accept the policy's action; the text is for the policy."""


def _action_schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of the server's actions."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return json.load(reply)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConnectionError(
            f"{url} cannot be read ({error}); start an OpenEnv server there, or change url"
        ) from error


def _tool_answer(observation: Mapping[str, Any]) -> str:
    """The text of a tool's result, which may be in the form of MCP."""
    if error := observation.get("error"):
        return f"error: {_text(error.get('message', error))}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [block.get("text", "") for block in result["content"]]
        return ("error: " if result.get("is_error") else "") + "\n".join(texts)
    return _text(result)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
