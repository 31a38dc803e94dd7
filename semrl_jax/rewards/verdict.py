"""What a verifier says of one response, and how correctness becomes a score."""

from __future__ import annotations

import dataclasses

from semrl_jax.rewards.extraction import has_complete_box


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verifier's word on one response.

    Attributes:
      score: the reward, finite.
      correct: whether the answer is right; kept apart from the score, which also pays for format.
      boxed: whether the response holds a complete box (see `has_complete_box`).
      extracted: the answer taken from the response; None where there is none or the job failed.
      error: "" or what went wrong, its kind first: "timeout", "crash", "too_long",
        "exception: ..." (the verifier raised), "invalid: ..." (it returned nonsense).
    """

    score: float
    correct: bool
    boxed: bool
    extracted: str | None
    error: str = ""

    @property
    def error_kind(self) -> str:
        """The part of `error` before the colon, "" if the verifier did its work."""
        return self.error.partition(":")[0]


@dataclasses.dataclass(frozen=True)
class VerifierSettings:
    """What a verifier worker is told when it starts; `VerifierPool` checks it.

    Attributes:
      mode: "independent" pays for correctness and for the box, "mix" for correctness only.
      unboxed_penalty: score of a wrong, unboxed response in mode "independent".
      function: "package.module:name" of a user's verifier; "" is math-verify.
      failure_score: score of a response whose verifier `function` failed; math-verify's failures
        score as wrong by `mode`.
      max_answer_chars: a longer extracted answer is wrong without being parsed.
      memory_limit_gib: address space of a worker; 0 is no limit.
    """

    mode: str = "independent"
    unboxed_penalty: float = -1.0
    function: str = ""
    failure_score: float = 0.0
    max_answer_chars: int = 4096
    memory_limit_gib: float = 2.0


def verdict_score(
    correct: bool, boxed: bool, *, mode: str = "independent", unboxed_penalty: float = -1.0
) -> float:
    """Scores a response from its correctness and its format.

    | mode | correct, boxed | correct, unboxed | wrong, boxed | wrong, unboxed |
    |---|---|---|---|---|
    | independent | 1 | 0.5 | -0.5 | unboxed_penalty |
    | mix | 1 | 1 | 0 | 0 |

    Source: the two reachable modes of the reference implementation (hf618/VERL, 3de68f1).
    """
    if mode == "mix":
        return 1.0 if correct else 0.0
    if correct:
        return 1.0 if boxed else 0.5
    return -0.5 if boxed else unboxed_penalty


def failed_verdict(settings: VerifierSettings, response: str, error: str) -> Verdict:
    """Makes the verdict on a response whose verifier gave none: wrong, and the error named."""
    boxed = has_complete_box(response)
    if settings.function:
        score = settings.failure_score
    else:
        score = verdict_score(
            False, boxed, mode=settings.mode, unboxed_penalty=settings.unboxed_penalty
        )
    return Verdict(score, False, boxed, None, error)
