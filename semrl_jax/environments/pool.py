"""Runs environments: a process for each episode, with a deadline for every call.

All episodes are forked from one process, their home, which has made the environment. An episode
that is late, dies or sends garbage is ended with all processes that it started; no other one is
affected. A home that dies takes its open episodes along, and is replaced.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import itertools
import json
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from semrl_jax.environments.interface import (
    FIRST_ROLES,
    GarbageError,
    Message,
    Turn,
    as_messages,
    as_tasks,
    as_turn,
)
from semrl_jax.environments.journal import Journal, Place, Reply
from semrl_jax.environments.tools.formats import ToolFormat, choose_format
from semrl_jax.environments.tools.functions import Answer as ToolAnswer
from semrl_jax.settings.environment import Environment as Settings
from semrl_jax.settings.environment import Named, check, named
from semrl_jax.settings.rewards import MAX_SCORE
from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import check_fields
from semrl_jax.support.isolation import KILL_TIMEOUT_S, Guarded, Line, error_line

MAX_MESSAGE_CHARS = 1_000_000  # of the policy, and of the prompt
MAX_START_ATTEMPTS = 3
START_TIMEOUT_S = 60.0
MAX_DESCRIPTORS = 1 << 16
KEPT_PREFIX = "ENVIRONMENT_"  # variables that an environment itself needs
_TASKS_PER_CALL = 256
_RESETS_PER_CALL = 16  # each may start a program, which takes seconds
_BYTES_PER_CHAR = 12  # of JSON, outside the first plane
_WHOSE = "the process of the environment"


class Opening(NamedTuple):
    """A task of an environment, with all that an episode of it begins with."""

    task: Mapping[str, Any]
    seed: int  # follows from the task
    messages: Sequence[Message]  # the prompt
    environment: str = ""  # its name, as `environment.name`


class Answer(NamedTuple):
    """What an environment answered."""

    turn: Turn
    # Why it did not, beginning with its kind: "timeout", "crash", "exception" (it raised) or
    # "invalid" (it returned garbage); the turn is then done.
    error: str = ""
    seconds: float = 0.0  # that the call took
    # If the environment gave several, by name; the turn has their weighted sum.
    verdicts: Mapping[str, float] = MappingProxyType({})


class EnvironmentPool:
    """Opens episodes of an environment; a context manager, safe to use from several threads.

    The constructor returns at once, and the first episode waits for the home. UserError: a value of
    the section `config.environment` is out of range, or, on entering the context, the environment
    cannot be made.
    """

    journal: Journal | None = None  # of answers; None: they are not kept

    def __init__(self, environment: Section):
        options = dict(environment)
        check_fields("environment", options, Settings)
        check(options)
        self.name = options["name"]
        self.named = named(self.name)
        self.limits = Settings(**options)
        self._about: Mapping[str, Any] = {}  # the environment; see worker.py
        self._form, self._form_name = choose_format(None), options["tool_format"]
        self._lock = threading.Lock()  # guards all below
        self._home: _Home | None = None
        self._starting: _Home | None = None
        self._failure: Exception | None = None  # why no episode can be opened any more
        self._counts: collections.Counter[str] = collections.Counter()
        self._numbers = itertools.count()
        self._start_lock = threading.Lock()  # one start at a time; taken before the other lock
        _allow_descriptors()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            options["num_workers"], thread_name_prefix="environment"
        )
        self._starts = self._threads.submit(self._at_home)  # imports while others are busy

    def __enter__(self) -> EnvironmentPool:
        try:
            self._starts.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all episodes at once; open calls are answered with a crash. Idempotent."""
        with self._lock:
            self._failure = self._failure or RuntimeError("the environments were closed")
            home, self._home = self._home, None
            if self._starting is not None:
                self._starting.kill()
        if home is not None:
            home.end()
        self._threads.shutdown()  # calls that wait fail at once; cancelled ones would raise

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the environment's tools; raises as entering the context does."""
        self._starts.result()
        return self._about["schemas"]

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each verdict of the environment; {} if it gives rewards alone."""
        return self._about["weights"]

    @property
    def is_self_play(self) -> bool:
        """Whether the policy plays several sides."""
        return self._about["is_self_play"]

    def speak(self, chat_template: str) -> list[dict[str, Any]]:
        """Has the policy call tools as its chat template writes calls.

        Returns the schemas that the template has to describe; [] if the prompts do. UserError: the
        template writes calls in an unknown form.
        """
        self._form = choose_format(chat_template, self._form_name)
        return self.schemas if self._form.in_template else []

    def tool_reply(self) -> list[Message]:
        """Messages that answer a call of a tool; [] if there is no tool."""
        return self._form.messages([ToolAnswer("1")]) if self.schemas else []

    def open(self, opening: Opening, place: Place | None = None) -> Episode:
        """Begins an episode, without waiting for it; the journal has its answers at `place`."""
        with self._lock:
            self._counts["episodes"] += 1
        return Episode(self, opening, place)

    def openings(self, seed: int, count: int) -> list[Opening]:
        """Up to `count` tasks, equal for equal arguments; UserError if there is none."""
        connection, method = self.connect(), "tasks"
        chars = MAX_MESSAGE_CHARS
        size = _BYTES_PER_CHAR * chars * _TASKS_PER_CALL
        try:
            asked = {"seed": seed, "count": count}
            tasks = as_tasks(connection.call("tasks", asked, START_TIMEOUT_S, chars, size), count)
            found, method = [], "reset"
            for first in range(0, len(tasks), _RESETS_PER_CALL):
                pairs = [
                    (task, task_seed(task)) for task in tasks[first : first + _RESETS_PER_CALL]
                ]
                limit_s = max(START_TIMEOUT_S, self.limits.timeout_s)
                opened = connection.call("openings", {"pairs": pairs}, limit_s, chars, size)
                for (task, own), messages in zip(pairs, opened, strict=True):
                    prompt = as_messages(messages, FIRST_ROLES, chars)
                    found.append(Opening(task, own, prompt, self.name))
            return found
        except (_CallError, GarbageError, OSError, ValueError, TypeError) as error:
            raise UserError(
                f"environment.name: {self.named.target} made no tasks, since its method {method} "
                f"failed ({error or 'it ended'}); it must return what docs/environments.md says."
            ) from error
        finally:
            connection.end()

    @property
    def counters(self) -> dict[str, int]:
        """The number of episodes, turns and calls of tools, and of each kind of failure."""
        with self._lock:
            return {
                "num_episodes": self._counts["episodes"],
                "num_turns": self._counts["turns"],
                "num_timeouts": self._counts["timeout"],
                "num_crashes": self._counts["crash"],
                "num_exceptions": self._counts["exception"],
                "num_invalid": self._counts["invalid"],
                "num_out_of_turns": self._counts["out of turns"],
                "num_tool_calls": self._counts["tool call"],
                "num_failed_tool_calls": self._counts["failed tool call"],
            }

    def count(self, *names: str) -> None:
        with self._lock:
            self._counts.update(names)

    def submit(self, function, *arguments) -> concurrent.futures.Future:
        return self._threads.submit(function, *arguments)

    def connect(self) -> _Connection:
        """A new process for an episode; UserError or RuntimeError if there can be none."""
        while True:
            home = self._at_home()
            try:
                return home.open(next(self._numbers), self._form)
            except OSError:  # it has died
                with self._lock:
                    if self._home is home:
                        self._home = None
                home.end()

    def _at_home(self) -> _Home:
        """The home of episodes, started if there is none."""
        with self._start_lock:
            reason = ""
            for _ in range(MAX_START_ATTEMPTS):
                with self._lock:  # so that `close` finds every home
                    if self._failure is not None:
                        raise self._failure
                    if self._home is not None:
                        return self._home
                    home = self._starting = _Home()
                try:
                    reply = home.begin(self.named, self.limits.memory_limit_gib)
                    problem = reply.get("problem", "")
                    if not problem:  # of a second home, or the first one's weights would be lost
                        self._about = reply
                except (OSError, ValueError) as error:
                    problem, reason = None, str(error)
                with self._lock:
                    self._starting = None
                    if problem == "" and self._failure is None:
                        self._home = home
                        return home
                home.end()
                if problem:
                    self._fail(UserError(problem))
            self._fail(
                UserError(
                    f"environment.name: {self.named.target} cannot be made: {reason}, "
                    f"{MAX_START_ATTEMPTS} times in a row. Its import and its __init__ must take "
                    f"less than {START_TIMEOUT_S:g} s and must not end their process. If "
                    f"environment.memory_limit_gib={self.limits.memory_limit_gib:g} is too small, "
                    "raise it."
                )
            )
            raise self._failure

    def _fail(self, failure: Exception) -> None:
        with self._lock:
            self._failure = self._failure or failure


class EnvironmentPools:
    """Pools of several environments by name, with equal settings; a context manager."""

    def __init__(self, environment: Section, names: Sequence[str]):
        self._pools = {
            name: EnvironmentPool({**environment, "name": name}) for name in dict.fromkeys(names)
        }
        self._stack = contextlib.ExitStack()
        self.journal: Journal | None = None

    def __enter__(self) -> EnvironmentPools:
        with contextlib.ExitStack() as stack:
            for pool in self._pools.values():
                stack.callback(pool.close)
            for pool in self._pools.values():
                stack.enter_context(pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def __bool__(self) -> bool:
        return bool(self._pools)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __getitem__(self, name: str) -> EnvironmentPool:
        return self._pools[name]

    def keep_answers(self, journal: Journal) -> None:
        """Has episodes that are opened from now on find and leave their answers in the journal."""
        self.journal = journal
        for pool in self._pools.values():
            pool.journal = journal

    def open(self, opening: Opening, place: Place | None = None) -> Episode:
        return self[opening.environment].open(opening, place)

    @property
    def counters(self) -> dict[str, int]:
        total: collections.Counter[str] = collections.Counter()
        for pool in self._pools.values():
            total.update(pool.counters)
        return dict(total)


class Episode:
    """The environment of one episode. Calls are answered one after the other.

    A message whose answer is in the journal gets this answer. The process of the environment begins
    with the first message that is not, and is told of the earlier ones.
    """

    def __init__(self, pool: EnvironmentPool, opening: Opening, place: Place | None = None):
        self._pool, self._opening, self._place = pool, opening, place
        self._journal = None if place is None else pool.journal
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        self._failed: Reply | None = None
        self._is_over = False
        self._turn = self._num_own = 0
        self._is_own = True  # the message that comes next
        self._said = hashlib.sha256(json.dumps(opening).encode())
        self._untold: list[tuple[str, Any]] = []  # messages, and the values of their replies
        self._begun: concurrent.futures.Future | None = None
        if self._journal is None or not self._journal.has(place):
            self._begun = pool.submit(self._begin)

    def step(self, message: str) -> concurrent.futures.Future[Answer]:
        """The environment's answer to a message of the policy; raises if the disk refuses it."""
        self._pool.count("turns")
        return self._pool.submit(self._step, message)

    @property
    def verdicts(self) -> tuple[str, ...]:
        return tuple(self._pool.weights)

    def count(self, kind: str) -> None:
        """Counts what its caller found, such as "invalid"."""
        self._pool.count(kind)

    def end(self) -> None:
        """Ends the process of the episode, also during a call."""
        self._is_over = True
        if self._begun is not None:
            self._begun.cancel()
        if (connection := self._connection) is not None:
            connection.end()

    def _begin(self) -> None:
        began = time.monotonic()
        with self._lock:
            if self._connection is not None or self._failed is not None:
                return
            task, seed, expected, _ = self._opening
            try:
                if self._is_over:
                    raise RuntimeError("the episode was ended")
                self._connection = self._pool.connect()
            except (OSError, RuntimeError, UserError) as error:
                self._fail("crash", error, began)
                return
            if self._is_over:  # while it began
                self._connection.end()
            found = self._call("reset", {"task": task, "seed": seed}, MAX_MESSAGE_CHARS, began)
            if self._failed is None and found != list(expected):
                self._fail("invalid", "reset made another prompt than before", began)

    def _step(self, message: str) -> Answer:
        message = message[:MAX_MESSAGE_CHARS]
        with self._lock:
            if self._journal is None or self._failed is not None:
                return self._answer(self._asked(message))
            turn, self._turn = self._turn, self._turn + 1
            self._said.update(json.dumps(message).encode())
            said = self._said.hexdigest()
            reply = self._journal.find(self._place, turn, said)
            if reply is None:
                reply = self._asked(message)
                # A process that crashed may have been killed together with the run.
                if not reply.error.startswith("crash"):
                    self._journal.add(self._place, turn, said, reply)
            elif reply.error:
                self._pool.count(reply.error.partition(":")[0])
                self._failed = reply
            else:
                self._untold.append((message, reply.value))
            return self._answer(reply)

    def _answer(self, reply: Reply) -> Answer:
        if not reply.error:
            try:
                chars = self._pool.limits.max_observation_chars
                turn, errors = reply.value
                turn, verdicts = self._weighted(as_turn(Turn(*turn), chars))
                answer = Answer(turn, "", reply.seconds, verdicts)
                self._num_own += self._is_own
                self._is_own, reward = turn.is_own, turn.reward
                if isinstance(reward, list) and len(reward) > self._num_own:
                    raise GarbageError(
                        f"reward has {len(reward)} values, more than the {self._num_own} turns "
                        f"that are trained on: {reward}"
                    )
                for failed in errors:
                    self._pool.count("tool call", *["failed tool call"] * bool(failed))
                return answer
            except (GarbageError, TypeError, ValueError) as error:
                reply = self._fail("invalid", error, time.monotonic() - reply.seconds)
        return Answer(Turn((), 0.0, True), reply.error, reply.seconds)

    def _weighted(self, turn: Turn) -> tuple[Turn, Mapping[str, float]]:
        """The turn with one reward, and the verdicts that it is the sum of."""
        if not isinstance(turn.reward, Mapping):
            return turn, {}
        if unknown := sorted(turn.reward.keys() - self._pool.weights):
            raise GarbageError(
                f"reward has {unknown}, which the environment's attribute weights does not have; "
                f"it has: {', '.join(self._pool.weights) or 'none'}"
            )
        reward = sum(self._pool.weights[name] * value for name, value in turn.reward.items())
        if not abs(reward) <= MAX_SCORE:
            raise GarbageError(f"the weighted sum {reward:g} of the reward is beyond {MAX_SCORE:g}")
        return turn._replace(reward=reward), turn.reward

    def _asked(self, message: str) -> Reply:
        """The reply of the process, after it was told of earlier messages."""
        began, chars = time.monotonic(), self._pool.limits.max_observation_chars
        self._begin()
        for earlier, value in self._untold:
            found = self._call("recall", {"message": earlier, "value": value}, chars, began)
            if self._failed is None and found != value:
                reason = "step answered otherwise than before the run was killed"
                self._fail("invalid", reason, began)
        self._untold.clear()
        value = self._call("step", {"message": message}, chars, began)
        return self._failed or Reply(value, "", time.monotonic() - began)

    def _call(self, call: str, arguments: Mapping[str, Any], max_chars: int, began: float) -> Any:
        """The value of a call; None if it or an earlier one failed."""
        if self._failed is not None:
            return None
        limit_s = self._pool.limits.timeout_s
        try:
            size = _BYTES_PER_CHAR * max_chars + (1 << 16)
            return self._connection.call(call, arguments, limit_s, max_chars, size)
        except _CallError as error:
            self._fail("", error, began)
        except TimeoutError:
            self._fail("timeout", f"{call} took more than {limit_s:g} s", began)
        except (OSError, ValueError) as error:
            self._fail("crash", error, began)

    def _fail(self, kind: str, reason: object, began: float) -> Reply:
        """Ends the process; the reply to this call and to all further ones."""
        error = error_line(kind, reason) if kind else str(reason)
        if (connection := self._connection) is not None:
            connection.end()
        if not self._is_over:
            self._pool.count(error.partition(":")[0])
        self._failed = Reply(None, error, time.monotonic() - began)
        return self._failed


def _allow_descriptors() -> None:
    """Raises this process's limit of descriptors: each open episode has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # the system refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _socket_pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; RuntimeError if there can be no more."""
    try:
        return socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise RuntimeError(
            f"{most} descriptors (ulimit -n) are too few for all open episodes; raise it, or lower "
            "data.prompts_per_step or rollout.group_size"
        ) from error


def task_seed(task: Mapping[str, Any]) -> int:
    """The seed of all episodes of a task, below 2^32."""
    text = json.dumps(task, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little")


class _CallError(Exception):
    """A method of the environment raised, or returned garbage; the text is the reply's error."""


class _Connection:
    """The socket of an episode, for one call at a time. `end` may be called from another thread."""

    def __init__(self, home: _Home, number: int, own: socket.socket):
        self._home, self._number, self._socket = home, number, own
        self._line = Line(own.fileno(), own.fileno(), _WHOSE)
        self._lock = threading.Lock()  # guards both below
        self._is_busy = self._is_over = False

    def call(
        self, call: str, arguments: Mapping[str, Any], timeout_s: float, max_chars: int, size: int
    ) -> Any:
        """The value of a call; raises _CallError, and what `Line.exchange` raises."""
        with self._lock:
            if self._is_over:
                raise ConnectionResetError(f"{_WHOSE} was ended")
            self._is_busy = True
        request = {"call": call, "arguments": arguments, "max_chars": max_chars}
        try:
            reply = self._line.exchange(request, timeout_s, size)
        finally:
            with self._lock:
                self._is_busy = False
                if self._is_over:
                    self._socket.close()
        if "error" in reply:
            kind, _, text = str(reply["error"]).partition(": ")
            if kind not in ("exception", "invalid"):  # the environment invented it
                kind, text = "invalid", reply["error"]
            raise _CallError(error_line(kind, text))
        if "value" not in reply:
            raise ValueError(f"{_WHOSE} replied without a value")
        return reply["value"]

    def end(self) -> None:
        """Ends all processes of the episode. A call in another thread then fails."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._home.close(self._number)
            if self._is_busy:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            else:
                self._socket.close()


class _Home(Guarded):
    """The process that forks episodes, and its guard."""

    def __init__(self):
        self._control, theirs = _socket_pair(socket.SOCK_SEQPACKET)
        fixed = {"PYTHONHASHSEED": "0"}  # or the order of a set would differ between starts
        pipes = {"stdin": theirs, "stdout": subprocess.DEVNULL}
        with theirs:
            super().__init__("semrl_jax.environments.worker", KEPT_PREFIX, fixed, **pipes)

    def begin(self, named: Named, memory_limit_gib: float) -> dict[str, Any]:
        """Waits until it is ready: "schemas" of tools, or a "problem" that the user must solve."""
        request = {"name": named.target, "options": named.options}
        request["memory_limit_gib"] = memory_limit_gib
        fd = self._control.fileno()
        reply = Line(fd, fd, "the process of environments").exchange(
            request, START_TIMEOUT_S, 1 << 16
        )
        # An episode can stop the home. Orders that fill its socket must then not wait for ever.
        self._control.settimeout(KILL_TIMEOUT_S)
        return reply

    def open(self, number: int, form: ToolFormat) -> _Connection:
        """Has it fork a process; OSError if it has died or takes no orders."""
        own, theirs = _socket_pair(socket.SOCK_STREAM)
        try:
            with theirs:
                order = {"open": number, "form": [form.name, form.in_template]}
                socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
            return _Connection(self, number, own)
        except OSError:
            own.close()
            raise

    def close(self, number: int) -> None:
        """Has it end all processes of an episode."""
        try:
            self._control.send(json.dumps({"end": number}).encode())
        except TimeoutError:
            self.kill()
        except OSError:  # it has died, and they have died too
            pass

    def end(self) -> None:
        """Kills it and all its episodes, and reaps the guard."""
        super().end()
        self._control.close()
