"""A program that asks an OpenAI endpoint: each of its questions is a turn of the policy.

The endpoint is on a port of this process. The program finds its address, which has a random part,
in OPENAI_BASE_URL, a seed in SEED, and the task, a JSON object, in standard input and, unless it is
large, in TASK. Its reward is the number in the last line that it prints (not as an error), or,
without one, 1 for the exit status 0 and 0 for another.

The endpoint takes chats, and prompts of token ids from programs that tokenise themselves, such as
verifiers' train client.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import os
import pathlib
import queue
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from semrl_jax.data import read_rows
from semrl_jax.environments.interface import Message, Turn
from semrl_jax.environments.tools.formats import choose_format
from semrl_jax.environments.tools.functions import Answer
from semrl_jax.support.choices import TOKEN_IDS
from semrl_jax.support.errors import UserError

FORM = choose_format(None, "hermes")
ROLES = ("system", "user", "assistant", "tool")
MAX_BODY_BYTES = 8 * 2**20
MAX_PRINTED_BYTES = 2000  # of the program's last line, and of its error
MAX_TASK_BYTES = 100_000  # of TASK: Linux refuses a variable of 128 KiB


class Environment:
    """The tasks of a file, each for a run of a program.

    Args:
      program: path of a Python file, or of another executable.
      tasks: a .jsonl or .parquet file; a row is a task.
    """

    def __init__(self, program: str, tasks: str):
        if not pathlib.Path(program).is_file():
            raise ValueError(f"program={program!r} is no file")
        program = os.path.abspath(program)
        self._command = [sys.executable, program] if program.endswith(".py") else [program]
        self._tasks = list(_tasks(tasks))
        self._process: subprocess.Popen | None = None

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        return random.Random(seed).sample(self._tasks, min(count, len(self._tasks)))

    def reset(self, task: Mapping[str, Any], seed: int) -> list[Message]:
        if self._process is not None:  # of another task, whose first question was enough
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._question.answer.put(None)
        # Said by the program and the policy in each conversation: messages, or token ids.
        self._said: list[list[Any]] = []
        self._asked: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - for long
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        server = _Server(("127.0.0.1", 0), _Handler)
        server.asked = self._asked
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = json.dumps(task).encode()
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/{server.token}/v1",
            "OPENAI_API_KEY": "none",
            "SEED": str(seed),
        }
        if len(text) <= MAX_TASK_BYTES:
            environment["TASK"] = text.decode()
        with tempfile.TemporaryFile() as given:
            given.write(text)
            given.seek(0)
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=given,
                stdout=self._output,
                stderr=self._errors,
                start_new_session=True,  # so that its children can be killed with it
            )
        process, asked = self._process, self._asked

        def await_end() -> None:
            process.wait()
            asked.put(None)
            server.shutdown()
            server.server_close()

        threading.Thread(target=await_end, daemon=True).start()
        turn = self._next()
        if turn is None:
            said = _last_line(self._errors) or _last_line(self._output)
            raise ValueError(f"the program asked nothing: {said}")
        return turn.messages

    def step(self, message: str) -> Turn:
        if self._question.is_of_ids:
            said = json.loads(message) if message else {"token_ids": [], "logprobs": []}
            self._current.extend(said["token_ids"])
        else:
            said = self._message(message)
            self._current.append(_plain(said))
        self._question.answer.put(said)
        return self._next() or Turn(reward=self._reward(), done=True)

    def _message(self, text: str) -> dict[str, Any]:
        """The policy's message as OpenAI's clients expect it."""
        calls = FORM.parse(text) if self._question.tools else []
        if not calls or any(call.error for call in calls):
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": None, "tool_calls": [
            {"id": f"call_{len(self._current)}_{number}", "type": "function", "function":
                {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for number, call in enumerate(calls)
        ]}  # fmt: skip

    def _next(self) -> Turn | None:
        """What the program says to the policy next; None if it has ended."""
        question = self._asked.get()
        if question is None:
            return None
        said = question.said
        begun = [each for each in self._said if said[: len(each)] == each]
        self._current = max(begun, key=len, default=[])  # what the question continues
        new = said[len(self._current) :]
        if not begun:
            self._said.append(self._current)
        number = next(i for i, each in enumerate(self._said) if each is self._current)
        self._current.extend(new)
        self._question = question
        if question.is_of_ids:
            new = [{"role": TOKEN_IDS, "content": json.dumps(new)}]
        elif not begun:
            new = FORM.told(new, question.tools)
        elif new and all(each["role"] == "tool" for each in new):
            new = FORM.messages([Answer(each["content"]) for each in new])
        return Turn(new, conversation=number)

    def _reward(self) -> float:
        try:
            return float(_last_line(self._output))
        except ValueError:
            return float(self._process.returncode == 0)


def _tasks(file: str) -> Iterator[dict[str, Any]]:
    for where, row in read_rows(file):
        if isinstance(row, UserError):
            raise UserError(f"tasks: {where}: {row}")
        yield row


class _Question:
    """The body of a request, and where its answer goes."""

    def __init__(self, said: list[Any], tools: Sequence[dict[str, Any]], is_of_ids: bool):
        self.said, self.tools, self.is_of_ids = said, tools, is_of_ids
        self.answer: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that come at once

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # The first part of every path: other users of the machine can connect to the port, too.
        self.token = secrets.token_urlsafe(16)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits 40 ms for the headers' acknowledgement

    def do_GET(self) -> None:
        if not self._is_known():
            return
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "semrl_jax"}
        is_list = self.path.endswith("/models")
        self._send({"object": "list", "data": [model]} if is_list else model)

    def do_POST(self) -> None:
        if not self._is_known():
            return
        is_of_ids = self.path.endswith("/inference/v1/generate")
        try:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(min(length, MAX_BODY_BYTES)))
            if is_of_ids:
                said = list(map(int, body["token_ids"]))
            else:
                said = list(map(_plain, body["messages"]))
            if not said:
                raise ValueError("nothing is asked")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            self.close_connection = True
            return self._send({"error": {"message": f"the body cannot be read: {error!r}"}}, 400)
        is_chat = self.path.endswith("/chat/completions")
        if not (is_chat or is_of_ids) or body.get("n", 1) not in (None, 1):
            return self._send({"error": {"message": "only chats with n=1 are answered"}}, 400)
        question = _Question(said, body.get("tools") or (), is_of_ids)
        self.server.asked.put(question)
        message = question.answer.get()
        if message is None:  # nobody waits
            self.close_connection = True
            return
        if is_of_ids:
            return self._send(_generated(len(said), **message))
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        common = {"id": "chat", "created": 0, "model": body.get("model", "policy")}
        choice = {"index": 0, "finish_reason": finish, "logprobs": None}
        if not body.get("stream"):
            usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
            choices = [{**choice, "message": message}]
            kind = {"object": "chat.completion", "usage": usage}
            return self._send({**common, **kind, "choices": choices})
        chunk = {**common, "object": "chat.completion.chunk"}
        delta = dict(message)
        if calls := message.get("tool_calls"):  # clients join the pieces of a call by its index
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        chunk["choices"] = [{**choice, "delta": delta}]
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        self._write(text.encode(), "text/event-stream", 200)

    def log_message(self, *arguments: Any) -> None:
        pass

    def _is_known(self) -> bool:
        """Whether the path begins with the token; sends a refusal if not."""
        begin = f"/{self.server.token}/".encode()
        if hmac.compare_digest(self.path.encode()[: len(begin)], begin):
            return True
        self.close_connection = True
        self._send({"error": {"message": "the address is that of OPENAI_BASE_URL"}}, 404)
        return False

    def _send(self, value: dict[str, Any], status: int = 200) -> None:
        self._write(json.dumps(value).encode(), "application/json", status)

    def _write(self, data: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _generated(num_prompt: int, token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    """The policy's tokens as vLLM sends them."""
    content = [
        {"token": f"token_id:{i}", "logprob": value}
        for i, value in zip(token_ids, logprobs, strict=True)
    ]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": token_ids}
    return {
        "request_id": "generate",
        "choices": [{**choice, "logprobs": {"content": content}}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(token_ids),
            "total_tokens": num_prompt + len(token_ids),
        },
    }


def _plain(message: Mapping[str, Any]) -> Message:
    """The role and the text of a message; calls in the policy's own form."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        content += json.dumps({"name": function["name"], "arguments": arguments})
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    return {"role": role, "content": content}


def _last_line(output: IO[bytes]) -> str:
    """The last line that is not blank, as far as its end goes; "" if there is none."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_PRINTED_BYTES))
    return output.read().decode(errors="replace").rstrip().rpartition("\n")[2]
