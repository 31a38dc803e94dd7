"""maj@k: the accuracy of the answer that most of k sampled responses give."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import log_factorials, plan, sizes_above_one
from semrl_jax.evaluation.samples import Sample
from semrl_jax.rewards.grading.text import answer_class

__all__ = ["per_problem", "plan"]


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """`maj@<k>` in [0, 1] for each of `sizes_above_one`: the mean over all subsets of k."""
    votes = [votes_of(samples) for samples in problems]
    return {
        f"maj@{k}": PerProblem(
            np.array([majority_accuracy(found, len(s), k) for found, s in zip(votes, problems)]),
            with_error=True,
        )
        for k in sizes_above_one(problems, options)
    }


def votes_of(samples: Sequence[Sample]) -> tuple[tuple[int, float], ...]:
    """(votes, share of them that is correct) of each answer, sorted; "0.5" and "1/2" are two."""
    classes: dict[str, list[bool]] = {}
    for sample in samples:
        if answer := answer_class(sample.extracted):
            classes.setdefault(answer, []).append(sample.correct)
    return tuple(sorted((len(found), float(np.mean(found))) for found in classes.values()))


@functools.lru_cache(maxsize=65536)  # easy and hard problems have few different votes
def majority_accuracy(votes: tuple[tuple[int, float], ...], n: int, k: int) -> float:
    """Expected accuracy of the majority vote of k of n samples, drawn without replacement.

    Answers with equally many votes share the vote equally. Without a vote it is wrong. The result
    is exact for every k: for each number m of votes of the winner, a recursion over the answers
    sums the probabilities of how many votes are drawn and how many answers have m of them.
    """
    if not any(accuracy for _, accuracy in votes):
        return 0.0
    if k == n:
        most = max(count for count, _ in votes)
        return float(np.mean([accuracy for count, accuracy in votes if count == most]))
    logs = log_factorials(n)
    total = 0.0
    for most in range(1, min(k, max(count for count, _ in votes)) + 1):
        num_tied = min(k // most, len(votes))
        # [votes drawn, tied answers]: the probability, and the same times the sum of accuracies.
        ways = np.zeros((k + 1, num_tied + 1))
        ways[0, 0] = 1.0
        sums = np.zeros_like(ways)
        left = n
        for count, accuracy in votes:
            drawn = _draws(count, left, k, min(count, most), logs)
            next_ways, next_sums = np.zeros_like(ways), np.zeros_like(ways)
            for i in range(min(count, most) + 1):
                kept = slice(0, k + 1 - i)
                p = drawn[kept, i, None]
                if i < most:
                    next_ways[i:] += p * ways[kept]
                    next_sums[i:] += p * sums[kept]
                else:
                    next_ways[i:, 1:] += p * ways[kept, :-1]
                    next_sums[i:, 1:] += p * (sums[kept, :-1] + accuracy * ways[kept, :-1])
            ways, sums, left = next_ways, next_sums, left - count
        # The rest of the subset are samples that do not vote.
        total += float(np.sum(sums[:, 1:] / np.arange(1, num_tied + 1)))
    return total


def _draws(count: int, left: int, k: int, largest: int, logs: np.ndarray) -> np.ndarray:
    """[j, i]: probability that i of `count` samples are among the k - j drawn from `left`."""
    drawn, i = np.arange(k + 1)[:, None], np.arange(largest + 1)[None]
    wanted = k - drawn
    possible = (i <= wanted) & (wanted - i <= left - count) & (wanted <= left)

    def log_choose(n, r):
        r = np.clip(r, 0, n)
        return logs[n] - logs[r] - logs[n - r]

    log_p = log_choose(count, i) + log_choose(left - count, wanted - i) - log_choose(left, wanted)
    return np.where(possible, np.exp(np.where(possible, log_p, 0.0)), 0.0)
