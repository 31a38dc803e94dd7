"""Prompt datasets: order and position, length filter, files good and bad."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.data import (
    PromptDataset,
    PromptExample,
    arithmetic_held_out_prompts,
    arithmetic_prompts,
    build_dataset,
    load_prompts,
    next_prompts,
    prompt_order,
)
from semrl_jax.errors import UserError


def numbered(size):
    ids = np.zeros(1, np.int32)
    return PromptDataset(tuple(PromptExample("", ids, "", "", i) for i in range(size)))


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_reads_on_across_epochs():
    dataset = numbered(5)
    first, second = prompt_order(5, 7, 0).tolist(), prompt_order(5, 7, 1).tolist()
    prompts, position = next_prompts(dataset, 7, (0, 0), 3)
    assert (indices(prompts), position) == (first[:3], (0, 3))
    prompts, position = next_prompts(dataset, 7, position, 4)
    assert (indices(prompts), position) == (first[3:] + second[:2], (1, 2))
    prompts, position = next_prompts(dataset, 7, position, 3)
    assert (indices(prompts), position) == (second[2:], (2, 0))
    assert next_prompts(dataset, 7, (0, 5), 0)[1] == (1, 0)
    assert all(type(number) is int for number in position)


def test_order_depends_on_seed_and_epoch_only():
    orders = {tuple(prompt_order(20, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert all(sorted(order) == list(range(20)) for order in orders)
    # Written down: a change of the order would silently change every run that is resumed.
    assert prompt_order(8, 0, 0).tolist() == [3, 2, 6, 7, 5, 0, 4, 1]
    assert prompt_order(8, 3, 1).tolist() == RECORDED_ORDER


RECORDED_ORDER = [5, 6, 4, 2, 0, 3, 1, 7]


@given(
    size=st.integers(1, 12),
    counts=st.lists(st.integers(0, 30), max_size=6),
    seed=st.integers(0, 2**31 - 1),
)
def test_steps_of_any_size_read_the_same_sequence(size, counts, seed):
    dataset = numbered(size)
    whole, end = next_prompts(dataset, seed, (0, 0), sum(counts))
    parts, position = [], (0, 0)
    for count in counts:
        prompts, position = next_prompts(dataset, seed, position, count)
        parts += prompts
    assert indices(parts) == indices(whole)
    assert position == end == divmod(sum(counts), size)
    for epoch in range(len(whole) // size):
        assert sorted(indices(whole)[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_impossible_positions_are_refused():
    for position in [(-1, 0), (0, -1), (0, 6)]:
        with pytest.raises(ValueError, match="does not fit a dataset of 5 prompts"):
            next_prompts(numbered(5), 0, position, 1)
    with pytest.raises(ValueError, match="count -1"):
        next_prompts(numbered(5), 0, (0, 0), -1)
    with pytest.raises(ValueError, match="empty"):
        next_prompts(numbered(0), 0, (0, 0), 1)


def test_long_prompts_are_left_out_and_counted(tokenizer):
    rows = [("1" * n, str(n)) for n in (3, 4, 2, 9, 3)]
    dataset = build_dataset(rows, tokenizer, data_source="x", max_prompt_tokens=3)
    assert [(e.index, e.answer) for e in dataset.examples] == [(0, "3"), (2, "2"), (4, "3")]
    assert len(dataset) == 3 and dataset.num_too_long == 2
    assert all(e.data_source == "x" for e in dataset.examples)
    np.testing.assert_array_equal(dataset.examples[1].prompt_ids, [3, 3])
    assert dataset.examples[1].prompt_ids.dtype == np.int32
    with pytest.raises(
        UserError, match=r"none of its 5 prompts has at most data.max_prompt_tokens=1"
    ):
        build_dataset(rows, tokenizer, data_source="x", max_prompt_tokens=1)
    with pytest.raises(UserError, match="1 prompts have no token"):
        build_dataset([("1", "1"), ("é", "1")], tokenizer, data_source="x", max_prompt_tokens=3)


def test_special_tokens_are_added_only_if_asked():
    class Adding:
        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[9] * add_special_tokens + [1]] * len(texts)}

    for add, expected in [(False, [1]), (True, [9, 1])]:
        dataset = build_dataset(
            [("a", "b")],
            Adding(),
            data_source="x",
            max_prompt_tokens=3,
            add_special_tokens=add,
        )
        np.testing.assert_array_equal(dataset.examples[0].prompt_ids, expected)


def test_arithmetic_prompts(tokenizer):
    train = arithmetic_prompts(tokenizer, seed=0, size=300)
    test = arithmetic_held_out_prompts(tokenizer)
    assert (len(train), len(test), train.num_too_long) == (300, 512, 0)
    assert not {e.prompt for e in train.examples} & {e.prompt for e in test.examples}
    for example in (*train.examples, *test.examples):
        question = example.prompt.removeprefix("Q:").removesuffix("\nA:")
        assert example.answer == str(eval(question))
        assert example.prompt_ids.shape == (12,)
        assert tokenizer.decode(example.prompt_ids) == example.prompt
    assert len(arithmetic_held_out_prompts(tokenizer, 10)) == 10


ROWS = [
    {"q": "1+1=?", "meta": {"truth": "2"}, "messages": [{"content": "1+1"}], "a.b": 5},
    {"q": "{input}", "meta": {"truth": "3"}, "messages": [{"content": "2+1"}], "a.b": 27.0},
]


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_loads_files_by_field_paths(tokenizer, tmp_path, suffix):
    path = write(tmp_path / f"set{suffix}", ROWS)
    dataset = load_prompts(
        path, tokenizer, question_field="q", answer_field="meta.truth", template="Q:{input}\nA:"
    )
    assert [e.prompt for e in dataset.examples] == ["Q:1+1=?\nA:", "Q:{input}\nA:"]
    assert [e.answer for e in dataset.examples] == ["2", "3"]
    assert [(e.data_source, e.index) for e in dataset.examples] == [("set", 0), ("set", 1)]
    dataset = load_prompts(
        path,
        tokenizer,
        question_field="messages.0.content",
        answer_field="a.b",
        data_source="other",
        max_prompt_tokens=3,
    )
    assert [e.prompt for e in dataset.examples] == ["1+1", "2+1"]
    assert [e.answer for e in dataset.examples] == ["5", "27"]
    assert dataset.examples[0].data_source == "other"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"line 3: not valid JSON"),
        (b'{"question": "\xff"}', r"line 3: not valid JSON"),
        (b"[" * 100_000, r"line 3: not valid JSON"),
        (b"[1]", r"line 3: must be a JSON object, not list"),
        (b'{"answer": "1"}', r"line 3: field 'question' is missing; the row has \['answer'\]"),
        (b'{"question": "1"}', r"line 3: field 'answer' is missing"),
        (b'{"question": 1, "answer": "1"}', r"line 3: field 'question' must be text, not 1"),
        (b'{"question": " ", "answer": "1"}', r"line 3: field 'question' must be text"),
        (b'{"question": "1", "answer": ""}', r"line 3: field 'answer' must be text or a finite"),
        (b'{"question": "1", "answer": null}', r"line 3: field 'answer' .* not None"),
        (b'{"question": "1", "answer": true}', r"line 3: field 'answer' .* not True"),
        (b'{"question": "1", "answer": NaN}', r"line 3: field 'answer' .* not nan"),
        (b'{"question": "1", "answer": ["1"]}', r"line 3: field 'answer' .* not \['1'\]"),
    ],
)
def test_bad_row_names_file_line_and_field(tokenizer, tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"question": "1", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl, {message}") as caught:
        load_prompts(path, tokenizer)
    assert "\n" not in str(caught.value)


def test_bad_files_are_the_users_error(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"absent\.jsonl' does not exist"):
        load_prompts(tmp_path / "absent.jsonl", tokenizer)
    (tmp_path / "set.csv").touch()
    with pytest.raises(UserError, match=r"must end in \.jsonl or \.parquet"):
        load_prompts(tmp_path / "set.csv", tokenizer)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="has no rows"):
        load_prompts(tmp_path / "empty.jsonl", tokenizer)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"torn\.parquet: not a readable Parquet file") as caught:
        load_prompts(tmp_path / "torn.parquet", tokenizer)
    assert "\n" not in str(caught.value)
    path = write(tmp_path / "rows.parquet", [{"question": "1", "answer": "1"}, {"question": "1"}])
    with pytest.raises(UserError, match=r"rows\.parquet, row 2: field 'answer' .* not None"):
        load_prompts(path, tokenizer)


def test_unknown_template_names_the_known_ones(tokenizer, tmp_path):
    path = write(tmp_path / "set.jsonl", [{"question": "1", "answer": "1"}])
    with pytest.raises(
        UserError, match=r"'abell' is unknown; choose from \['abel', 'plain', 'qwen"
    ):
        load_prompts(path, tokenizer, template="abell")
