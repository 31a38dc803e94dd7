"""A user's own verifier: how it is found and what it may return."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import numbers
from collections.abc import Callable
from typing import Any

from semrl_jax.errors import UserError
from semrl_jax.rewards.extraction import has_complete_box
from semrl_jax.rewards.verdict import Verdict

MAX_SCORE = 3.4e38  # rewards are float32


def load_function(path: str) -> Callable[[str, str], Any]:
    """Imports "package.module:name".

    Raises:
      UserError: if that fails, or names nothing that takes (response, reference).
    """
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise UserError(
            f"rewards.function={path!r} cannot be imported ({reason}); the module must be on "
            "PYTHONPATH or in the directory the command was started in."
        ) from e
    try:
        inspect.signature(function).bind("", "")
    except TypeError as e:
        raise UserError(
            f"rewards.function={path!r} must be callable as {name}(response, reference): {e}."
        ) from e
    except ValueError:
        pass  # a builtin without a signature
    return function


class NonsenseError(Exception):
    """A user's verifier returned something that is no verdict."""


def as_verdict(result: Any, response: str) -> Verdict:
    """Reads what a user's verifier returned.

    Args:
      result: a score; or a mapping with `score` and, if wanted, `correct`, `boxed` and `extracted`;
        or a `Verdict`. Without `correct` a response counts as correct if its score is positive.
      response: the response, for the format flag.

    Raises:
      NonsenseError: if it is none of these, or holds a wrong type or a number that is not finite.
    """
    if isinstance(result, Verdict):
        fields = dataclasses.asdict(result)
        fields.pop("error")
    elif isinstance(result, collections.abc.Mapping):
        fields = dict(result)
    else:
        fields = {"score": result}
    if unknown := sorted(map(str, fields.keys() - {"score", "correct", "boxed", "extracted"})):
        raise NonsenseError(f"unknown keys {unknown}; known: score, correct, boxed, extracted")
    score = fields.get("score")
    if not isinstance(score, numbers.Real) or not abs(score) <= MAX_SCORE:  # NaN is not
        raise NonsenseError(f"score must be a finite number, not {score!r:.50}")
    correct = fields.get("correct", score > 0)
    boxed = fields.get("boxed", has_complete_box(response))
    extracted = fields.get("extracted")
    for name, flag in (("correct", correct), ("boxed", boxed)):
        if not isinstance(flag, numbers.Integral) and type(flag).__name__ not in ("bool", "bool_"):
            raise NonsenseError(f"{name} must be a bool, not {flag!r:.50}")
    if not isinstance(extracted, str | None):
        raise NonsenseError(f"extracted must be text or None, not {extracted!r:.50}")
    return Verdict(float(score), bool(correct), bool(boxed), extracted)
