"""Lengths and scores of the responses, and the shares that are truncated or without an answer."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import over_responses, plan
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """Means over all sampled responses.

    Returns:
      `responses/mean_length`, `.../mean_length_correct`, `.../mean_length_wrong` and
        `.../mean_length_finished` (not ended by the limit), in tokens.
      `responses/mean_score`: what the verifier or the environment gave, also below 1.
      `responses/truncated_fraction`: ended by the limit on tokens.
      `responses/boxed_fraction`: have a complete box; `responses/empty_fraction`: no answer was
        found in them; both over responses without an environment.
      `responses/timeout_fraction`: the verifier exceeded its time limit.
      `responses/mean_turns`: of the policy, if there are episodes.
    """

    def length(counts):
        return over_responses(problems, lambda sample: sample.num_tokens, counts)

    def fraction(condition, counts=lambda sample: True):
        return over_responses(problems, lambda sample: float(condition(sample)), counts)

    figures = {
        "responses/mean_length": length(lambda sample: True),
        "responses/mean_length_correct": length(lambda sample: sample.correct),
        "responses/mean_length_wrong": length(lambda sample: not sample.correct),
        "responses/mean_length_finished": length(_is_finished),
        "responses/mean_score": over_responses(problems, lambda sample: sample.score),
        "responses/truncated_fraction": fraction(lambda sample: sample.finish_reason == "length"),
        "responses/boxed_fraction": fraction(lambda sample: sample.boxed, _is_single),
        "responses/empty_fraction": fraction(
            lambda sample: not (sample.extracted or "").strip(), _is_single
        ),
        "responses/timeout_fraction": fraction(lambda s: _kind(s.verifier_error) == "timeout"),
    }
    if any(sample.num_turns for samples in problems for sample in samples):
        figures["responses/mean_turns"] = over_responses(
            problems, lambda sample: sample.num_turns, lambda sample: sample.num_turns > 0
        )
    return figures


def _is_finished(sample: Sample) -> bool:
    return sample.finish_reason in ("eos", "stop")


def _is_single(sample: Sample) -> bool:
    return sample.num_turns == 0


def _kind(verifier_error: str) -> str:
    return verifier_error.partition(":")[0]
