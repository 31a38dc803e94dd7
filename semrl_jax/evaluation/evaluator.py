"""The held-out problems, sampled through the sampler and scored."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections

from semrl_jax import data
from semrl_jax.clock import Clock
from semrl_jax.evaluation.greedy import greedy_scalars
from semrl_jax.sampling.prompts import sampled_problems
from semrl_jax.sampling.sampler import EVALUATION, Sampler, counter, stream_seed
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.sampling.statistics import metric_scalars
from semrl_jax.types import SampleRequest


class Evaluation(NamedTuple):
    """What the weights of one step did on the held-out problems.

    Attributes:
      scalars: `eval/<benchmark>/...`.
      scored: the responses, problem by problem.
      benchmarks: of each response.
    """

    scalars: dict[str, float]
    scored: list[ScoredRollout]
    benchmarks: list[str]


@dataclasses.dataclass
class Evaluator:
    """Samples and scores the held-out problems with the weights of the last sync."""

    config: ml_collections.ConfigDict
    problems: Sequence[data.PromptExample]
    sampler: Sampler

    def is_due(self, step: int) -> bool:
        """Whether the problems are due with the weights of this step."""
        every = self.config.evaluation.every_steps
        due = every and (step % every == 0 or step == self.config.training.num_steps)
        return bool(due and self.problems)

    def evaluate(self, step: int, clock: Clock) -> Evaluation | None:
        """One greedy response per problem, in a call of its own; None if not due."""
        if not self.is_due(step):
            return None
        asked = sampled_problems(self.problems, self.config.rollout.max_prompt_tokens)
        requests = [
            SampleRequest(
                sample_id=f"eval/{step}/{index}/0",
                group_id=index,
                sample_index=0,
                prompt_ids=problem.prompt_ids,
                seed=stream_seed(self.config.seed, EVALUATION, step, index, 0),
            )
            for index, problem in asked.items()
        ]
        with clock("evaluate"):
            scored = self.sampler.sample(
                requests,
                {index: problem.answer for index, problem in asked.items()},
                temperature=0.0,
                measured=self.config.evaluation.metrics,
                arrived=counter(clock, "evaluate", len(requests)),
            )
        benchmarks = [self.problems[item.rollout.group_id].data_source for item in scored]
        scalars: dict[str, float] = {}
        sizes = collections.Counter(problem.data_source for problem in self.problems)
        for benchmark, num_problems in sizes.items():
            of_it = [item for item, name in zip(scored, benchmarks) if name == benchmark]
            scalars |= greedy_scalars(
                benchmark, [s.rollout for s in of_it], [s.verdict for s in of_it], num_problems
            )
            if self.config.evaluation.metrics and of_it:
                prefix = f"eval/{benchmark}/metrics"
                scalars |= metric_scalars(of_it, prefix)
                over_all = self.sampler.measurer.submit_batch([s.mean_state for s in of_it])
                scalars |= {f"{prefix}/{name}": value for name, value in over_all.result().items()}
        return Evaluation(scalars, scored, benchmarks)
