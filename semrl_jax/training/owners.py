"""Which process samples what, and scored responses on their way to all others.

A data shard (an index over `replica` and `fsdp`) is owned by the lowest process that holds it.
Owners call replicas, verify and measure; the others wait. What an owner has then goes to every
process but for the hidden states, so that all hold the same batch.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int, Shaped

from semrl_jax.metrics.records import decode, encode
from semrl_jax.models.hosts import shard_owners
from semrl_jax.rewards import Verdict
from semrl_jax.training.scoring import ScoredRollout
from semrl_jax.types import Rollout, VersionSpan, WeightVersion

T = TypeVar("T")


def owning_processes(processes: Int[np.ndarray, "R F S T"]) -> tuple[int, ...]:
    """The owners of the data shards, each once, in order."""
    return tuple(sorted(set(shard_owners(processes).tolist())))


def share_of(items: Sequence[T], owners: Sequence[int], process: int) -> Sequence[T]:
    """The consecutive part of the items that a process has; nothing where it owns no shard."""
    if process not in owners:
        return items[:0]
    place = owners.index(process)
    start, end = (len(items) * i // len(owners) for i in (place, place + 1))
    return items[start:end]


def pack_scored(scored: Sequence[ScoredRollout]) -> bytes:
    """What `unpack_scored` reads; hidden states are left out."""
    rollouts = [item.rollout for item in scored]
    means = [item.mean_states for item in scored if item.mean_states is not None]
    arrays = {
        "prompt_ids": _joined([r.prompt_ids for r in rollouts], np.int32),
        "response_ids": _joined([r.response_ids for r in rollouts], np.int32),
        "rollout_logprobs": _joined([r.rollout_logprobs for r in rollouts], np.float32),
        "raw_logprobs": _joined(
            [r.rollout_raw_logprobs for r in rollouts if r.rollout_raw_logprobs is not None],
            np.float32,
        ),
        "mean_states": np.stack(means) if means else np.zeros((0, 0, 0), np.float32),
        "records": np.frombuffer(json.dumps(list(map(_record, scored))).encode(), np.uint8),
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_scored(data: bytes) -> list[ScoredRollout]:
    """Scored responses as `pack_scored` took them, without hidden states."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        records = json.loads(arrays["records"].tobytes())
        prompts, responses, logprobs, raw = (
            _Reader(arrays[name])
            for name in ("prompt_ids", "response_ids", "rollout_logprobs", "raw_logprobs")
        )
        means = iter(arrays["mean_states"])
    scored = []
    for record in records:
        num_prompt, num_response = record["lengths"]
        rollout = Rollout(
            prompt_ids=prompts.take(num_prompt),
            response_ids=responses.take(num_response),
            rollout_logprobs=logprobs.take(num_response),
            rollout_raw_logprobs=raw.take(num_response) if record["raw"] else None,
            versions=tuple(
                VersionSpan(WeightVersion(*version), start, end)
                for version, start, end in record["versions"]
            ),
            metrics=decode(record["metrics"]),
            **record["rollout"],
        )
        scored.append(
            ScoredRollout(
                rollout,
                record["response"],
                record["reference"],
                Verdict(**record["verdict"]),
                next(means) if record["measured"] else None,
            )
        )
    return scored


# Fields of a rollout that JSON holds as they are; floats survive it to the last bit.
_PLAIN = (
    "sample_id", "group_id", "sample_index", "finish_reason", "replica_id", "generate_s",
)  # fmt: skip


def _record(item: ScoredRollout) -> dict:
    rollout = item.rollout
    return {
        "rollout": {name: getattr(rollout, name) for name in _PLAIN},
        "metrics": encode(rollout.metrics),
        "lengths": [len(rollout.prompt_ids), len(rollout.response_ids)],
        "raw": rollout.rollout_raw_logprobs is not None,
        "versions": [
            [dataclasses.astuple(span.version), span.start, span.end] for span in rollout.versions
        ],
        "response": item.response,
        "reference": item.reference,
        "verdict": dataclasses.asdict(item.verdict),
        "measured": item.mean_states is not None,
    }


class _Reader:
    """Hands out an array from the front."""

    def __init__(self, array: Shaped[np.ndarray, " N"]):
        self._array, self._next = array, 0

    def take(self, count: int) -> Shaped[np.ndarray, " n"]:
        part = self._array[self._next : self._next + count]
        self._next += count
        return part


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> Shaped[np.ndarray, " N"]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
