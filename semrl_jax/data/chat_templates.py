"""Renders conversations by a tokenizer's chat template, in a process that has limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support import chat_worker

Messages = Sequence[Mapping[str, Any]]


class TemplateError(ValueError):
    """The chat template fails on a conversation, or goes beyond a limit."""


class Rendered(NamedTuple):
    """A rendered conversation; `marks` are the spans of characters in {% generation %} blocks."""

    text: str
    marks: list[tuple[int, int]]


def render_chat(
    tokenizer: Tokenizer,
    template: str,
    conversations: Sequence[tuple[Messages, bool]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    with_marks: bool = False,
) -> list[Rendered]:
    """Renders conversations as `apply_chat_template` of the tokenizer does; TemplateError if not.

    `conversations` are messages, and whether the begin of the assistant's next one is added.
    `tools` are JSON schemas.
    """
    request = {
        "template": template,
        "conversations": conversations,
        "tools": list(tools) or None,
        "with_marks": with_marks,
        "special_tokens": tokenizer.special_tokens_map,
    }
    reply = _WORKER.ask(json.dumps(request).encode() + b"\n")
    if "error" in reply:
        raise TemplateError(reply["error"])
    return [Rendered(text, [(a, b) for a, b in marks]) for text, marks in reply["rendered"]]


class _Worker:
    """The process of all templates; it is started at the first use, and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
                reply = self._process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # the reply to this request must not answer the next one
                self._process.kill()
                self._end()
                raise
            if reply.endswith(b"\n"):
                return json.loads(reply)
            code = self._end()
        if code == -signal.SIGPROF:
            raise TemplateError(f"it takes more than {chat_worker.TIME_S:g} s of CPU time")
        raise TemplateError(f"its process ended with exit code {code}")

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, "-m", chat_worker.__name__, str(chat_worker.TIME_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that Ctrl-C does not reach it
        )

    def _end(self) -> int:
        """Waits for the process, which is ending; returns its exit code."""
        process, self._process = self._process, None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process.wait()


_WORKER = _Worker()
