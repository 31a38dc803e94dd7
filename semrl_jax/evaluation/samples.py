"""A graded response to a held-out problem, as scores, result files and pages see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from semrl_jax import data
from semrl_jax.sampling.scoring import ScoredRollout

NOT_SAMPLED = "prompt_too_long"  # finish reason of the samples of a problem that was not sampled


class Sample(NamedTuple):
    """One response to one problem; a row of samples.parquet.

    Attributes:
      benchmark: its name.
      problem: place of the problem in the benchmark, from 0.
      sample: 0..n-1 among the responses to this problem.
      question: without the template.
      reference: the right answer.
      problem_type: such as "Algebra"; "" if the benchmark has no types.
      row: JSON object that the verifier could take, see `data.PromptExample.columns`; or "".
      response: the text that was graded.
      extracted: the answer found in it; None if there is none or the verifier failed.
      correct, score, boxed: of the verdict, see `rewards.Verdict`.
      verifier_error: "" or what went wrong.
      finish_reason: of the rollout; or NOT_SAMPLED. Such a sample is wrong and has no tokens.
      num_tokens: that the policy sampled.
      mean_logprob: nats per token, of the distribution sampled from; NaN without a token.
      metrics: value by label, such as "effective_rank_velocity"; NaN where not valid.
    """

    benchmark: str
    problem: int
    sample: int
    question: str
    reference: str
    problem_type: str
    row: str
    response: str
    extracted: str | None
    correct: bool
    score: float
    boxed: bool
    verifier_error: str
    finish_reason: str
    num_tokens: int
    mean_logprob: float
    metrics: Mapping[str, float]


def sampled(
    item: ScoredRollout,
    metrics: Mapping[str, float],
    problem: data.PromptExample,
    place: int,
    first_sample: int = 0,
) -> Sample:
    """The sample of a scored response to the problem at `place` of its benchmark.

    `metrics` are the response's, by label; `first_sample` is the smallest sample index of the
    rollouts.
    """
    rollout, verdict = item.rollout, item.verdict
    logprobs = rollout.rollout_logprobs[rollout.response_mask]
    return Sample(
        benchmark=problem.data_source,
        problem=place,
        sample=rollout.sample_index - first_sample,
        question=problem.question or problem.prompt,
        reference=item.reference,
        problem_type=problem.problem_type,
        row=problem.columns,
        response=item.response,
        extracted=verdict.extracted,
        correct=verdict.correct,
        score=verdict.score,
        boxed=verdict.boxed,
        verifier_error=verdict.error,
        finish_reason=rollout.finish_reason,
        num_tokens=len(logprobs),
        mean_logprob=float(logprobs.mean()) if len(logprobs) else float("nan"),
        metrics=metrics,
    )


def not_sampled(problem: data.PromptExample, place: int, num_samples: int) -> list[Sample]:
    """The samples of a problem whose prompt is too long: all are wrong."""
    return [
        Sample(
            benchmark=problem.data_source,
            problem=place,
            sample=index,
            question=problem.question or problem.prompt,
            reference=problem.answer,
            problem_type=problem.problem_type,
            row=problem.columns,
            response="",
            extracted=None,
            correct=False,
            score=0.0,
            boxed=False,
            verifier_error="",
            finish_reason=NOT_SAMPLED,
            num_tokens=0,
            mean_logprob=float("nan"),
            metrics={},
        )
        for index in range(num_samples)
    ]


def by_problem(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of one benchmark as one list per problem, in (problem, sample) order."""
    found: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.problem, sample.sample)):
        found.setdefault(sample.problem, []).append(sample)
    return list(found.values())
