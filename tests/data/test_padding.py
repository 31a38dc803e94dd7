"""Padding by hand, and as a property: the tokens can be read back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.data import pad_response_values, pad_rows
from tests.cases import raised

PROMPTS = [np.array(ids, np.int32) for ids in ([5, 6], [7], [])]
RESPONSES = [np.array(ids, np.int32) for ids in ([1], [2, 3, 4], [])]


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    rows = pad_rows(PROMPTS, RESPONSES, prompt_length=2, response_length=4, pad_id=9)
    assert rows.token_ids.tolist() == [[5, 6, 1, 9, 9, 9], [9, 7, 2, 3, 4, 9], [9] * 6]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0] * 6]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 0, 0], [0, 0, 1, 2, 3, 0], [0] * 6]
    for array in (rows.token_ids, rows.segment_ids, rows.positions):
        assert array.dtype == np.int32


token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(pairs=st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=5))
def test_rows_can_be_read_back(pairs):
    prompts = [np.array(prompt, np.int32) for prompt, _ in pairs]
    responses = [np.array(response, np.int32) for _, response in pairs]
    rows = pad_rows(prompts, responses, prompt_length=6, response_length=7, pad_id=0)
    for i in range(len(pairs)):
        valid = rows.segment_ids[i] == 1
        columns = np.flatnonzero(valid)
        assert valid[:6].sum() == len(prompts[i]) and valid[6:].sum() == len(responses[i])
        expected = np.concatenate([prompts[i], responses[i]])
        np.testing.assert_array_equal(rows.token_ids[i][valid], expected)
        np.testing.assert_array_equal(rows.positions[i][valid], np.arange(len(expected)))
        np.testing.assert_array_equal(
            columns, np.arange(6 - len(prompts[i]), 6 + len(responses[i]))
        )
        assert not rows.positions[i][~valid].any() and not rows.token_ids[i][~valid].any()


def test_response_values():
    values = [np.array([-0.5, -1.5], np.float32), np.array([], np.float32)]
    padded = pad_response_values(values, 3)
    assert padded.tolist() == [[-0.5, -1.5, 0.0], [0.0, 0.0, 0.0]]
    assert padded.dtype == np.float32


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 tokens do not fit into a length of 1"):
        pad_rows(PROMPTS, RESPONSES, prompt_length=1, response_length=4, pad_id=0)
    with pytest.raises(ValueError, match="3 tokens do not fit into a length of 2"):
        pad_rows(PROMPTS, RESPONSES, prompt_length=2, response_length=2, pad_id=0)
    raised(ValueError, "2 tokens do not fit", pad_response_values, [np.zeros(2, np.float32)], 1)
    with pytest.raises(ValueError, match="3 prompts and 2 responses do not pair"):
        pad_rows(PROMPTS, RESPONSES[:2], prompt_length=2, response_length=4, pad_id=0)
