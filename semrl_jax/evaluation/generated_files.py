"""Files of generated responses: a table, shards of hidden states, and conversations to train on."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from semrl_jax import data
from semrl_jax.data.templates import Format, chat_message, is_chat
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.support import response_files
from semrl_jax.support.response_files import KEYS, VERDICT
from semrl_jax.support.safe_files import replacing, write_json
from semrl_jax.support.tensor_files import write_tensors
from semrl_jax.types import HiddenStateParams

RESPONSES, STATES_INDEX, CONVERSATIONS = (
    "responses.parquet", "states.index.json", "conversations.jsonl",
)  # fmt: skip
FINISHED = ("eos", "stop")  # reasons of responses that a model may learn from


def response_table(
    items: Scored, prompts: Sequence[data.PromptExample], *, with_logprobs: bool, is_graded: bool
) -> pa.Table:
    """Responses as a table, see `support.response_files`; a group is the place of its prompt."""
    arrays = ["prompt_ids", "response_ids"]
    arrays += ["rollout_logprobs", "rollout_raw_logprobs"] * with_logprobs
    columns = items.columns(arrays)
    if not is_graded:
        columns = {name: found for name, found in columns.items() if name not in VERDICT}
    asked = [prompts[group] for group in columns["group_id"]]
    return response_files.table_of(
        columns
        | {
            "benchmark": [prompt.data_source for prompt in asked],
            "group_id": [prompt.index for prompt in asked],
            "question": [prompt.question for prompt in asked],
            "prompt": [prompt.prompt for prompt in asked],
            "reference": [prompt.answer or None for prompt in asked],
            "row": [prompt.columns for prompt in asked],
        }
    )


def shard_name(number: int, count: int) -> str:
    """The file of the hidden states of one call."""
    return f"states-{number:05d}-of-{count:05d}.safetensors"


def write_states(
    out: BinaryIO,
    items: Sequence[ScoredRollout],
    prompts: Sequence[data.PromptExample],
    asked: HiddenStateParams,
) -> None:
    """Writes the hidden states of responses as safetensors.

    Tensors: `<group_id>/<sample_index>/decode` [T, L, D], row t produced response token t; and
    `<group_id>/prefill` [P, L, D], row p is at prompt token p. The prefill states of a prompt
    are stored with sample 0, because all samples have the same up to rounding.
    """
    tensors = {}
    for item in items:
        rollout = item.rollout
        prompt = prompts[rollout.group_id].index
        planes = [rollout.layers.index(layer) for layer in asked.layers]
        for name in state_names(prompt, rollout.sample_index, asked):
            is_decode = name.endswith("decode")
            states = rollout.hidden_states if is_decode else rollout.prompt_states
            tensors[name] = np.ascontiguousarray(states[:, planes])
    metadata = {"layers": ",".join(map(str, asked.layers))}
    write_tensors(out, tensors, metadata)


def state_names(prompt: int, sample: int, asked: HiddenStateParams) -> list[str]:
    """The names of the tensors of one response."""
    names = [f"{prompt}/{sample}/decode"] if "decode" in asked.kinds else []
    return names + ([f"{prompt}/prefill"] if "prefill" in asked.kinds and sample == 0 else [])


def write_states_index(
    directory: pathlib.Path, parts: Sequence[pathlib.Path], asked: HiddenStateParams
) -> None:
    """Writes which shard has which tensor, in the format of Hugging Face's weight index."""
    shards = {}
    for number, part in enumerate(parts):
        table = response_files.read(part, KEYS, ())
        for prompt, sample in zip(*(table[name].to_pylist() for name in KEYS)):
            for name in state_names(prompt, sample, asked):
                shards[name] = shard_name(number, len(parts))
    metadata = {"layers": asked.layers, "dtype": asked.dtype, "kinds": asked.kinds}
    write_json(directory / STATES_INDEX, {"metadata": metadata, "weight_map": shards})


def write_conversations(
    directory: pathlib.Path, *, only_correct: bool, system_prompt: str, template: str
) -> tuple[int, int]:
    """Writes finished responses as conversations for `launch.sft`, in both of its row formats.

    The message of the user is the question, with "chat:TEXT" in TEXT. A truncated response is left
    out: from it, a model would learn not to finish. Returns how many were written, and how many
    were left out as truncated.
    """
    num_written = num_truncated = 0
    names = [*KEYS, "question", "prompt", "response", "finish_reason"]
    names += ["correct"] if only_correct else []
    message = chat_message(template) if is_chat(template) else Format()
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    with replacing(directory / CONVERSATIONS) as out:
        tables = response_files.batches(directory / RESPONSES, names)
        for row in (row for table in tables for row in table.to_pylist()):
            if only_correct and not row["correct"]:
                continue
            if row["finish_reason"] not in FINISHED or not row["response"].strip():
                num_truncated += 1
                continue
            user, assistant = message.text(row["question"]), row["response"]
            conversation = {
                "messages": [
                    *system,
                    {"role": "user", "content": user},
                    {"role": "assistant", "content": assistant},
                ],
                "prompt": row["prompt"],
                "completion": assistant,
                "group_id": row["group_id"],
                "sample_index": row["sample_index"],
            }
            out.write(json.dumps(conversation, ensure_ascii=False).encode() + b"\n")
            num_written += 1
    return num_written, num_truncated
