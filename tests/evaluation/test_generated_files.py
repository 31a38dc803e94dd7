"""Tables, hidden states and conversations of generated responses."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from semrl_jax import data
from semrl_jax.evaluation import generated_files as files
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import response_files
from semrl_jax.types import HiddenStateParams
from tests.fixtures import make_scored

PROMPTS = [
    data.PromptExample("Q: 1", np.array([3, 4], np.int32), "7", "set", 5, '{"k": 1}', "1"),
    data.PromptExample("Q: 2", np.array([3, 4], np.int32), "", "set", 9, '{"k": 2}', "2"),
]

RANK = {MetricKey("rank"): Measurement(2.5, True)}


def changed(item, **fields):
    return dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, **fields))


def table_of(items, **options):
    options = {"with_logprobs": False, "is_graded": False} | options
    return files.response_table(Scored.of(items), PROMPTS, **options)


def test_rows_have_prompt_response_and_what_was_asked_for():
    items = [make_scored(i, group_size=2, score=float(i), extracted="7") for i in range(4)]
    items[0] = changed(items[0], rollout_raw_logprobs=np.array([-3, -4], np.float32))
    mask = np.array([True, False])
    items[3] = changed(items[3], metrics=RANK, response_mask=mask)
    items[2] = changed(items[2], metrics={MetricKey("rank"): Measurement(0.0, False)})
    rows = table_of(items, with_logprobs=True, is_graded=True).to_pylist()
    assert [(r["group_id"], r["sample_index"]) for r in rows] == [(5, 0), (5, 1), (9, 0), (9, 1)]
    assert [r["reference"] for r in rows] == ["7", "7", None, None]
    assert rows[0] | rows[1] == rows[0] | {
        "group_id": 5, "sample_index": 1, "benchmark": "set", "question": "1",
        "prompt": "Q: 1", "reference": "7", "row": '{"k": 1}', "response": "text",
        "finish_reason": "eos", "num_tokens": 2, "mean_logprob": -1.5, "prompt_ids": [3, 4],
        "response_ids": [5, 1], "rollout_logprobs": [-1, -2], "rollout_raw_logprobs": None,
        "extracted": "7", "correct": True, "score": 1.0, "boxed": True, "verifier_error": "",
    } | {"metrics/rank": rows[1]["metrics/rank"]}  # fmt: skip
    assert rows[0]["rollout_raw_logprobs"] == [-3, -4]
    assert np.isnan([r["metrics/rank"] for r in rows[:3]]).all() and rows[3]["metrics/rank"] == 2.5
    assert (rows[3]["num_tokens"], rows[3]["mean_logprob"]) == (1, -1.0)  # context does not count
    plain = set(table_of(items).column_names)
    assert not plain & {"rollout_logprobs", "rollout_raw_logprobs", "correct", "score"}


def test_parts_are_joined_also_if_one_lacks_a_column(tmp_path):
    measured = changed(make_scored(0), metrics=RANK)
    parts = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    response_files.write(parts[0], table_of([make_scored(0)]))
    response_files.write(parts[1], table_of([measured]))
    response_files.join(parts, tmp_path / "all.parquet")
    assert pq.read_table(tmp_path / "all.parquet")["metrics/rank"].to_pylist() == [None, 2.5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_the_layers_asked_for_are_in_the_shards(tmp_path, dtype):
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    random = np.random.default_rng(0)
    items = [
        changed(
            make_scored(i, group_size=2),
            hidden_states=random.normal(size=(2, 3, 4)).astype(kind),
            prompt_states=random.normal(size=(2, 3, 4)).astype(kind),
            layers=(-1, 3, 1),  # layer 3 is only measured
        )
        for i in range(3)
    ]
    asked = HiddenStateParams((1, -1), dtype, ("decode", "prefill"))
    parts = [tmp_path / f"{n}.parquet" for n in range(2)]
    for number, of_call in enumerate((items[:1], items[1:])):
        with open(tmp_path / files.shard_name(number, 2), "wb") as out:
            files.write_states(out, of_call, PROMPTS, asked)
        response_files.write(parts[number], table_of(of_call))
    files.write_states_index(tmp_path, parts, asked)
    index = json.loads((tmp_path / files.STATES_INDEX).read_text())
    assert index["metadata"]["layers"] == [1, -1]
    expected = {
        "5/0/decode": items[0].rollout.hidden_states,
        "5/prefill": items[0].rollout.prompt_states,
        "5/1/decode": items[1].rollout.hidden_states,
        "9/0/decode": items[2].rollout.hidden_states,
        "9/prefill": items[2].rollout.prompt_states,
    }
    assert index["weight_map"].keys() == expected.keys()
    for name, states in expected.items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as shard:
            found = shard.get_tensor(name)
        assert found.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(found.float().numpy(), states[:, [2, 0]].astype(np.float32))


@pytest.mark.parametrize("only_correct", [False, True])
def test_conversations_have_the_finished_responses(tmp_path, only_correct):
    items = [
        make_scored(0, score=1.0, response="right"),
        make_scored(1, score=0.0, response="wrong"),
        make_scored(2, score=1.0, response="half", finish_reason="length"),
        make_scored(3, score=1.0, response=" ", finish_reason="stop"),
    ]
    response_files.write(tmp_path / files.RESPONSES, table_of(items, is_graded=True))
    counts = files.write_conversations(
        tmp_path, only_correct=only_correct, system_prompt="Be é.", template="chat:{input} Why?"
    )
    rows = [json.loads(row) for row in (tmp_path / files.CONVERSATIONS).read_text().splitlines()]
    assert counts == (len(rows), 2)
    assert [row["completion"] for row in rows] == ["right"] + ["wrong"] * (not only_correct)
    assert rows[0] == {
        "messages": [
            {"role": "system", "content": "Be é."},
            {"role": "user", "content": "1 Why?"},
            {"role": "assistant", "content": "right"},
        ],
        "prompt": "Q: 1", "completion": "right", "group_id": 5, "sample_index": 0,
    }  # fmt: skip


def test_conversations_can_be_trained_on(tmp_path, tokenizer):
    items = [make_scored(i, response=f"1+{i}") for i in range(2)]
    response_files.write(tmp_path / files.RESPONSES, table_of(items))
    files.write_conversations(tmp_path, only_correct=False, system_prompt="", template="plain")
    reader = data.conversation_reader(tokenizer, row_format="prompt_completion")
    loaded = data.load_conversations([tmp_path / files.CONVERSATIONS], tokenizer, reader)
    texts = [tokenizer.decode(c.token_ids[c.loss_mask]) for c in loaded.conversations]
    assert texts == [f"1+{i}{tokenizer.eos_token}" for i in range(2)]


@pytest.fixture(scope="module")
def tokenizer():
    return data.character_tokenizer()
