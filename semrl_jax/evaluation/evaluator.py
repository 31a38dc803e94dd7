"""Samples, grades and scores the held-out problems."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.protocols import PerProblem, Plan
from semrl_jax.evaluation.samples import Sample, not_sampled, sampled
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.rewards import VerifierPool
from semrl_jax.sampling.ahead import Ahead
from semrl_jax.sampling.batch_scalars import metric_scalars
from semrl_jax.sampling.requests import EVALUATION, Measuring, counter, stream_seed
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.settings.evaluation import check_sampling
from semrl_jax.settings.rollout import MIN_TEMPERATURE
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError
from semrl_jax.support.intervals import in_words, is_within
from semrl_jax.support.modules import running
from semrl_jax.types import DISTRIBUTION, Rollout, SampleRequest, distribution_of

# Settings of the sampling that an entry of `evaluation.benchmarks` may have of its own.
SAMPLING = ("n", *DISTRIBUTION)


class Evaluation(NamedTuple):
    """Results of the weights of one step on the held-out problems."""

    scalars: dict[str, float]  # `eval/<benchmark>/...`
    scored: Scored  # all responses
    benchmarks: list[str]  # benchmark of each response


class Benchmark(NamedTuple):
    """The problems of one benchmark, and how they are evaluated."""

    name: str  # the `data_source` of the problems
    problems: tuple[int, ...]  # index among all problems, by place in the benchmark
    options: ml_collections.ConfigDict  # `config.evaluation` with the settings of this benchmark
    scores: Mapping[Plan, Sequence[ModuleType]]  # of each way of sampling

    def first_sample(self, plan: Plan) -> int:
        """The sample indices of a plan follow those of earlier plans."""
        earlier = itertools.takewhile(lambda other: other != plan, self.scores)
        return sum(other.num_samples for other in earlier)


@dataclasses.dataclass
class Evaluator:
    """Evaluates the weights of the last sync."""

    config: ml_collections.ConfigDict
    problems: Sequence[data.PromptExample]  # problems with the same `data_source` are one benchmark
    scores: Sequence[ModuleType]  # modules, see `evaluation.interface`
    sampler: Sampler | Ahead
    # Settings of single benchmarks, by name
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Verifier of each benchmark that has another one than the sampler
    graders: Mapping[str, VerifierPool] = dataclasses.field(default_factory=dict)
    measurer: Measurer | None = None  # None: nothing is measured here

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are evaluated."""
        every = self.config.evaluation.every_steps
        due = every and (step % every == 0 or step == self.config.training.num_steps)
        return bool(due and self.problems and self.scores)

    @functools.cached_property
    def benchmarks(self) -> dict[str, Benchmark]:
        """The benchmarks, in the order of their first problems."""
        return benchmarks_of(self.problems, self.scores, self.config.evaluation, self.settings)

    def evaluate(self, step: int, clock: Clock) -> Evaluation | None:
        """Samples the responses of each plan with one call, and scores them; None if not due."""
        if not self.is_due(step):
            return None
        calls: dict[tuple[Plan, int], list[Benchmark]] = {}
        for benchmark in self.benchmarks.values():
            for plan in benchmark.scores:
                calls.setdefault((plan, id(self.graders.get(benchmark.name))), []).append(benchmark)
        scalars: dict[str, float] = {}
        scored: list[Scored] = []
        for (plan, _), benchmarks in calls.items():
            places = [(b, place) for b in benchmarks for place in range(len(b.problems))]
            with clock("evaluate"):
                num_responses = len(places) * plan.num_samples
                arrived = counter(clock, "evaluate", num_responses)
                found = self.sample(places, plan, arrived)
            for benchmark in benchmarks:
                names = np.array(list(map(self._benchmark, found)))
                items = found.take(np.flatnonzero(names == benchmark.name))
                new = self._scalars(benchmark, plan, items)
                if twice := sorted(new.keys() & scalars.keys()):
                    raise UserError(
                        f"evaluation.scores: two scores have the key {twice[0]!r}; rename one."
                    )
                scalars |= new
                # Metrics have one set of log keys, for the responses of the first plan.
                if self.measurer is not None and plan == next(iter(benchmark.scores)):
                    scalars |= self._metric_scalars(benchmark, items)
            scored.append(found)
        for benchmark in self.benchmarks.values():
            scalars[f"eval/{benchmark.name}/num_problems"] = float(len(benchmark.problems))
        joined = Scored.joined(scored)
        return Evaluation(scalars, joined, list(map(self._benchmark, joined)))

    def sample(
        self,
        places: Sequence[tuple[Benchmark, int]],
        plan: Plan,
        arrived: Callable[[Rollout], None],
    ) -> Scored:
        """The graded responses to problems of benchmarks with one grader, from one call.

        The group of a response is the index of its problem. A response depends on the seed of the
        config, the weights, the name of its benchmark, its place in it, and its sample index. With
        the JAX engine, it also depends, by rounding, on the other responses of the call.
        """
        limit = self.config.rollout.max_prompt_tokens
        asked = {
            benchmark.problems[place]: (benchmark, place)
            for benchmark, place in places
            if len(self.problems[benchmark.problems[place]].prompt_ids) <= limit
        }
        if not asked:
            return Scored(())
        requests = [
            SampleRequest(
                sample_id=f"eval/{index}/{sample}",
                group_id=index,
                sample_index=sample,
                prompt_ids=self.problems[index].prompt_ids,
                seed=stream_seed(
                    self.config.seed, EVALUATION, zlib.crc32(benchmark.name.encode()), place, sample
                ),
            )
            for index, (benchmark, place) in asked.items()
            for sample in range(
                benchmark.first_sample(plan), benchmark.first_sample(plan) + plan.num_samples
            )
        ]
        options = self.config.evaluation.metric_options
        return self.sampler.sample(
            requests,
            {index: self.problems[index].answer for index in asked},
            columns={index: self.problems[index].columns for index in asked},
            verifier=self.graders.get(places[0][0].name),
            **distribution_of(plan),
            stop_strings=self.config.evaluation.stop_strings,
            measuring=Measuring(options, self.measurer) if self.config.evaluation.metrics else None,
            arrived=arrived,
        )

    def samples(
        self, benchmark: Benchmark, places: Sequence[int], plan: Plan, items: Scored
    ) -> list[list[Sample]]:
        """The responses as samples, one list per problem at `places` of the benchmark."""
        indices = {place: benchmark.problems[place] for place in places}
        problems = {index: (place, self.problems[index]) for place, index in indices.items()}
        found: dict[int, list[Sample]] = {}
        text = functools.partial(data.full_text, self.sampler.tokenizer)
        for sample in sampled(items, problems, benchmark.first_sample(plan), text):
            found.setdefault(sample.group_id, []).append(sample)
        return [
            found.get(place) or not_sampled(self.problems[index], place, plan.num_samples)
            for place, index in indices.items()
        ]

    def _scalars(self, benchmark: Benchmark, plan: Plan, items: Scored) -> dict[str, float]:
        problems = self.samples(benchmark, range(len(benchmark.problems)), plan, items)
        figures = figures_of(benchmark.scores[plan], problems, benchmark.options)
        return {f"eval/{benchmark.name}/{name}": value for name, value in logged(figures).items()}

    def _metric_scalars(self, benchmark: Benchmark, items: Scored) -> dict[str, float]:
        if not items:
            return {}
        prefix = f"eval/{benchmark.name}/metrics"
        of_set = self.measurer.submit_batch(items.mean_states).result()
        found = {f"{prefix}/{name}": value for name, value in of_set.items()}
        return metric_scalars(items, prefix) | found

    def _benchmark(self, item: ScoredRollout) -> str:
        return self.problems[item.rollout.group_id].data_source


def benchmarks_of(
    problems: Sequence[data.PromptExample],
    scores: Sequence[ModuleType],
    options: ml_collections.ConfigDict,
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, Benchmark]:
    """The benchmarks of the problems, by name; UserError for a wrong setting or plan."""
    places: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        places.setdefault(problem.data_source, []).append(index)
    found = {}
    for name, indices in places.items():
        special = {key: settings[name][key] for key in SAMPLING if key in settings.get(name, ())}
        own = options_of(options, special)
        if special:
            check_sampling(own, f"evaluation.benchmarks: {name}: ")
        found[name] = Benchmark(name, tuple(indices), own, plans_of(scores, own))
    return found


def options_of(
    options: ml_collections.ConfigDict, own: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """`config.evaluation` with the settings of one benchmark, and each k that its n allows."""
    found = options.copy_and_resolve_references()
    found.update(own)
    found.k = tuple(k for k in found.k if k <= found.n) or (found.k and (1,))
    return found


def figures_of(
    scores: Sequence[ModuleType],
    problems: Sequence[Sequence[Sample]],
    options: ml_collections.ConfigDict,
) -> dict[str, PerProblem]:
    """The figures of all scores for one benchmark; UserError if a user's score fails."""
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
    for name in ("top_k", "min_tokens"):
        if not isinstance(getattr(plan, name), int):
            raise ValueError(f"{name}={getattr(plan, name)} must be a whole number")
    if plan.temperature != 0 and not MIN_TEMPERATURE <= plan.temperature < 2**31:
        raise ValueError(f"temperature={plan.temperature} must be 0 or at least {MIN_TEMPERATURE}")
    for name, interval in DISTRIBUTION.items():
        if not is_within(getattr(plan, name), interval):
            raise ValueError(f"{name}={getattr(plan, name)} must be {in_words(interval)}")


def most_requests(
    problems: Sequence[data.PromptExample],
    scores: Sequence[ModuleType],
    config: ml_collections.ConfigDict,
    settings: Mapping[str, Mapping[str, Any]],
) -> int:
    """The largest number of responses that one call of an evaluation requests."""
    if not config.evaluation.every_steps:
        return 0
    counts: collections.Counter[Plan] = collections.Counter()
    for benchmark in benchmarks_of(problems, scores, config.evaluation, settings).values():
        for plan in benchmark.scores:
            counts[plan] += plan.num_samples * len(benchmark.problems)
    return max(counts.values(), default=0)
