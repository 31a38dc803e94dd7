"""Demonstrations as rows: which tokens are learned."""

import pytest

from semrl_jax.data import demonstration_rows
from semrl_jax.data.arithmetic import demonstration_texts


def test_rows_by_hand(tokenizer):
    rows = demonstration_rows(
        tokenizer, [("Q", "12"), ("QA", "3")], prompt_length=2, response_length=4
    )
    assert rows.token_ids.tolist() == [[0, 24, 3, 4, 1, 0], [24, 25, 5, 1, 0, 0]]
    assert rows.segment_ids.tolist() == [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert rows.positions.tolist() == [[0, 0, 1, 2, 3, 0], [0, 1, 2, 3, 0, 0]]
    assert rows.loss_mask.tolist() == [
        [False, False, True, True, True, False],
        [False, False, True, True, False, False],
    ]


def test_arithmetic_demonstrations_hold_the_texts(tokenizer):
    rows = demonstration_rows(tokenizer, demonstration_texts(1, 200))
    assert rows.token_ids.shape == (200, 65)
    for i, (prompt, response) in enumerate(demonstration_texts(1, 200)):
        valid, learned = rows.segment_ids[i] == 1, rows.loss_mask[i]
        assert tokenizer.decode(rows.token_ids[i][valid]) == prompt + response + "<eos>"
        assert tokenizer.decode(rows.token_ids[i][learned]) == response + "<eos>"
    assert rows.loss_mask.sum(1).max() == 53


def test_what_does_not_fit_is_refused(tokenizer):
    with pytest.raises(ValueError, match="do not fit"):
        demonstration_rows(tokenizer, [("Q", "12")], prompt_length=1, response_length=2)
    with pytest.raises(ValueError, match="no demonstrations"):
        demonstration_rows(tokenizer, [], prompt_length=1, response_length=2)
