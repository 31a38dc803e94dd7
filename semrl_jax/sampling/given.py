"""Given responses: the data has them, and they replace the last sampled responses of a group.

They are verified as the others are. The engine has no log-probabilities and no hidden states of
them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax.sampling.requests import Draw
from semrl_jax.sampling.scoring import Scored, num_sampled_tokens
from semrl_jax.types import GIVEN, Rollout


def with_given(
    scored: Scored,
    draw: Draw,
    rollout: ml_collections.ConfigDict,
    score: Callable[[Sequence[Rollout]], Scored],
) -> Scored:
    """The responses of a draw, in (group, sample) order, with those that are given.

    Args:
      scored: the sampled ones, in this order.
      rollout: the section of the config; `given_when` is the rule.
      score: verifies rollouts.
    """
    found = []
    groups = itertools.groupby(scored, key=lambda item: item.rollout.group_id)
    for group, items in ((group, list(items)) for group, items in groups):
        has_failed = not any(item.verdict.correct for item in items)
        if has_failed or rollout.given_when == "always":
            given = draw.given.get(group, ())
            first = rollout.group_size - len(given)
            prompt_ids = items[0].rollout.prompt_ids
            found += [_rollout(group, first + i, prompt_ids, ids) for i, ids in enumerate(given)]
    if not found:
        return scored
    given, replaced = score(found), {(each.group_id, each.sample_index) for each in found}
    if scored.mean_states is not None:
        shape = len(found), *scored.mean_states.shape[1:]
        given = dataclasses.replace(given, mean_states=np.full(shape, np.nan, np.float32))
    is_kept = np.array(
        [(item.rollout.group_id, item.rollout.sample_index) not in replaced for item in scored]
    )
    dropped = num_sampled_tokens(scored.take(np.flatnonzero(~is_kept)))
    found = Scored.joined([scored.take(np.flatnonzero(is_kept)), given]).in_order()
    return dataclasses.replace(found, num_dropped=dropped)


def _rollout(
    group: int, index: int, prompt_ids: Int[np.ndarray, " P"], ids: Int[np.ndarray, " T"]
) -> Rollout:
    return Rollout(
        sample_id=f"given/{group}/{index}",
        group_id=group,
        sample_index=index,
        prompt_ids=prompt_ids,
        response_ids=ids,
        rollout_logprobs=np.full(len(ids), np.nan, np.float32),
        rollout_raw_logprobs=None,
        finish_reason=GIVEN,
        versions=(),
    )
