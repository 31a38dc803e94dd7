"""Repetition, ROUGE and divergences, by hand and against loops."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.analysis import similarity

sequences = st.lists(st.integers(0, 4), max_size=40)


def lcs_by_table(a, b):
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best = max(table[i, j + 1], table[i + 1, j])
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else best
    return table[-1, -1]


@given(sequences, sequences)
def test_the_longest_common_subsequence_is_that_of_the_table(a, b):
    assert similarity.longest_common_subsequence(a, b) == lcs_by_table(a, b)


def test_rouge_by_hand():
    first, second = map(similarity.words, ("The cat sat on the mat.", "the cat on a mat"))
    # Shared words the, cat, on, mat: 2 * 4 / (6 + 5). Shared pairs: the cat. 2 / (5 + 4).
    assert similarity.rouge_n(first, second, 1) == pytest.approx(8 / 11)
    assert similarity.rouge_n(first, second, 2) == pytest.approx(2 / 9)
    assert similarity.rouge_l(first, second) == pytest.approx(8 / 11)  # the cat on mat
    assert similarity.rouge_n(["a"] * 4, ["a"], 1) == pytest.approx(2 / 5)  # counted once
    assert math.isnan(similarity.rouge_l([], first)) and math.isnan(
        similarity.rouge_n(["a"], first, 2)
    )


@given(sequences, sequences)
def test_similarities_are_symmetric_and_one_for_equals(a, b):
    for function in (similarity.rouge_l, lambda a, b: similarity.rouge_n(a, b, 2)):
        forth, back, same = function(a, b), function(b, a), function(a, a)
        np.testing.assert_equal(forth, back)
        assert math.isnan(same) or same == 1.0
        assert math.isnan(forth) or 0 <= forth <= 1


def test_words_of_several_scripts():
    assert similarity.words("It's 42, not_41: été!") == ["it", "s", "42", "not", "41", "été"]
    assert similarity.words("答案是 7") == ["答", "案", "是", "7"]


def test_repetition_joins_no_two_responses():
    assert similarity.repetition([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 - 4 / 5)
    # The release joins the responses, which makes 4-grams such as 3 4 1 2 of the two.
    assert similarity.repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.5
    assert math.isnan(similarity.repetition([[1, 2, 3], []]))


def test_equal_responses_have_no_divergence():
    """The release passes probabilities as log-probabilities: 43950 for 1000 equal words (D32)."""
    counts = Counter(range(1000))
    assert similarity.jensen_shannon(counts, counts) == 0.0
    assert similarity.symmetric_kl(counts, counts, list(counts)) == 0.0


def test_divergences_by_hand():
    a, b = Counter([1]), Counter([2])
    np.testing.assert_allclose(similarity.jensen_shannon(a, b), math.log(2))
    # With 1/2 each: (3/4, 1/4) and (1/4, 3/4), both ways 1/2 log 3.
    np.testing.assert_allclose(similarity.symmetric_kl(a, b, [1, 2]), math.log(3) / 2)
    np.testing.assert_allclose(similarity.count_entropy(Counter("aabb")), math.log(2))
    # The five largest of the counts 4, 3, 2, 1, 1, 1.
    expected = -np.mean(np.log(np.array([4, 3, 2, 1, 1]) / 12))
    np.testing.assert_allclose(similarity.count_confidence(Counter("aaaabbbccdef")), expected)
    np.testing.assert_allclose(similarity.count_confidence(Counter("aabb")), math.log(2))
    assert math.isnan(similarity.count_confidence(Counter()))
    assert math.isnan(similarity.jensen_shannon(a, Counter()))
    assert math.isnan(similarity.count_entropy(Counter()))


@given(sequences, sequences)
def test_jensen_shannon_is_bounded(a, b):
    value = similarity.jensen_shannon(Counter(a), Counter(b))
    # 1e-12: rounding of the sums.
    assert math.isnan(value) or 0 <= value <= math.log(2) + 1e-12
