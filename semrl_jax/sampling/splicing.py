"""Rollouts that are put together from several answers of the policy, or cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt

from semrl_jax import data
from semrl_jax.types import FinishReason, Rollout, VersionSpan

_PER_TOKEN = (
    "response_ids", "rollout_logprobs", "rollout_raw_logprobs", "hidden_states", "entropies",
)  # fmt: skip


def joined(before: Rollout, part: Rollout) -> Rollout:
    """A response and its next part, sampled after it, as one response."""
    length = len(before.response_ids)

    def both(name: str) -> Shaped[np.ndarray, "T ..."] | None:
        values = getattr(before, name), getattr(part, name)
        # One engine sends raw log-probabilities, and another one does not.
        return None if any(value is None for value in values) else np.concatenate(values)

    moved = [VersionSpan(s.version, s.start + length, s.end + length) for s in part.versions]
    spans = list(before.versions)
    for span in moved:
        if spans and spans[-1].version == span.version:
            span = VersionSpan(span.version, spans.pop().start, span.end)
        spans.append(span)
    return dataclasses.replace(
        part,
        prompt_ids=before.prompt_ids,
        **{name: both(name) for name in (*_PER_TOKEN, "response_mask")},
        routed_experts=_routed(before, part),
        versions=tuple(spans),
        generate_s=before.generate_s + part.generate_s,
    )


def _routed(before: Rollout, part: Rollout) -> UInt[np.ndarray, "_ M C"] | None:
    """The experts that were known before, and then the part's for the tokens after them.

    A part that does not go on with all tokens before it is another conversation, whose experts are
    left out, as are all after them.
    """
    known, more = before.routed_experts, part.routed_experts
    if known is None or more is None:
        return known
    goes_on = len(part.prompt_ids) == len(before.prompt_ids) + len(before.response_ids)
    return np.concatenate([known, more[len(known) :]]) if goes_on else known


def with_context(before: Rollout, token_ids: Int[np.ndarray, " n"]) -> Rollout:
    """A response, and after it tokens that others wrote; they belong to its last version."""
    context = dataclasses.replace(
        before,
        response_ids=np.asarray(token_ids, np.int32),
        routed_experts=None,
        versions=(VersionSpan(before.versions[-1].version, 0, len(token_ids)),),
        generate_s=0.0,
        **_unsampled(before, len(token_ids), before.hidden_states),
    )
    return joined(before, context)


def as_context(prefix: Rollout, states: Float[np.ndarray, "_ L D"] | None) -> Rollout:
    """A prefix as tokens that another response has sampled; `states` are of what follows it."""
    return dataclasses.replace(prefix, **_unsampled(prefix, len(prefix.response_ids), states))


def _unsampled(
    rollout: Rollout, count: int, states: Float[np.ndarray, "_ L D"] | None
) -> dict[str, Any]:
    """Fields of `count` tokens that the policy did not sample; states are zeros like `states`."""
    nothing = np.zeros(count, np.float32)
    if states is not None:
        states = np.zeros((count, *states.shape[1:]), states.dtype)
    return {
        "rollout_logprobs": nothing,
        "rollout_raw_logprobs": None if rollout.rollout_raw_logprobs is None else nothing,
        "response_mask": np.zeros(count, bool),
        "hidden_states": states,
        "entropies": None,
    }


def stopped(rollout: Rollout, tokens: data.TokenBytes, stop_strings: Sequence[str]) -> Rollout:
    """The response, ended at its first stop string, which may span its parts."""
    count = data.StopMatcher(tokens, stop_strings).feed(rollout.response_ids.tolist())
    return rollout if count is None else cut(rollout, count, "stop")


def cut(rollout: Rollout, count: int, reason: FinishReason) -> Rollout:
    """The first `count` tokens, which end for this reason unless the last has one of its own."""
    if count == len(rollout.response_ids) and rollout.finish_reason != "length":
        return rollout
    kept = {name: getattr(rollout, name) for name in (*_PER_TOKEN, "response_mask")}
    routed = rollout.routed_experts
    if routed is not None:
        routed = routed[: len(rollout.prompt_ids) + count - 1]
    spans = itertools.takewhile(lambda span: span.start < count, rollout.versions)
    return dataclasses.replace(
        rollout,
        **{name: None if array is None else array[:count] for name, array in kept.items()},
        routed_experts=routed,
        versions=tuple(VersionSpan(s.version, s.start, min(s.end, count)) for s in spans),
        finish_reason=reason,
    )
