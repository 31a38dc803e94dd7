"""Imports verifiers, and reads what a user's own returns."""

from __future__ import annotations

import collections.abc
import functools
import importlib
import inspect
import io
import math
import numbers
import pathlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import cloudpickle

from semrl_jax.rewards.extraction import has_complete_box
from semrl_jax.rewards.verdict import Verdict
from semrl_jax.settings.rewards import MAX_SCORE, VERIFIERS
from semrl_jax.support.errors import UserError
from semrl_jax.support.isolation import error_text
from semrl_jax.support.modules import load_module

MAX_EXTRACTED_CHARS = 1_000_000
MAX_STEPS = 10_000


def load_builtin(name: str, field: str = "rewards.function") -> tuple[ModuleType, bool]:
    """The module of `verifiers` that `field` names, "" for math; whether `verify` takes the row."""
    module = load_module(field, name or "math", VERIFIERS, ("verify",))
    return module, "row" in inspect.signature(module.verify).parameters


def load_function(path: str, field: str = "rewards.function") -> tuple[Callable[..., Any], bool]:
    """Imports "package.module:name", and makes a function of (response, reference, row) of it.

    The module may be a .pkl file of `dump_functions`. The function gets the row if it has a
    parameter `row`, or a third one without a default; the second result tells whether it does.
    Raises UserError if the import fails, or the name is not a function of (response, reference) or
    of (response, reference, row); `field` of the config has the path.
    """
    module_name, _, name = path.rpartition(":")  # a directory may have colons
    try:
        if module_name.endswith(".pkl"):
            function = cloudpickle.loads(pathlib.Path(module_name).read_bytes())[name]
        else:
            function = getattr(importlib.import_module(module_name), name)
    except BaseException as e:
        reason = " ".join(error_text(e).split())
        raise UserError(
            f"{field}={path!r} cannot be imported ({reason}); the module must be on "
            "PYTHONPATH or in the directory the command was started in."
        ) from e
    try:
        return _with_row(function)
    except TypeError as e:
        raise UserError(
            f"{field}={path!r} must be callable as {name}(response, reference) or "
            f"{name}(response, reference, row): {e}."
        ) from e


def dump_functions(functions: Any) -> bytes:
    """The contents of a .pkl file for `load_function`; any error if they cannot be pickled.

    cloudpickle has the functions of a program or a notebook by value, but those with a
    `functools.cache` by name, which another process cannot look up. Here these go by value, too.
    """

    def reduced(cached: Any) -> Any:
        if cached.__module__ != "__main__":
            return cached.__qualname__
        return functools.cache, (cached.__wrapped__,)

    class Pickler(cloudpickle.Pickler):
        dispatch_table = cloudpickle.Pickler.dispatch_table | {type(functools.cache(len)): reduced}

    file = io.BytesIO()
    Pickler(file).dump(functions)
    return file.getvalue()


def _with_row(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """See `load_function`; TypeError if the function cannot be called in any of the ways."""

    def without_row(response: str, reference: str, _: Mapping[str, Any]) -> Any:
        return function(response, reference)

    try:
        signature = inspect.signature(function)
    except ValueError:
        return without_row, False  # a builtin without a signature
    row = signature.parameters.get("row")
    if row is not None and row.kind in (row.POSITIONAL_OR_KEYWORD, row.KEYWORD_ONLY):
        signature.bind("", "", row={})
        return lambda response, reference, row: function(response, reference, row=row), True
    try:
        signature.bind("", "")
    except TypeError as error:
        try:
            signature.bind("", "", {})
        except TypeError:
            raise error from None
        return function, True
    return without_row, False


class NonsenseError(ValueError):
    """A user's verifier returned something that is not a verdict."""


def as_verdict(result: Any, response: str) -> Verdict:
    """Reads what a user's verifier returned, even if the methods of these objects fail.

    It may be a score; or a mapping with `score` and optionally `correct`, `boxed`, `extracted` and
    `steps`; or a `Verdict`. Without `correct`, a response is correct if its score is positive. The
    verdict has plain Python values; a lone surrogate in `extracted` becomes "?". Raises
    NonsenseError if it is none of these, or has a wrong type or a number that is not finite.
    """
    try:
        return _read(result, response)
    except NonsenseError:
        raise
    except BaseException as e:
        raise NonsenseError(f"what it returned cannot be read: {error_text(e)}") from e


def _read(result: Any, response: str) -> Verdict:
    known = ("score", "correct", "boxed", "extracted", "steps")
    if isinstance(result, Verdict):
        fields = {name: getattr(result, name) for name in known}
    elif isinstance(result, collections.abc.Mapping):
        fields = dict(result)
    else:
        fields = {"score": result}
    if unknown := sorted(map(str, fields.keys() - set(known))):
        raise NonsenseError(f"unknown keys {unknown}; known: {', '.join(known)}")
    score = _exact_number("score", fields.get("score"))
    correct = fields.get("correct", score > 0)
    boxed = fields["boxed"] if "boxed" in fields else has_complete_box(response)
    extracted = fields.get("extracted")
    for name, flag in (("correct", correct), ("boxed", boxed)):
        if not isinstance(flag, numbers.Integral) and type(flag).__name__ not in ("bool", "bool_"):
            raise NonsenseError(f"{name} must be a bool, not {flag!r:.50}")
    if extracted is not None:
        if not isinstance(extracted, str):
            raise NonsenseError(f"extracted must be text or None, not {extracted!r:.50}")
        extracted = str.encode(extracted, "utf-8", "replace").decode()  # of a subclass, too
        if len(extracted) > MAX_EXTRACTED_CHARS:
            raise NonsenseError(
                f"extracted has {len(extracted)} characters; at most {MAX_EXTRACTED_CHARS} are kept"
            )
    steps = fields.get("steps")
    steps = None if steps is None else _steps(steps, len(response))
    return Verdict(score, bool(correct), bool(boxed), extracted, steps=steps)


def _steps(steps: Any, num_characters: int) -> tuple[tuple[int, float], ...]:
    """Checks the pairs of (characters up to the end of a step, its reward)."""
    if not isinstance(steps, list | tuple) or len(steps) > MAX_STEPS:
        raise NonsenseError(
            f"steps must be a list of at most {MAX_STEPS} pairs (end, reward), not {steps!r:.50}"
        )
    found: list[tuple[int, float]] = []
    for step in steps:
        if not isinstance(step, list | tuple) or len(step) != 2:
            raise NonsenseError(f"a step must be a pair (end, reward), not {step!r:.50}")
        end = int(step[0]) if isinstance(step[0], numbers.Integral) else 0
        if not (found[-1][0] if found else 0) < end <= num_characters:
            raise NonsenseError(
                "the end of a step must be an int above that of the step before, and at most "
                f"len(response)={num_characters}, not {step[0]!r:.50}"
            )
        found.append((end, _exact_number("the reward of a step", step[1])))
    return tuple(found)


def _exact_number(name: str, value: Any) -> float:
    """A plain float, because a subclass could redefine every comparison."""
    try:
        found = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        found = math.inf
    if not abs(found) <= MAX_SCORE:  # NaN is not
        raise NonsenseError(
            f"{name} must be a number from {-MAX_SCORE:g} to {MAX_SCORE:g}, not {value!r:.50}"
        )
    return found
