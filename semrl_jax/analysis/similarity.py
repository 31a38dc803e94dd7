"""Repetition in a sequence, and similarity of sequences and of distributions; NumPy only.

A value that does not exist, such as the repetition of a response without an n-gram, is NaN.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

NGRAM = 4
CONFIDENT = 5  # the default of the reference implementation, trainer.confidence_metric_config.k
# Runs of letters and digits; each Chinese or Japanese ideograph is a word.
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
# Counts are raised by this, so that a token that one response lacks gives no infinite divergence.
SMOOTHING = 0.5


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def ngrams(sequence: Sequence[Hashable], size: int) -> Counter:
    """How often each n-gram occurs."""
    return Counter(zip(*(sequence[start:] for start in range(size))))


def repetition(sequences: Sequence[Sequence[Hashable]]) -> float:
    """1 - distinct / all n-grams within the sequences; no n-gram joins two of them."""
    found = sum((ngrams(sequence, NGRAM) for sequence in sequences), Counter())
    return 1 - len(found) / found.total() if found else math.nan


def rouge_n(first: Sequence[Hashable], second: Sequence[Hashable], size: int) -> float:
    """F1 of the n-grams that two sequences share, each counted as often as both have it.

    Source: Lin 2004, ROUGE; with one reference, F1 is symmetric.
    """
    a, b = ngrams(first, size), ngrams(second, size)
    return 2 * (a & b).total() / (a.total() + b.total()) if a and b else math.nan


def rouge_l(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """F1 of the longest common subsequence: 2 L / (length of first + of second)."""
    if not len(first) or not len(second):
        return math.nan
    return 2 * longest_common_subsequence(first, second) / (len(first) + len(second))


def longest_common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Its length. One operation on integers of len(first) bits per element of `second`.

    Source: Hyyro 2004, bit-parallel LCS; bit i of `open` is 0 if the subsequence grew at i.
    """
    places: dict[Hashable, int] = {}
    for index, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << index
    everything = (1 << len(first)) - 1
    still_open = everything
    for item in second:
        matches = still_open & places.get(item, 0)
        still_open = (still_open + matches | still_open - matches) & everything
    return len(first) - still_open.bit_count()


def count_entropy(counts: Mapping[Hashable, int]) -> float:
    """Shannon entropy of the relative frequencies, in nats."""
    p = np.array(list(counts.values()), float)
    p /= p.sum() if len(p) else 1.0
    return float(abs(np.sum(p * np.log(p)))) if len(p) else math.nan


def count_confidence(counts: Mapping[Hashable, int]) -> float:
    """Minus the mean log of the CONFIDENT largest relative frequencies, in nats.

    With fewer different items, it is the mean over all of them. A high value means that the items
    are spread, so it is the opposite of a confidence; the reference implementation calls it so.
    """
    p = np.array(sorted(counts.values(), reverse=True), float)
    return float(np.mean(-np.log(p / p.sum())[:CONFIDENT])) if len(p) else math.nan


def jensen_shannon(first: Mapping[Hashable, int], second: Mapping[Hashable, int]) -> float:
    """Jensen-Shannon divergence of relative frequencies, nats in [0, log 2]."""
    if not first or not second:
        return math.nan
    p, q = _frequencies(first, second, 0.0)
    middle = (p + q) / 2
    return max((_divergence(p, middle) + _divergence(q, middle)) / 2, 0.0)


def symmetric_kl(
    first: Mapping[Hashable, int], second: Mapping[Hashable, int], items: Sequence[Hashable]
) -> float:
    """Mean of KL(p || q) and KL(q || p) in nats, with 1/2 added to the count of each of `items`.

    The release adds 1e-20 to frequencies instead, so that its values mostly count the tokens that
    only one response has.
    """
    if not first or not second:
        return math.nan
    p, q = _frequencies(first, second, SMOOTHING, items)
    return max((_divergence(p, q) + _divergence(q, p)) / 2, 0.0)


def _frequencies(first, second, added: float, items=None) -> list[np.ndarray]:
    items = list(items if items is not None else {**first, **second})
    counts = [np.array([found.get(item, 0) + added for item in items]) for found in (first, second)]
    return [row / row.sum() for row in counts]


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    kept = p > 0
    return float(np.sum(p[kept] * np.log(p[kept] / q[kept])))
