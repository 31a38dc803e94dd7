"""Files of generated responses: a table, shards of hidden states, and conversations to train on."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semrl_jax import data
from semrl_jax.evaluation.sample_files import METRICS
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.support.files import replacing, write_json
from semrl_jax.support.parquet import ParquetFile, strings
from semrl_jax.support.tensor_files import write_tensors
from semrl_jax.types import HiddenStateParams

RESPONSES, STATES_INDEX, CONVERSATIONS = (
    "responses.parquet", "states.index.json", "conversations.jsonl",
)  # fmt: skip
FINISHED = ("eos", "stop")  # reasons of responses that a model may learn from


def response_table(
    items: Scored,
    prompts: Sequence[data.PromptExample],
    *,
    with_logprobs: bool,
    is_graded: bool,
) -> pa.Table:
    """Responses as a table, one row each, see docs/generation.md.

    Args:
      items: the group of a rollout is the place of its prompt.
      prompts: all of them.
      with_logprobs: whether the table has log-probabilities per token.
      is_graded: whether the table has verdicts.
    """
    rollouts = [item.rollout for item in items]
    asked = [prompts[rollout.group_id] for rollout in rollouts]
    sampled = [rollout.rollout_logprobs[rollout.response_mask] for rollout in rollouts]
    columns: dict[str, Any] = {
        "prompt_index": pa.array([prompt.index for prompt in asked], pa.int64()),
        "sample_index": pa.array([rollout.sample_index for rollout in rollouts], pa.int64()),
        "data_source": strings(prompt.data_source for prompt in asked),
        "question": strings(prompt.question for prompt in asked),
        "prompt": strings(prompt.prompt for prompt in asked),
        "reference": strings(prompt.answer or None for prompt in asked),
        "row": strings(prompt.columns for prompt in asked),
        "response": strings(item.response for item in items),
        "finish_reason": strings(rollout.finish_reason for rollout in rollouts),
        "num_tokens": pa.array([rollout.num_policy_tokens for rollout in rollouts], pa.int64()),
        "mean_logprob": pa.array(
            [float(row.mean()) if len(row) else math.nan for row in sampled],
            pa.float64(),
            from_pandas=False,
        ),
        "prompt_ids": _lists([rollout.prompt_ids for rollout in rollouts], pa.int32()),
        "response_ids": _lists([rollout.response_ids for rollout in rollouts], pa.int32()),
    }
    if with_logprobs:
        for name in ("rollout_logprobs", "rollout_raw_logprobs"):
            columns[name] = _lists([getattr(each, name) for each in rollouts], pa.float32())
    if is_graded:
        columns |= verdict_columns([item.verdict for item in items])
    for key, (values, valid) in sorted(items.metrics.items(), key=lambda entry: entry[0].label):
        values = np.where(valid, values.astype(np.float64), math.nan)
        columns[METRICS + key.label] = pa.array(values, pa.float64(), from_pandas=False)
    return pa.table(columns)


def verdict_columns(verdicts: Sequence[Verdict]) -> dict[str, pa.Array]:
    """The columns of verdicts, named as the fields of `evaluation.samples.Sample`."""
    return {
        "extracted": strings(verdict.extracted for verdict in verdicts),
        "correct": pa.array([verdict.correct for verdict in verdicts], pa.bool_()),
        "score": pa.array([verdict.score for verdict in verdicts], pa.float64()),
        "boxed": pa.array([verdict.boxed for verdict in verdicts], pa.bool_()),
        "verifier_error": strings(verdict.error for verdict in verdicts),
    }


def write_table(file: pathlib.Path, table: pa.Table) -> None:
    """Writes a table; the file is complete or missing."""
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as out:
        pq.write_table(table, out, compression="zstd")


def join_tables(parts: Sequence[pathlib.Path], file: pathlib.Path) -> None:
    """Joins tables into one file, with one of them in memory at a time.

    A column that a part lacks, because none of its responses has the metric, is null there.
    """
    schema = pa.unify_schemas([ParquetFile(part).schema for part in parts])
    with replacing(file) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for part in parts:
            tables = [schema.empty_table(), ParquetFile(part).table()]
            writer.write_table(pa.concat_tables(tables, promote_options="default"))


def shard_name(number: int, count: int) -> str:
    """The file of the hidden states of one call."""
    return f"states-{number:05d}-of-{count:05d}.safetensors"


def write_states(
    file: pathlib.Path,
    items: Sequence[ScoredRollout],
    prompts: Sequence[data.PromptExample],
    asked: HiddenStateParams,
) -> None:
    """Writes the hidden states of responses as safetensors; the file is complete or missing.

    Tensors: `<prompt_index>/<sample_index>/decode` [T, L, D], row t produced response token t; and
    `<prompt_index>/prefill` [P, L, D], row p is at prompt token p. The prefill states of a prompt
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
    with replacing(file) as out:
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
        table = ParquetFile(part).table(["prompt_index", "sample_index"])
        for prompt, sample in zip(*(column.to_pylist() for column in table.columns)):
            for name in state_names(prompt, sample, asked):
                shards[name] = shard_name(number, len(parts))
    metadata = {"layers": asked.layers, "dtype": asked.dtype, "kinds": asked.kinds}
    write_json(directory / STATES_INDEX, {"metadata": metadata, "weight_map": shards})


def write_conversations(
    directory: pathlib.Path, *, only_correct: bool, system_prompt: str
) -> tuple[int, int]:
    """Writes finished responses as conversations for `launch.sft`.

    A row has `messages`, and `prompt` and `completion`, so that both row formats can be trained on.
    A truncated response is left out: from it, a model would learn not to finish.

    Returns:
      How many conversations were written, and how many responses were left out as truncated.
    """
    num_written = num_truncated = 0
    names = ["prompt_index", "sample_index", "question", "prompt", "response", "finish_reason"]
    names += ["correct"] if only_correct else []
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    with replacing(directory / CONVERSATIONS) as out:
        for row in _rows(directory / RESPONSES, names):
            if only_correct and not row["correct"]:
                continue
            if row["finish_reason"] not in FINISHED or not row["response"].strip():
                num_truncated += 1
                continue
            user, assistant = row["question"], row["response"]
            conversation = {
                "messages": [
                    *system,
                    {"role": "user", "content": user},
                    {"role": "assistant", "content": assistant},
                ],
                "prompt": row["prompt"],
                "completion": assistant,
                "prompt_index": row["prompt_index"],
                "sample_index": row["sample_index"],
            }
            out.write(json.dumps(conversation, ensure_ascii=False).encode() + b"\n")
            num_written += 1
    return num_written, num_truncated


def _rows(file: pathlib.Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for batch in ParquetFile(file).batches(names):
        yield from batch.to_pylist()


def _lists(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.list_(kind))
