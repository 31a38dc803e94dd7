"""The result of a verifier for one response, and the score for correctness and format."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from semrl_jax.rewards.extraction import has_complete_box
from semrl_jax.settings.rewards import MAX_SCORE, RewardFunction

# Built-in verifiers on which `mode` has no influence; a wrong response scores 0.
ZERO_OR_ONE = ("benchmark", "gsm8k_flexible", "gsm8k_strict", "math_text", "reasoning_gym")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a verifier for one response."""

    score: float  # the reward, from -MAX_SCORE to MAX_SCORE
    correct: bool  # whether the answer is right; the score also depends on the format
    boxed: bool  # whether the response has a complete box (see `has_complete_box`)
    extracted: str | None  # the answer; None if there is none or the verifier failed
    # "" or what went wrong, beginning with its kind: "timeout", "crash", "too_long",
    # "exception: ..." (the verifier raised), "invalid: ..." (it returned no verdict).
    error: str = ""
    # With several functions or verdicts, the score of each by its name, without its weight.
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # For each step of the response: the number of characters up to its end, which grows from one
    # step to the next, and its reward; None: the function judges no steps.
    steps: tuple[tuple[int, float], ...] | None = None

    @property
    def error_kind(self) -> str:
        """The part of `error` before the colon; "" if the verifier did not fail."""
        return self.error.partition(":")[0]


@dataclasses.dataclass(frozen=True)
class VerifierSettings:
    """What a verifier worker gets when it starts; `VerifierPool` checks it."""

    # "independent" scores correctness and the box, "mix" only correctness.
    mode: str = "independent"
    unboxed_penalty: float = -1.0  # score of a wrong, unboxed response in mode "independent"
    # "package.module:name" of a user's verifier, called as name(response, reference) or
    # name(response, reference, row), see `function`; or a module of `verifiers`; "" is "math".
    function: str = ""
    # Score of a response for which a user's verifier raised, hung, crashed or returned no verdict.
    # If a built-in verifier fails, the response is wrong: `mode` gives the score, but those of
    # `ZERO_OR_ONE` score 0.
    failure_score: float = 0.0
    memory_limit_gib: float = 2.0  # address space of a worker; 0 is no limit

    @property
    def is_users(self) -> bool:
        """Whether `function` is a user's own."""
        return ":" in self.function


def verdict_score(correct: bool, boxed: bool, settings: VerifierSettings) -> float:
    """Scores a response from its correctness and its format.

    | mode | correct, boxed | correct, unboxed | wrong, boxed | wrong, unboxed |
    |---|---|---|---|---|
    | independent | 1 | 0.5 | -0.5 | unboxed_penalty |
    | mix | 1 | 1 | 0 | 0 |

    Source: the two reachable modes of the reference implementation (hf618/VERL, 3de68f1).
    """
    if settings.mode == "mix":
        return 1.0 if correct else 0.0
    if correct:
        return 1.0 if boxed else 0.5
    return -0.5 if boxed else settings.unboxed_penalty


def weighted_verdict(functions: Sequence[RewardFunction], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several functions on one response: the weighted sum of their scores.

    Correctness, the box and the answer come from the first function. The error names the functions
    that failed. A sum beyond MAX_SCORE is clipped, and is an error too. The steps are those of all
    functions; where two end at the same character, the sum of their weighted rewards counts.
    """
    total = sum(f.weight * verdict.score for f, verdict in zip(functions, verdicts, strict=True))
    errors = []
    for function, verdict in zip(functions, verdicts, strict=True):
        if verdict.error:
            kind, _, rest = verdict.error.partition(": ")
            errors.append(": ".join(filter(None, (kind, function.name, rest))))
    steps: collections.Counter[int] = collections.Counter()
    for function, verdict in zip(functions, verdicts, strict=True):
        for end, reward in verdict.steps or ():
            steps[end] += _bounded(function.weight * reward, [])
    return dataclasses.replace(
        verdicts[0],
        score=_bounded(total, errors),
        error="; ".join(errors),
        parts={f.name: verdict.score for f, verdict in zip(functions, verdicts, strict=True)},
        steps=None if all(v.steps is None for v in verdicts) else tuple(sorted(steps.items())),
    )


def with_model_score(
    verdict: Verdict, function: RewardFunction, score: float, *, joins: bool
) -> Verdict:
    """Adds the score of a reward model, without its weight, to a verdict of the verifiers.

    They also judge correctness, the box and the answer. `joins`: their score counts too.
    """
    total = function.weight * score + (verdict.score if joins else 0.0)
    errors = [verdict.error] * bool(verdict.error)
    return dataclasses.replace(
        verdict,
        score=_bounded(total, errors),
        error="; ".join(errors),
        parts={**verdict.parts, function.name: score},
    )


def _bounded(total: float, errors: list[str]) -> float:
    """The weighted sum within the bound; adds an error if it is beyond."""
    if abs(total) > MAX_SCORE:
        errors.append(f"invalid: the weighted sum {total:g} is beyond {MAX_SCORE:g}")
    return min(max(total, -MAX_SCORE), MAX_SCORE)


def episode_verdict(
    rewards: Sequence[float],
    error: str,
    failure_score: float,
    parts: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict of an environment: the sum of the rewards of its turns; 1 and more is correct.

    An environment that failed, with an error, has `failure_score`. `parts` are verdicts by name,
    whose weighted sum the rewards are.
    """
    errors = [error] * bool(error)
    score = failure_score if error else _bounded(math.fsum(rewards), errors)
    is_correct = not error and round(score, 6) >= 1.0  # a sum of floats
    return Verdict(score, is_correct, False, None, "; ".join(errors), dict(parts or {}))


def failed_verdict(settings: VerifierSettings, response: str, error: str) -> Verdict:
    """The verdict for a response whose verifier failed: wrong, with the error."""
    boxed = has_complete_box(response)
    if settings.is_users:
        score = settings.failure_score
    elif settings.function in ZERO_OR_ONE:
        score = 0.0
    else:
        score = verdict_score(False, boxed, settings)
    return Verdict(score, False, boxed, None, error)
