"""Which problems two policies solve at all, and where a gain of accuracy comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from semrl_jax.evaluation.repeated import correct_counts
from semrl_jax.evaluation.samples import Sample


class Support(NamedTuple):
    """Problems that a policy and the first one solve with at least one of n responses each.

    Chance decides about problems that are solved rarely: a policy loses some of them to another
    evaluation of itself, too.

    Sources: Wu et al., arXiv:2507.14843 (retention, discovery and net change are its SRR, NDR and
    NSCR); Nath et al., arXiv:2506.13923 (`gain_on_solved` is its self-distillation, and
    `gain_on_unsolved` its capability gain).
    """

    num_kept: int  # solved by both
    num_gained: int  # by this policy alone
    num_lost: int  # by the first policy alone
    num_unsolved: int
    retention: float | None  # kept / (kept + lost); None: there is none
    discovery: float | None  # gained / (kept + gained)
    net_change: float | None  # (gained - lost) / (kept + gained + lost)
    # Both sum to the difference of the mean accuracies. The first is over problems that the first
    # policy solves, the second over the others.
    gain_on_solved: float
    gain_on_unsolved: float
    gained: tuple[int, ...]  # `group_id` of these problems
    lost: tuple[int, ...]

    @property
    def sentence(self) -> str:
        return (
            f"solves {self.num_kept} problems that the first one solves, too, and loses "
            f"{self.num_lost}; gains {self.num_gained}; {self.num_unsolved} are solved by none. "
            f"Accuracy: {100 * self.gain_on_solved:+.1f} points from problems that the first one "
            f"solves, {100 * self.gain_on_unsolved:+.1f} from the others"
        )


def support(first: Sequence[Sequence[Sample]], other: Sequence[Sequence[Sample]]) -> Support | None:
    """Compares the samples of two policies, by problem; None if their numbers are not all equal."""
    sizes = {len(samples) for samples in (*first, *other)}
    if len(first) != len(other) or len(sizes) != 1:
        return None
    (n,), before, after = sizes, correct_counts(first), correct_counts(other)
    solved = before > 0
    gains = (after - before) / (n * len(before))
    kept = int((solved & (after > 0)).sum())
    ids = np.array([samples[0].group_id for samples in first])
    gained_ids = tuple(ids[~solved & (after > 0)].tolist())
    lost_ids = tuple(ids[solved & (after == 0)].tolist())
    gained, lost = len(gained_ids), len(lost_ids)

    def share(count: int, of: int) -> float | None:
        return count / of if of else None

    return Support(
        num_kept=kept,
        num_gained=gained,
        num_lost=lost,
        num_unsolved=len(before) - kept - gained - lost,
        retention=share(kept, kept + lost),
        discovery=share(gained, kept + gained),
        net_change=share(gained - lost, kept + gained + lost),
        gain_on_solved=math.fsum(gains[solved]),
        gain_on_unsolved=math.fsum(gains[~solved]),
        gained=gained_ids,
        lost=lost_ids,
    )
