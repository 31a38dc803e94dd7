"""Which processes sample, and how they exchange scored responses.

The lowest process that holds a part of a data shard (an index over `replica` and `fsdp`) samples
for it. It calls replicas, verifies and measures, while the other processes wait. Then an all-gather
sends the scored responses, without hidden states, to every process, so that all hold one batch.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int, Shaped

from semrl_jax.cluster.connecting import gather_bytes
from semrl_jax.cluster.peers import Processes
from semrl_jax.metrics.measurements import Measurement, MetricKey
from semrl_jax.models.hosts import shard_owners
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.types import TOKEN_ARRAYS, Rollout, SampleRequest, VersionSpan, WeightVersion

T = TypeVar("T")


def sampling_processes(
    processes: Int[np.ndarray, "R F S T X"], num_addresses: int = 0
) -> tuple[int, ...]:
    """The processes that sample, in ascending order, of the processes of the mesh's devices.

    `num_addresses` of given replicas are used by one process each; 0: each has its own.
    """
    found = sorted(set(shard_owners(processes).tolist()))
    return tuple(found[: num_addresses or None])


def share_of(items: Sequence[T], sampling: Sequence[int], process: int) -> Sequence[T]:
    """The consecutive part of the items that this process samples; empty if it does not sample."""
    if process not in sampling:
        return items[:0]
    place = sampling.index(process)
    start, end = (len(items) * i // len(sampling) for i in (place, place + 1))
    return items[start:end]


def own_requests(
    requests: Sequence[SampleRequest], sampling: Sequence[int], process: int
) -> list[SampleRequest]:
    """The requests of the groups that this process samples."""
    groups = list(dict.fromkeys(request.group_id for request in requests))
    own_groups = set(share_of(groups, sampling, process))
    return [request for request in requests if request.group_id in own_groups]


def of_all(peers: Processes, scored: Scored) -> Scored:
    """The responses of all processes in (group, sample) order; each is held by one process."""
    if peers.count == 1:
        return scored
    parts = list(map(unpack_scored, gather_bytes(peers, "exchange", pack_scored(scored))))
    parts[peers.index] = scored  # the own ones have hidden states
    return Scored.joined(parts).in_order()


def pack_scored(scored: Scored) -> bytes:
    """Packs scored responses, without hidden states, as an npz archive."""
    arrays = {"records": np.frombuffer(json.dumps(list(map(_record, scored))).encode(), np.uint8)}
    for array in TOKEN_ARRAYS:
        parts = [getattr(item.rollout, array.name) for item in scored]
        present = [part for part in parts if part is not None]
        values = np.concatenate(present or [np.zeros(0)])
        arrays[array.name] = values.astype(array.dtype) if array.dtype else values
        arrays[f"{array.name}_lengths"] = np.array(
            [-1 if p is None else len(p) for p in parts], int
        )
    for key, (values, valid) in scored.metrics.items():
        arrays[f"{METRICS}{key.label}"] = np.stack([values, valid.astype(values.dtype)])
    if scored.mean_states is not None:
        arrays["mean_states"] = scored.mean_states
    arrays["num_dropped"] = np.array(scored.num_dropped)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_scored(data: bytes) -> Scored:
    """The inverse of `pack_scored`, except for the hidden states."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = dict(file)
    records = json.loads(arrays.pop("records").tobytes())
    means, num_dropped = arrays.pop("mean_states", None), int(arrays.pop("num_dropped"))
    columns = {
        array.name: _split(arrays.pop(array.name), arrays.pop(f"{array.name}_lengths"))
        for array in TOKEN_ARRAYS
    }
    metrics = {
        MetricKey.parse(name.removeprefix(METRICS)): Measurement(values, valid.astype(bool))
        for name, (values, valid) in arrays.items()
    }
    items = []
    for index, record in enumerate(records):
        rollout = Rollout(
            **{name: column[index] for name, column in columns.items()},
            versions=tuple(
                VersionSpan(WeightVersion(*version), start, end)
                for version, start, end in record["versions"]
            ),
            **record["values"],
        )
        verdict = Verdict(**record["verdict"])
        series = {n: np.array(row, np.float32) for n, row in record["series"].items()}
        texts = record["response"], record["reference"]
        items.append(ScoredRollout(rollout, *texts, verdict, series))
    return Scored(items, metrics, means, num_dropped)


METRICS = "metrics/"  # begins the names of their arrays: values, and validities as 1 or 0
# Hidden states, and the fields that describe them, are not sent; `Scored` has the metrics.
_LOCAL = {"hidden_states", "prompt_states", "layers", "mean_state", "metrics"}
# Fields that are sent as JSON, which keeps every bit of a float.
_VALUES = [
    field.name
    for field in dataclasses.fields(Rollout)
    if field.name not in {array.name for array in TOKEN_ARRAYS} | _LOCAL | {"versions"}
]


def _record(item: ScoredRollout) -> dict:
    verdict = dataclasses.asdict(item.verdict)
    del verdict["steps"]  # the rollout has them
    return {
        "values": {name: getattr(item.rollout, name) for name in _VALUES},
        "versions": [dataclasses.astuple(span) for span in item.rollout.versions],
        "response": item.response,
        "reference": item.reference,
        "verdict": verdict,
        "series": {name: row.tolist() for name, row in item.series.items()},
    }


def _split(
    values: Shaped[np.ndarray, "N ..."], lengths: Int[np.ndarray, " B"]
) -> list[Shaped[np.ndarray, "_ ..."] | None]:
    """Consecutive parts of these lengths; None for a length of -1."""
    ends = np.cumsum(np.maximum(lengths, 0))
    return [None if n < 0 else values[end - n : end] for end, n in zip(ends, lengths)]
