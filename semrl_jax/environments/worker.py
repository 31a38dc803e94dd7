"""The home of environments: the pool runs `python -m semrl_jax.environments.worker`.

It makes the environment once, and forks a process for each episode, which has a copy. So an episode
costs no start of Python, and shares neither state nor death with another one.

Standard input is a socket of messages. The first one is a request with "name", "options" and
"memory_limit_gib"; its reply is {"schemas": of its tools, "weights": of its verdicts,
"is_self_play"} or {"problem": text}. {"open": number, "form": [name, in_template] of calls of
tools} comes with a socket for an episode, and {"end": number} ends all its processes.

On its own socket, an episode reads and writes lines as `support.isolation` says. A request has
"call", the method, "arguments" and "max_chars"; its reply has "value" or "error". The environment
itself has an empty standard input, and its prints go to standard error.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import random
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from typing import Any

from semrl_jax.environments.interface import (
    FIELD,
    FIRST_ROLES,
    Environment,
    GarbageError,
    Turn,
    as_messages,
    as_tasks,
    as_turn,
    as_weights,
    load_environment,
)
from semrl_jax.environments.tools.formats import Toolbox, tool_format
from semrl_jax.support.errors import UserError
from semrl_jax.support.guard import fork_under_guard
from semrl_jax.support.isolation import (
    answer,
    begin_worker,
    error_line,
    error_text,
    hidden,
    keep_from_children,
    leave_standard_streams,
    limit_memory,
)

MAX_MESSAGE_BYTES = 1 << 16
_NOT_OWN = (  # where lines of others are: semrl_jax, Python and installed packages
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
    "<",  # <frozen importlib>
)
MAX_SCHEMAS_CHARS = 60_000  # of ASCII, with the weights; they are sent in one message


def main() -> int:
    """Opens and ends episodes until the other end of standard input is closed."""
    begin_worker()
    control = socket.socket(fileno=hidden(0))
    leave_standard_streams()
    sys.stdout.reconfigure(line_buffering=True)  # a fork would repeat what waits in a buffer
    start = json.loads(control.recv(MAX_MESSAGE_BYTES))
    limit_memory(start["memory_limit_gib"])
    try:
        environment, tools, about = made(start["name"], start["options"])
        reply = {"schemas": tools.schemas, **about}
    except UserError as error:
        reply = {"problem": str(error)}
    control.send(json.dumps({"id": start["id"], **reply}).encode() + b"\n")
    if "problem" in reply:
        return 1
    gc.freeze()  # a collection in an episode would copy the memory that all share
    guards: dict[int, int] = {}  # by number of the episode
    ended: set[int] = set()  # guards that are not reaped yet
    while True:
        message, sockets, *_ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return 0
        order = json.loads(message)
        if "open" in order:
            home = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:  # a limit of processes: the other episodes go on
                print(f"an episode cannot begin: {error}", file=sys.stderr)
                os.close(sockets[0])
                continue
            if pid == 0:
                control.close()
                os.setpgid(0, 0)  # a signal to the group of an episode's parent spares the others
                fork_under_guard(home)
                tools.form = tool_format(*order["form"])
                with contextlib.suppress(ConnectionError):  # it was ended during a call
                    serve(sockets[0], environment, tools)
                os._exit(0)
            os.close(sockets[0])
            guards[order["open"]] = pid
        elif guard := guards.pop(order["end"], None):
            os.kill(guard, signal.SIGTERM)
            os.kill(guard, signal.SIGCONT)  # the episode may have stopped it
            ended.add(guard)
        ended -= {guard for guard in ended if os.waitpid(guard, os.WNOHANG)[0]}


def made(name: str, options: Mapping[str, Any]) -> tuple[Environment, Toolbox, dict[str, Any]]:
    """Makes an environment; finds tools, "weights" and "is_self_play"; UserError if it is wrong."""
    pid = os.getpid()
    try:
        environment = load_environment(name)(**options)
        tools, weights = getattr(environment, "tools", ()), getattr(environment, "weights", {})
        is_self_play = bool(getattr(environment, "is_self_play", False))
    except UserError as error:  # it has the way out
        said = str(error)
        raise UserError(said if said.startswith(FIELD) else f"{FIELD}: {name}: {said}") from error
    except BaseException as error:  # it is the user's, or a package is missing
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        reason = " ".join(error_text(error).split()).removesuffix(".") + error_place(error)
        raise UserError(
            f"environment.name: {name}({given}) cannot be made: {reason:.300}."
        ) from error
    finally:
        if os.getpid() != pid:
            os._exit(0)  # the environment forked, and this is the child
    if not isinstance(tools, list | tuple):
        raise UserError(f"{FIELD}: {name} has tools={tools!r:.80}; it must be a list of functions.")
    try:
        found, about = Toolbox(tools), {"weights": as_weights(weights)}
    except UserError as error:
        raise UserError(f"environment.name: {name}: {error}") from error
    size, more = len(json.dumps(found.schemas)), len(json.dumps(about))
    if size + more > MAX_SCHEMAS_CHARS:
        raise UserError(
            f"{FIELD}: {name}: the schemas of tools have {size} characters, and weights {more}; at "
            f"most {MAX_SCHEMAS_CHARS} are allowed, so shorten docstrings or names."
        )
    return environment, found, {**about, "is_self_play": is_self_play}


def error_place(error: BaseException) -> str:
    """ " (FILE:LINE)" of the user's last line before an exception; "" without one."""
    try:
        files = [
            f"{os.path.basename(frame.f_code.co_filename)}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if not frame.f_code.co_filename.startswith(_NOT_OWN)
        ]
    except BaseException:  # of the exception's own methods
        return ""
    return f" ({files[-1]})" if files else ""


def serve(fd: int, environment: Environment, tools: Toolbox) -> None:
    """Answers the requests of one episode until its socket is closed."""
    own = hidden(fd)
    os.close(fd)
    requests, replies = os.fdopen(own, "rb"), os.fdopen(hidden(own), "wb")
    keep_from_children(requests, replies)
    pid = os.getpid()
    for line in requests:
        request = json.loads(line)
        try:
            fields = {"value": called(environment, tools, **request)}
        except GarbageError as error:
            fields = {"error": error_line("invalid", error)}
        except BaseException as error:
            fields = {"error": error_line("exception", error_text(error) + error_place(error))}
        if os.getpid() != pid:
            os._exit(0)  # the environment forked, and this is the child
        answer(replies, request, fields)


def called(
    environment: Environment,
    tools: Toolbox,
    *,
    id: str,
    call: str,
    arguments: Mapping[str, Any],
    max_chars: int,
) -> Any:
    """The checked result of a method, as JSON has it.

    The result of "step" is a turn and the error of each call of a tool in the message. "openings"
    gives the first messages of several pairs of task and seed. "recall" returns the value of an
    earlier "step" in a process that has ended; if the environment has no such method and the
    message called no tool, what "step" returns now.
    """
    if call == "recall":
        value = arguments.pop("value")
        if hasattr(environment, "recall"):
            turn = Turn(*copy.deepcopy(value[0]))  # which the environment may change
            environment.recall(arguments["message"], turn)
            return value
        if value[1]:
            return value
    if call in ("step", "recall"):
        answers = tools.answers(arguments["message"], max_chars)
        said = Turn(tools.form.messages(answers)) if answers else None
        turn = said or environment.step(arguments["message"])
        return as_turn(turn, max_chars), [answer.error for answer in answers]
    if call == "reset":
        return _opening(environment, tools, max_chars, **arguments)
    if call == "tasks":
        seed, count = arguments["seed"], arguments["count"]
        return as_tasks(environment.tasks(seed, count), count)
    pairs = arguments["pairs"]
    return [_opening(environment, tools, max_chars, task, seed) for task, seed in pairs]


def _opening(
    environment: Environment, tools: Toolbox, max_chars: int, task: Mapping[str, Any], seed: int
) -> list[dict[str, str]]:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    messages = as_messages(environment.reset(task, seed), FIRST_ROLES, max_chars)
    if not messages:
        raise GarbageError("reset returned no message")
    return tools.told(messages)


if __name__ == "__main__":
    sys.exit(main())
