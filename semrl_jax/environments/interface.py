"""What an environment is, and the checks of what it returns.

One class makes an environment. It gets the options of the config as keyword arguments. A built-in
one is called `Environment` and is in a module of `kinds`; `environment.name` names the module,
or "package.module:Class" of the user's.
"""

from __future__ import annotations

import collections.abc
import importlib
import itertools
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from semrl_jax.settings.environment import BUILT_IN
from semrl_jax.settings.rewards import MAX_SCORE, TAKEN_NAMES, is_reward_name
from semrl_jax.support.choices import TOKEN_IDS
from semrl_jax.support.errors import UserError
from semrl_jax.support.isolation import error_text
from semrl_jax.support.modules import load_module

FIELD = "environment.name"
PARTS = ("tasks", "reset", "step")
FIRST_ROLES = ("system", "user", "assistant", "tool", TOKEN_IDS)
ROLES = ("system", "user", "tool", TOKEN_IDS)  # of an answer: no one else speaks for the policy

MAX_CONVERSATIONS = 1000  # of an episode

Message = dict[str, str]  # "role" and "content"


class Turn(NamedTuple):
    """How an environment answers a message of the policy."""

    # For the policy, each with role and content; a text is one message of the user. Not read if the
    # episode is over.
    messages: str | Sequence[Mapping[str, str]] = ()
    # For the message that is answered. A list is added to the rewards of the last turns, this one
    # last: the end of a game decides about earlier moves too. A mapping has verdicts by name: the
    # reward is their sum with the environment's `weights`.
    reward: float | Sequence[float] | Mapping[str, float] = 0.0
    done: bool = False  # whether the episode is over
    # Whether the policy's next message is trained on. If not, the policy plays an opponent: the
    # message is context, and its reward goes to the last message that is trained on.
    is_own: bool = True
    # The conversation that the messages continue. The prompt starts number 0, and a new number
    # starts another one with these messages. The policy sees one conversation at a time.
    conversation: int = 0


@runtime_checkable
class Environment(Protocol):
    """An environment. Each episode has an object of its own, in a process of its own.

    What the methods return follows from their arguments and the calls before, and not from time,
    from the process or from other episodes. The global generators of `random` and NumPy are seeded
    by `reset`.

    An environment may have `tools`, a list of functions that the policy calls, see
    `tools.functions`. Calls in a message are run and answered, and `step` gets the other messages.
    It may have `weights`, the weight in the reward of each verdict by name, and `is_self_play`: the
    policy plays several sides in turn.

    An environment that tokenises itself returns messages with the role "token_ids". The first one
    is the prompt, and each further one all that follows the policy's tokens. `step` then gets a
    JSON object with "token_ids" and "logprobs" of the policy's turn, end token included.

    A run that was killed plays the episodes of its incomplete batches again. Messages that were
    answered get the same answers, and no tool is called for them again. Where an episode goes on
    after them, its object has to see the other messages again: by `step`, whose answers must be the
    same, or by the method `recall(message, turn)`, if there is one, which also gets the messages
    with calls. It does what `step` or the tools did to the object and its generators, given the
    message and the answer, and has no effect on the outside.
    """

    def tasks(self, seed: int, count: int) -> Sequence[Mapping[str, Any]]:
        """Up to `count` tasks, JSON objects; equal arguments give equal tasks.

        The key "answer", if there is one, is shown as the reference answer. Tasks with an equal
        "question" are the same one: training leaves out those of evaluations.
        """

    def reset(self, task: Mapping[str, Any], seed: int) -> str | Sequence[Mapping[str, str]]:
        """Begins an episode; returns the messages of the prompt. The seed follows from the task."""

    def step(self, message: str) -> Turn | tuple | Mapping[str, Any]:
        """Answers a whole message of the policy: the text of its tokens, without the end token."""


def _number(value: Any) -> float:
    """The value as a float; NaN if it is no number, or out of range."""
    is_number = isinstance(value, numbers.Real) and abs(value) <= MAX_SCORE  # NaN is not
    return float(value) if is_number else math.nan


def as_weights(weights: Any) -> dict[str, float]:
    """The weights of verdicts by name, as JSON has them; UserError if they are something else."""
    try:
        found = dict(weights) if isinstance(weights, collections.abc.Mapping) else {"": weights}
        values = [_number(weight) for weight in found.values()]
        shown = f"weights={weights!r:.100}"
    except BaseException as error:  # of their own methods
        found, values = {"": weights}, [math.nan]
        shown = f"weights cannot be read ({error_text(error):.100}); it"
    if not (all(map(is_reward_name, found)) and not any(map(math.isnan, values))):
        raise UserError(
            f"{shown} must give a number from {-MAX_SCORE:g} to {MAX_SCORE:g} for each name of a "
            "verdict, which has letters, digits, '_', '.' and '-', and is not one of "
            f"{TAKEN_NAMES}."
        )
    return dict(zip(found, values, strict=True))


class GarbageError(ValueError):
    """An environment returned something that is not what it must return."""


def load_environment(name: str) -> type[Environment]:
    """The class of an environment; raises as `load_class`."""
    if ":" not in name:
        return load_module(FIELD, name, BUILT_IN, ("Environment",)).Environment
    return load_class(FIELD, name, PARTS)


def load_class(field: str, name: str, parts: Sequence[str]) -> type:
    """The class "package.module:Class" of a user; UserError unless it has these methods."""
    module_name, _, class_name = str(name).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except BaseException as error:  # a user's module may fail in any way
        reason = " ".join(error_text(error).split())
        raise UserError(
            f"{field}={name!r} cannot be imported ({reason:.300}); it must be "
            "'package.module:Class', on PYTHONPATH or in the directory the command was started in."
        ) from error
    missing = [part for part in parts if not callable(getattr(found, part, None))]
    if missing or not isinstance(found, type):
        lack = f"has no {missing[0]}" if missing else "is not a class"
        raise UserError(
            f"{field}={name!r} {lack}; an environment is a class with the methods "
            f"{', '.join(parts)} (docs/environments.md)."
        )
    return found


def as_turn(result: Any, max_chars: int) -> Turn:
    """Reads what `step` returned: a `Turn`, its first three values, or a mapping with its fields.

    Returns:
      A turn of plain Python values, whose messages have at most `max_chars` characters together;
      what is beyond is left out. It has messages unless it is done.

    Raises:
      GarbageError: if it is none of these.
    """
    try:
        return _turn(result, max_chars)
    except GarbageError:
        raise
    except BaseException as error:
        raise GarbageError(f"what it returned cannot be read: {error_text(error)}") from error


def _turn(result: Any, max_chars: int) -> Turn:
    if isinstance(result, collections.abc.Mapping):
        if unknown := sorted(map(str, result.keys() - set(Turn._fields))):
            raise GarbageError(f"unknown keys {unknown}; known: {', '.join(Turn._fields)}")
        result = Turn(**result)
    elif not isinstance(result, Turn) and not (isinstance(result, tuple) and len(result) == 3):
        raise GarbageError(
            f"step must return a Turn or its first three values, not {result!r:.80}; "
            "environment.name=gymnasium:env=... plays classes of Gymnasium"
        )
    messages, reward, done, is_own, conversation = Turn(*result)
    by_name = isinstance(reward, collections.abc.Mapping)
    given = list(reward.values()) if by_name else reward
    given = list(given) if isinstance(given, list | tuple) else [given]
    values = [_number(x) for x in given]
    if not values or any(map(math.isnan, values)):
        raise GarbageError(
            f"reward must be a number from {-MAX_SCORE:g} to {MAX_SCORE:g}, not {reward!r:.50}"
        )
    value: float | list[float] | dict[str, float] = values if len(values) > 1 else values[0]
    if by_name:
        value = dict(zip(map(str, reward), values))
    for name, flag in (("done", done), ("is_own", is_own)):
        if not isinstance(flag, numbers.Integral) and type(flag).__name__ not in ("bool", "bool_"):
            raise GarbageError(f"{name} must be a bool, not {flag!r:.50}")
    if done:
        return Turn((), value, True)
    if not isinstance(conversation, numbers.Integral) or not 0 <= conversation < MAX_CONVERSATIONS:
        raise GarbageError(
            f"conversation={conversation!r:.50} must be a whole number below {MAX_CONVERSATIONS}"
        )
    found = as_messages(messages, FIRST_ROLES if conversation else ROLES, max_chars)
    if not found:
        raise GarbageError("a turn that is not done needs a message for the policy")
    return Turn(found, value, False, bool(is_own), int(conversation))


def as_messages(messages: Any, roles: Sequence[str], max_chars: int) -> list[Message]:
    """Messages of `max_chars` characters at most, lone surrogates as "?"; GarbageError if wrong."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, collections.abc.Sequence) or isinstance(messages, bytes):
        raise GarbageError(
            f"messages must be a text, or a list of roles and contents, not {messages!r:.80}"
        )
    found: list[Message] = []
    for message in messages:
        if not max_chars:
            break
        if not isinstance(message, collections.abc.Mapping) or set(message) != {"role", "content"}:
            raise GarbageError(f"a message must map role and content alone, not {message!r:.80}")
        role, content = message["role"], message["content"]
        if role not in roles:
            raise GarbageError(f"role must be one of {', '.join(roles)}, not {role!r:.50}")
        if not isinstance(content, str):
            raise GarbageError(f"content must be a text, not {content!r:.80}")
        text = str.encode(content[:max_chars], "utf-8", "replace").decode()
        max_chars -= len(text)
        found.append({"role": str(role), "content": text})
    return found


def as_tasks(tasks: Any, count: int) -> list[dict[str, Any]]:
    """At most `count` tasks as JSON keeps them, lone surrogates as "?"; GarbageError if wrong."""
    try:
        first = itertools.islice(tasks, count)  # a generator may never end
        text = json.dumps([dict(task) for task in first], ensure_ascii=False)
        found = json.loads(text.encode("utf-8", "replace"))
    except BaseException as error:
        text = error_text(error)
        raise GarbageError(f"tasks must return a list of JSON objects: {text}") from error
    if not found:
        raise GarbageError("tasks returned none")
    return found
