"""Samples and scores the held-out problems."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.clock import Clock
from semrl_jax.errors import UserError
from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.interface import PerProblem, Plan
from semrl_jax.evaluation.samples import Sample, not_sampled, sampled
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
            for name, value in self._scalars(found, plan, scores, logs_metrics).items():
                if name in scalars and not name.endswith("/num_problems"):
                    raise UserError(
                        f"evaluation.scores: two scores have the key {name!r}; rename one."
                    )
                scalars[name] = value
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
            stop_strings=self.config.evaluation.stop_strings,
            measured=self.config.evaluation.metrics,
            arrived=counter(clock, "evaluate", len(requests)),
        )

    def _scalars(
        self,
        scored: Sequence[ScoredRollout],
        plan: Plan,
        scores: Sequence[ModuleType],
        logs_metrics: bool,
    ) -> dict[str, float]:
        scalars: dict[str, float] = {}
        groups = itertools.groupby(scored, key=lambda item: item.rollout.group_id)
        responses = {index: list(items) for index, items in groups}
        for benchmark, places in self._places().items():
            prefix = f"eval/{benchmark}"
            problems = [
                [sampled(item, self.problems[index], place) for item in responses[index]]
                if index in responses
                else not_sampled(self.problems[index], place, plan.num_samples)
                for place, index in enumerate(places)
            ]
            figures = figures_of(scores, problems, self.config.evaluation)
            scalars |= {f"{prefix}/{name}": value for name, value in logged(figures).items()}
            scalars[f"{prefix}/num_problems"] = float(len(problems))
            found = [item for index in places for item in responses.get(index, ())]
            if logs_metrics and found:
                scalars |= metric_scalars(found, f"{prefix}/metrics")
                means = [item.mean_states for item in found]
                of_set = self.sampler.measurer.submit_batch(means).result()
                scalars |= {f"{prefix}/metrics/{name}": value for name, value in of_set.items()}
        return scalars

    def _places(self) -> dict[str, list[int]]:
        """The indices of the problems of each benchmark."""
        places: dict[str, list[int]] = {}
        for index, problem in enumerate(self.problems):
            places.setdefault(problem.data_source, []).append(index)
        return places

    def _benchmark(self, item: ScoredRollout) -> str:
        return self.problems[item.rollout.group_id].data_source


def figures_of(
    scores: Sequence[ModuleType],
    problems: Sequence[Sequence[Sample]],
    options: ml_collections.ConfigDict,
) -> dict[str, PerProblem]:
    """The figures of all scores for one benchmark.

    Raises:
      UserError: if a score of the user fails or has a wrong result, or two have one name.
    """
    figures: dict[str, PerProblem] = {}
    for score in dict.fromkeys(scores):
        with running("evaluation.scores", score, "per_problem"):
            found = score.per_problem(problems, options)
            for name, figure in found.items():
                _check_figure(name, figure, len(problems))
        if twice := sorted(figures.keys() & found.keys()):
            raise UserError(f"evaluation.scores: two scores have the key {twice[0]!r}; rename one.")
        figures |= found
    return figures


def logged(figures: Mapping[str, PerProblem]) -> dict[str, float]:
    """The figures for the log of a training run; those without a response are left out."""
    scalars = {}
    for name, figure in figures.items():
        if not math.isnan(value := statistics.mean(figure)):
            scalars[name] = value
            if figure.with_error:
                scalars[f"{name}_stderr"] = statistics.standard_error(figure)
    return scalars


def _check_figure(name: str, figure: Any, num_problems: int) -> None:
    if not isinstance(figure, PerProblem):
        raise TypeError(f"{name!r} must be a PerProblem, not {figure!r:.100}")
    weights = np.ones(num_problems) if figure.weights is None else np.asarray(figure.weights, float)
    values = np.asarray(figure.values, float)
    if values.shape != (num_problems,) or weights.shape != (num_problems,):
        raise ValueError(f"{name!r} must have a value for each of {num_problems} problems")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError(f"{name!r}: weights must be finite and at least 0")
    if not np.isfinite(values[weights > 0]).all():
        raise ValueError(f"{name!r}: values must be finite where the weight is above 0")


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


def most_requests(
    problems: Sequence[data.PromptExample],
    scores: Sequence[ModuleType],
    config: ml_collections.ConfigDict,
) -> int:
    """The largest number of responses that one call of an evaluation requests."""
    sampled = sampled_problems(problems, config.rollout.max_prompt_tokens)
    plans = plans_of(scores, config.evaluation) if config.evaluation.every_steps else ()
    return len(sampled) * max((plan.num_samples for plan in plans), default=0)
