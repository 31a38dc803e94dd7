"""The training loop: the algorithm and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import ml_collections

from semrl_jax.algorithms.credit import assign_credit
from semrl_jax.evaluation.evaluator import Evaluation, Evaluator
from semrl_jax.sampling.batch_rewards import group_rewards, span_rewards
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.scoring import Scored
from semrl_jax.sampling.source import Source
from semrl_jax.support.clock import Clock
from semrl_jax.training.learner import Learner
from semrl_jax.training.offload import drop
from semrl_jax.training.passes import credit_rules
from semrl_jax.training.probes import Probes, Seen
from semrl_jax.training.rollout_batch import credited_tokens
from semrl_jax.training.traces import Trace, traced
from semrl_jax.training.train_state import TrainState


class StepResult(NamedTuple):
    """What one step leaves."""

    step: int  # number of the row of the log; its weights are those that were offered to the source
    state: TrainState  # after the update
    evaluation: Evaluation | None  # of the weights before the update; None if none was due
    scored: Scored  # trained on; none in the last result, which is an evaluation alone
    scalars: dict[str, float]  # of the sampling, the batch, the shaping and the update
    clock: Clock  # of the step, still running
    trace: Trace | None = None  # None unless `logging.replay_every` asks for one


class Parts(NamedTuple):
    """What makes the steps of a run, apart from their state."""

    config: ml_collections.ConfigDict
    source: Source
    evaluator: Evaluator
    learner: Learner
    probes: Probes
    check_stop: Callable[[], None]  # raises Preempted in all processes if one was asked to end


def run_steps(
    parts: Parts, state: TrainState, say: Callable[[str], None] = lambda phase: None
) -> Iterator[StepResult]:
    """Offer weights, evaluate, sample, judge, pass, probe, give credit, update; yields every step.

    Row s of the log belongs to the weights that step s samples with. The last row holds the
    evaluation of the trained weights alone.
    """
    config, source, evaluator, learner, probes, check_stop = parts
    rules = credit_rules(learner.algorithm, config, learner.plan)
    num_steps = config.training.num_steps
    for step in range(int(state.step), num_steps + evaluator.is_due(num_steps)):
        clock = Clock(say)
        with clock("sync_weights"):
            offered = learner.sampling_weights(state)
            source.offer(tuple(map(learner.whole, offered)), step)
        evaluation = evaluator.evaluate(step, clock)
        if step == num_steps:
            yield StepResult(step, state, evaluation, Scored(()), {}, clock)
            return
        scored, position, sampled = source.next(step, state.prompts, clock)
        here, trained = learner.at_work(state, clock)
        batch = here.batch([item.rollout for item in scored])
        scored = here.judged(trained, scored, batch, clock)
        rewards = group_rewards(scored, config, step)
        of_spans = None
        if learner.algorithm.needs.turn_rewards or learner.algorithm.needs.spans:
            of_spans = span_rewards(scored, config, step)
        num_failed = sum(bool(item.verdict.error) for item in scored)
        learner.algorithm.check_rewards(rewards, of_spans, num_failed)
        passes = here.passes(trained, batch, clock, probes.needs(step))
        arrays = passes.arrays()
        seen = Seen(
            step,
            scored,
            batch,
            tokens=passes.old,
            reference_states=passes.reference_states,
            logprobs=arrays.old_logprobs,
            counted=batch.sampled_mask,
        )
        with clock("metrics"):
            seen = probes.before(seen)
        with clock("advantages"):
            tokens = credited_tokens(batch, scored, of_spans, learner.prompts_of(scored))
            metrics = seen.scored.metrics
            credit = assign_credit(rules, rewards, metrics, arrays, tokens, state.memory)
            # In one transfer.
            credited = {n: float(value) for n, value in jax.device_get(credit.scalars).items()}
        check_stop()  # the last moment at which the state before this step still exists
        drop(state, trained)
        trace = traced(here, trained, batch, passes, credit)
        with clock("update"):
            trained, losses, logprobs = here.update(trained, batch, passes, credit)
        state = trained.after(credit.memory, position, earlier=offered[1:])
        probed = probes.after(seen.updated(logprobs, credit.response_mask))
        scalars = probed | sampled | batch_scalars(seen.scored, rewards) | credited | losses
        if trace is not None:
            trace = trace.completed(state, rewards, logprobs, list(sampled))
        state, moved = learner.at_rest(state, here, clock)
        scalars |= moved
        yield StepResult(step, state, evaluation, seen.scored, scalars, clock, trace)
