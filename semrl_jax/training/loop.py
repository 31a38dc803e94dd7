"""The training loop: the algorithm and nothing else."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from jaxtyping import Array

from semrl_jax.algorithms.credit import assign_credit
from semrl_jax.choices import TOKEN_INDICATORS
from semrl_jax.clock import Clock
from semrl_jax.evaluation.evaluator import Evaluation, Evaluator
from semrl_jax.sampling.rewards import group_rewards, unshuffled_rewards
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.sampling.statistics import batch_scalars, metric_arrays, staleness
from semrl_jax.settings.rollout import num_parts
from semrl_jax.training.group_indicators import group_indicators
from semrl_jax.training.importance import importance_scalars
from semrl_jax.training.learner import Learner
from semrl_jax.training.plan import PassNeeds, credit_rules
from semrl_jax.training.rollout_batch import credited_tokens
from semrl_jax.training.state import DataPosition, TrainState
from semrl_jax.training.token_indicators import token_indicators


class StepResult(NamedTuple):
    """What one step leaves.

    Attributes:
      step: the number of the row of the log. Its weights sampled the responses, or those of
        `rollout.max_staleness` steps before.
      state: after the update.
      evaluation: of the weights before the update; None if none was due.
      scored: the responses trained on; none in the last result, which is an evaluation alone.
      scalars: of the batch, the shaping and the update.
      clock: of the step, still running.
    """

    step: int
    state: TrainState
    evaluation: Evaluation | None
    scored: list[ScoredRollout]
    scalars: dict[str, float]
    clock: Clock


def run_steps(
    config: ml_collections.ConfigDict,
    sampler: Sampler,
    evaluator: Evaluator,
    learner: Learner,
    state: TrainState,
    say: Callable[[str], None] = lambda phase: None,
) -> Iterator[StepResult]:
    """Trains from `state` to the last step; yields after every step.

    The evaluation of step s comes before its update: row s of the log belongs to the weights that
    step s samples with, and the last row holds the evaluation of the trained weights alone.
    """
    indicators = tracked_indicators(config)
    rules = credit_rules(learner.algorithm, config, learner.plan)
    for step in range(int(state.step), config.training.num_steps):
        clock = Clock(say)
        with clock("sync_weights"):
            offered = learner.sampling_weights(state)
            sampler.offer(tuple(map(learner.whole, offered)), step)
        evaluation = evaluator.evaluate(step, clock)
        scored, position, scalars = sampler.next(
            step, state.position, clock, functools.partial(unshuffled_rewards, config=config)
        )
        batch = learner.batch([item.rollout for item in scored])
        if learner.reward_model is not None:
            with clock("reward_model"):
                scored = learner.reward_model.judged(scored, batch)
        rewards = group_rewards(scored, config, step)
        passes = learner.passes(
            state,
            batch,
            clock,
            PassNeeds(
                entropies=bool(indicators),
                states=sampler.compares(step) or learner.measures_drift(step),
            ),
        )
        if passes.old is not None:
            logprobs, _, states = passes.old
            scalars |= sampler.mismatch(scored, np.asarray(logprobs), states, step)
            if learner.measures_drift(step):
                with clock("drift"):
                    scalars |= learner.drift(batch, states)
            with clock("metrics"):
                found = token_indicators(indicators, passes.old, batch.response_mask)
                scored = sampler.measured(scored, found, states)
        scored, of_groups = group_indicators(
            config.metrics.of_groups, scored, config.metrics.layers
        )
        over_batch = sampler.measure_batch(scored)
        with clock("advantages"):
            tokens = credited_tokens(batch, [item.rollout for item in scored])
            credit = assign_credit(
                rules, rewards, metric_arrays(scored), passes.arrays(), tokens, state.memory
            )
            scalars |= floats(credit.scalars)
        # The last moment at which the state before this step still exists.
        sampler.check_stop()
        with clock("update"):
            state, losses, logprobs = learner.update(state, batch, passes, credit)
        mask = batch.response_mask
        if passes.old is not None:
            logprobs = passes.old.logprobs
        elif logprobs is not None:
            mask = np.asarray(credit.response_mask)
            kept = mask.any(axis=1)  # all but those that a batch rule left out
            if kept.any():
                own = list(itertools.compress(scored, kept))
                scalars |= sampler.mismatch(own, logprobs[kept], None, step)
        if learner.plan.importance and logprobs is not None and mask.any():
            arrays = (logprobs, batch.rollout_logprobs, mask)
            scalars |= floats(importance_scalars(*arrays, options=learner.plan.importance))
        state = state._replace(
            **credit.memory._asdict(),
            position=DataPosition(*position),
            step=state.step + 1,
            earlier=offered[1:],
        )
        scalars |= staleness(scored, step, by_token=num_parts(config.rollout) > 1)
        scalars |= batch_scalars(scored, rewards) | losses
        of_sets = over_batch.result() | of_groups
        scalars |= {f"metrics/{name}": value for name, value in of_sets.items()}
        scalars |= sampler.counters() | sampler.replica_figures()
        yield StepResult(step, state, evaluation, scored, scalars, clock)
    step = config.training.num_steps
    if evaluator.is_due(step):
        say("last evaluation")
        clock = Clock(say)
        sampler.offer(tuple(map(learner.whole, learner.sampling_weights(state))), step)
        evaluation = evaluator.evaluate(step, clock)
        yield StepResult(step, state, evaluation, [], {}, clock)


def floats(scalars: Mapping[str, Array]) -> dict[str, float]:
    """For the log, in one transfer."""
    return {name: float(value) for name, value in jax.device_get(scalars).items()}


def tracked_indicators(config: ml_collections.ConfigDict) -> tuple[str, ...]:
    """What the shaping takes from the tokens of the policy's own pass."""
    shaping = config.shaping
    tracked = {*shaping.indicators, shaping.guidance} if shaping.target != "none" else set()
    return tuple(name for name in TOKEN_INDICATORS if name in tracked)
