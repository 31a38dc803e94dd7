"""Dynamic sampling: rounds of prompts until enough groups have unequal rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_collections
import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.data.prompts import Position
from semrl_jax.sampling.scoring import Scored, ScoredRollout, mean_of_sampled, num_sampled_tokens
from semrl_jax.sampling.source import Rounds, Sample
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError

Rewards = Callable[[Sequence[ScoredRollout]], Float[np.ndarray, "P G"]]


class TooFewGroups(UserError):
    """The allowed rounds gave fewer groups with unequal rewards than a step needs."""

    agreed = True  # every process counts the same responses, so every process raises it


@dataclasses.dataclass
class Selecting:
    """Batches of the next P prompts whose groups are kept, from one round or several.

    The position is then after the last of them: prompts whose groups were sampled but not needed
    come again in the next step.
    """

    config: ml_collections.ConfigDict
    rounds: Rounds  # samples the rounds
    rewards_of: Rewards  # rewards that decide which groups are kept

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        """See `Batches.next`. Raises TooFewGroups if the rounds do not give P groups."""
        count, rules = self.config.data.prompts_per_step, self.config.algorithms.batch_rules

        correct = []

        def sample_round(number: int, num_kept: int) -> Scored:
            what = f"sample round {number + 1}, {num_kept}/{count} groups kept,"
            scored = self.rounds.sample_round(step, number, position, clock, what)
            correct.append(self.rounds.correct(scored))
            return scored

        kept = sample_until_kept(
            sample_round,
            self.rewards_of,
            num_groups=count,
            max_rounds=rules.max_sampling_rounds,
            keep_by=rules.keep_groups_by,
        )
        num_prompts = kept.num_prompts
        if position.seen is not None:  # a curriculum draws again in place of unused prompts
            num_prompts = count * len(correct)
        after = self.rounds.after(position, num_prompts)
        return self.rounds.counted(Sample(kept.scored, after, kept.scalars), correct, position)


class Kept(NamedTuple):
    """The groups that a step trains on."""

    scored: Scored  # their responses, in (prompt, sample) order
    # Prompts up to and with the last kept group's; the rest of its round is unused.
    num_prompts: int
    # `rollout/...` counts, and `reward/..._sampled` over all groups of all rounds.
    scalars: dict[str, float]


def sample_until_kept(
    sample_round: Callable[[int, int], Scored],
    rewards_of: Rewards,
    *,
    num_groups: int,
    max_rounds: int,
    keep_by: str,
) -> Kept:
    """Samples rounds of prompts, and keeps the first `num_groups` groups with unequal rewards.

    A group of equal rewards has no advantage, so it takes part in a step without a gradient.

    Args:
      sample_round: the scored groups of a round, in the order of their prompts. It gets the number
        of the round, from 0, and the number of groups kept so far.
      rewards_of: float32 rewards, one row per group.
      max_rounds: above 0; TooFewGroups if they are used up.
      keep_by: "reward" keeps groups with unequal rewards, "correctness" those with correct and
        incorrect responses.

    Source: arXiv:2503.14476 (DAPO), Sec. 3.2, where a group is kept by 0 < correct responses < G.
    """
    kept: list[Scored] = []
    rewards, correct, differs, sampled = [], [], [], []  # a part per round
    num_tokens = 0
    while len(kept) < num_groups:
        if len(rewards) == max_rounds:
            raise TooFewGroups(
                _too_few(np.concatenate(differs), np.concatenate(correct), num_groups, max_rounds)
            )
        scored = sample_round(len(rewards), len(kept))
        rewards.append(rewards_of(scored))
        shape = rewards[-1].shape
        correct.append(np.array([item.verdict.correct for item in scored]).reshape(shape))
        deciding = rewards[-1] if keep_by == "reward" else correct[-1]
        differs.append((deciding != deciding[:, :1]).any(axis=1))
        sampled.append(np.array([not item.rollout.is_given for item in scored]).reshape(shape))
        num_tokens += num_sampled_tokens(scored)
        for group in np.flatnonzero(differs[-1])[: num_groups - len(kept)]:
            kept.append(scored[group * shape[1] : (group + 1) * shape[1]])
        del scored  # may hold hidden states: only kept responses stay while others are sampled
    differ, all_correct, is_sampled = map(np.concatenate, (differs, correct, sampled))
    num_prompts = int(np.flatnonzero(differ)[num_groups - 1]) + 1
    dropped = _equal_groups(differ[:num_prompts], all_correct[:num_prompts])
    scalars = {
        "rollout/sampling_rounds": len(rewards),
        "rollout/groups_sampled": len(differ),
        "rollout/groups_dropped": num_prompts - num_groups,
        "rollout/groups_dropped/all_correct": dropped[0],
        "rollout/groups_dropped/all_incorrect": dropped[1],
        "rollout/groups_unused": len(differ) - num_prompts,
        "rollout/num_sampled_tokens": num_tokens,
        "reward/mean_sampled": mean_of_sampled(np.concatenate(rewards), is_sampled),
        "reward/correct_sampled": mean_of_sampled(all_correct, is_sampled),
    }
    floats = {name: float(value) for name, value in scalars.items()}
    return Kept(Scored.joined(kept), num_prompts, floats)


def _equal_groups(differ: Bool[np.ndarray, " P"], correct: Bool[np.ndarray, "P G"]) -> list[int]:
    """How many of the groups that are not kept are all correct, and all incorrect."""
    return [int((~differ & same).sum()) for same in (correct.all(axis=1), ~correct.any(axis=1))]


def _too_few(
    differ: Bool[np.ndarray, " P"], correct: Bool[np.ndarray, "P G"], needed: int, rounds: int
) -> str:
    right, wrong = _equal_groups(differ, correct)
    hint = "an easier" if wrong > right else "a harder"
    return (
        f"algorithms.batch_rules.max_sampling_rounds={rounds} gave {differ.sum()} of the "
        f"data.prompts_per_step={needed} groups that a step must keep; of the {len(differ)} groups "
        f"sampled, {right} were all correct and {wrong} all wrong. Raise "
        "max_sampling_rounds to continue, or set it to 0 to train on all groups; or begin a run "
        f"with {hint} set of prompts, or a larger rollout.group_size."
    )
