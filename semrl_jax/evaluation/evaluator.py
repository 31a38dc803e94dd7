"""Samples and scores the held-out problems."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import ml_collections

from semrl_jax import data
from semrl_jax.clock import Clock
from semrl_jax.errors import UserError
from semrl_jax.evaluation.interface import Plan
from semrl_jax.modules import running
from semrl_jax.sampling.prompt_sources import sampled_problems
from semrl_jax.sampling.sampler import EVALUATION, Sampler, counter, stream_seed
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.sampling.statistics import metric_scalars
from semrl_jax.settings.rollout import MIN_TEMPERATURE
from semrl_jax.types import SampleRequest


class Evaluation(NamedTuple):
    """Results of the weights of one step on the held-out problems.

    Attributes:
      scalars: `eval/<benchmark>/...`.
      scored: all responses.
      benchmarks: benchmark of each response.
    """

    scalars: dict[str, float]
    scored: list[ScoredRollout]
    benchmarks: list[str]


@dataclasses.dataclass
class Evaluator:
    """Evaluates the weights of the last sync.

    Attributes:
      problems: problems with the same `data_source` are one benchmark.
      scores: modules, see `evaluation.interface`.
    """

    config: ml_collections.ConfigDict
    problems: Sequence[data.PromptExample]
    scores: Sequence[ModuleType]
    sampler: Sampler

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are evaluated."""
        every = self.config.evaluation.every_steps
        due = every and (step % every == 0 or step == self.config.training.num_steps)
        return bool(due and self.problems and self.scores)

    def evaluate(self, step: int, clock: Clock) -> Evaluation | None:
        """Samples the responses of each plan with one call, and scores them; None if not due."""
        if not self.is_due(step):
            return None
        scalars: dict[str, float] = {}
        scored: list[ScoredRollout] = []
        for plan, scores in plans_of(self.scores, self.config.evaluation).items():
            with clock("evaluate"):
                found = self._sample(plan, step, clock, num_before=len(scored))
            # Metrics have one set of log keys, for the responses of the first plan.
            logs_metrics = self.config.evaluation.metrics and not scored
            scalars = _joined(scalars, self._scalars(found, scores, logs_metrics))
            scored += found
        return Evaluation(scalars, scored, [self._benchmark(item) for item in scored])

    def _sample(self, plan: Plan, step: int, clock: Clock, num_before: int) -> list[ScoredRollout]:
        """The responses of one plan; their sample indices follow those of earlier plans."""
        problems = sampled_problems(self.problems, self.config.rollout.max_prompt_tokens)
        first = num_before // max(len(problems), 1)
        requests = [
            SampleRequest(
                sample_id=f"eval/{step}/{index}/{sample}",
                group_id=index,
                sample_index=sample,
                prompt_ids=problem.prompt_ids,
                seed=stream_seed(self.config.seed, EVALUATION, step, index, sample),
            )
            for index, problem in problems.items()
            for sample in range(first, first + plan.num_samples)
        ]
        return self.sampler.sample(
            requests,
            {index: problem.answer for index, problem in problems.items()},
            columns={index: problem.columns for index, problem in problems.items()},
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            measured=self.config.evaluation.metrics,
            arrived=counter(clock, "evaluate", len(requests)),
        )

    def _scalars(
        self, scored: Sequence[ScoredRollout], scores: Sequence[ModuleType], logs_metrics: bool
    ) -> dict[str, float]:
        scalars: dict[str, float] = {}
        sizes = collections.Counter(problem.data_source for problem in self.problems)
        for benchmark, num_problems in sizes.items():
            responses = [item for item in scored if self._benchmark(item) == benchmark]
            groups = itertools.groupby(responses, key=lambda item: item.rollout.group_id)
            by_problem = [list(group) for _, group in groups]
            for score in dict.fromkeys(scores):
                scalars = _joined(scalars, _numbers(score, benchmark, by_problem, num_problems))
            if logs_metrics and responses:
                prefix = f"eval/{benchmark}/metrics"
                scalars |= metric_scalars(responses, prefix)
                means = [item.mean_states for item in responses]
                of_set = self.sampler.measurer.submit_batch(means).result()
                scalars |= {f"{prefix}/{name}": value for name, value in of_set.items()}
        return scalars

    def _benchmark(self, item: ScoredRollout) -> str:
        return self.problems[item.rollout.group_id].data_source


def plans_of(
    scores: Sequence[ModuleType], options: ml_collections.ConfigDict
) -> dict[Plan, list[ModuleType]]:
    """The scores that use the responses of each plan."""
    plans: dict[Plan, list[ModuleType]] = {}
    for score in scores:
        with running("evaluation.scores", score, "plan"):
            plan = score.plan(options)
            if not isinstance(plan, Plan):
                raise TypeError(f"it must return a Plan, not {plan!r}")
            _check_plan(plan)
            plans.setdefault(plan, []).append(score)
    return plans


def _check_plan(plan: Plan) -> None:
    if not (isinstance(plan.num_samples, int) and plan.num_samples >= 1):
        raise ValueError(f"num_samples={plan.num_samples} must be a whole number of at least 1")
    if not (isinstance(plan.top_k, int) and plan.top_k >= 0):
        raise ValueError(f"top_k={plan.top_k} must be a whole number of at least 0")
    if plan.temperature != 0 and not MIN_TEMPERATURE <= plan.temperature < 2**31:
        raise ValueError(f"temperature={plan.temperature} must be 0 or at least {MIN_TEMPERATURE}")
    if not 0 < plan.top_p <= 1:
        raise ValueError(f"top_p={plan.top_p} must be in (0, 1]")


def _numbers(
    score: ModuleType, benchmark: str, responses: list[list[ScoredRollout]], num_problems: int
) -> dict[str, float]:
    with running("evaluation.scores", score, "scalars"):
        found = score.scalars(benchmark, responses, num_problems)
        for name in found:
            if not name.startswith(f"eval/{benchmark}/"):
                raise ValueError(f"the key {name!r} must begin with 'eval/{benchmark}/'")
        return {name: float(value) for name, value in found.items()}


def most_requests(
    problems: Sequence[data.PromptExample],
    scores: Sequence[ModuleType],
    config: ml_collections.ConfigDict,
) -> int:
    """The largest number of responses that one call of an evaluation requests."""
    sampled = sampled_problems(problems, config.rollout.max_prompt_tokens)
    plans = plans_of(scores, config.evaluation) if config.evaluation.every_steps else ()
    return len(sampled) * max((plan.num_samples for plan in plans), default=0)


def _joined(scalars: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    if twice := sorted(scalars.keys() & others.keys()):
        raise UserError(f"evaluation.scores: two scores have the key {twice[0]!r}; rename one.")
    return scalars | others
