"""Differences of rollout engine and training model: log-probabilities and hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.training.passes import PassNeeds
from semrl_jax.training.probes import Probe, Seen, Tools, is_due
from semrl_jax.types import Rollout, SamplingParams, distribution_of


def probe(tools: Tools) -> Probe:
    return Mismatch(tools)


@dataclasses.dataclass
class Mismatch(Probe):
    """`rollout/..._mismatch/{mean,max}`.

    A process compares the states of the responses for which it has both. Log-probabilities are
    compared where somebody computed them anyway.
    """

    tools: Tools

    def needs(self, step: int) -> PassNeeds:
        return PassNeeds(states=is_due(self.tools.config.hidden_states.compare_every, step))

    def after(self, seen: Seen) -> dict[str, float]:
        scalars = {}
        if seen.logprobs is not None and seen.counted.any():
            rows = np.flatnonzero(seen.counted.any(axis=1))
            scalars |= logprob_mismatch(
                [seen.scored[row].rollout for row in rows],
                np.asarray(seen.logprobs)[rows],
                SamplingParams(1, **distribution_of(self.tools.config.rollout)),
            )
        if self.needs(seen.step).states:
            own = state_differences(seen.scored, seen.tokens.states)
            scalars |= state_mismatch(self.tools.peers.gather("mismatch", own))
        return scalars


def logprob_mismatch(
    rollouts: Sequence[Rollout], old_logprobs: Float[np.ndarray, "B T"], sampling: SamplingParams
) -> dict[str, float]:
    """Absolute difference of the log-probabilities of engine and training model, in nats.

    The training model's log-probabilities are over the whole vocabulary at the temperature of
    `sampling`. With top-p, penalties and their like, the engine samples from another distribution.
    Then its raw log-probabilities are compared, which are of the model's own at temperature 1.
    Returns {} if the temperature is then not 1, or an engine sends no raw log-probabilities.

    The values of `old_logprobs` at padding and context may be anything.
    """
    differs = sampling.is_modified
    if differs and sampling.temperature != 1:
        return {}
    theirs = [r.rollout_raw_logprobs if differs else r.rollout_logprobs for r in rollouts]
    if any(logprobs is None for logprobs in theirs):
        return {}
    masks = [rollout.response_mask for rollout in rollouts]
    ours = [row[: len(mask)][mask] for row, mask in zip(old_logprobs, masks)]
    theirs = [logprobs[mask] for logprobs, mask in zip(theirs, masks)]
    difference = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    return {
        "rollout/logprob_mismatch/mean": float(difference.mean()),
        "rollout/logprob_mismatch/max": float(difference.max()),
    }


def state_differences(
    scored: Sequence[ScoredRollout], states: Mapping[int, Float[np.ndarray, "_ D"]]
) -> dict[str, float]:
    """Relative difference of the hidden states of engine and training model, per token.

    Returns `count`, `sum` and `max` of |ours - theirs| / |ours| over the tokens of the responses
    with hidden states; `states` are those that this process has, by index of the response.
    """
    relative = [np.zeros(0)]
    for index, row in states.items():
        rollout = scored[index].rollout
        if rollout.hidden_states is None:
            continue
        ours = row.astype(np.float32)
        theirs = rollout.policy_states(FINAL_LAYER).astype(np.float32)
        relative.append(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(ours, axis=1))
    values = np.concatenate(relative)
    total, largest = float(values.sum()), float(values.max(initial=0.0))
    return {"count": float(len(values)), "sum": total, "max": largest}


def state_mismatch(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`state_differences` of all processes as log scalars; {} if nothing was compared."""
    count = sum(part["count"] for part in parts)
    if not count:
        return {}
    return {
        "rollout/hidden_state_mismatch/mean": sum(part["sum"] for part in parts) / count,
        "rollout/hidden_state_mismatch/max": max(part["max"] for part in parts),
    }
