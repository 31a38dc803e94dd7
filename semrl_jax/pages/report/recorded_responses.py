"""Recorded responses for the page of a run, within a limit of bytes."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int

from semrl_jax.pages.html import cut, cut_turns, rounded, script_lengths, shortened
from semrl_jax.pages.report.reading import RunLog
from semrl_jax.support import response_files
from semrl_jax.support.response_files import METRICS
from semrl_jax.support.run_directory import recorded

MAX_BYTES = 6 * 2**20  # of the texts of all responses
MAX_FILES = 5  # of a run, of training and of evaluations each
MAX_RESPONSES = 256  # of a file
MAX_CHARACTERS = 4000  # of a response or a prompt
MAX_STEPS = 20  # whose rewards are shown
MAX_ANSWER = 300  # characters of an answer or an error
NUM_POINTS = 60  # of a line of values along a response
TRAINING = "training"
COLUMNS = (
    "run", "source", "step", "group", "sample", "prompt", "response", "reference", "extracted",
    "score", "correct", "error", "finish", "tokens", "logprobs", "ranks", "turns", "rewards",
    "metrics", "facts",
)  # fmt: skip
NEEDED = "step", "sample_index", "prompt", "response", "score", "correct"
OPTIONAL = (
    "reference", "extracted", "verifier_error", "finish_reason", "rollout_logprobs",
    "response_mask", "turn_rewards", "turn_characters", "effective_ranks", "parent", "num_prefix",
    "hint", "step_rewards", METRICS,
)  # fmt: skip


def samples(runs: Sequence[RunLog]) -> dict[str, Any]:
    """The responses that the page shows, whole groups at equal distances.

    `columns` are names of the fields of a row. In `rows`, `run` and `prompt` are indices, and
    `metrics` are in the order of `metric_names`. `note` says what is left out.
    """
    files = [(index, file) for index, run in enumerate(runs) for file in _chosen(run.path)]
    found = _Found()
    for index, file in files:
        try:
            found.add(index, file, MAX_BYTES // len(files))
        except (OSError, KeyError, ValueError, TypeError):
            found.unreadable.append(file.name)
    return {
        "columns": COLUMNS,
        "rows": found.rows,
        "prompts": list(found.prompts),
        "metric_names": [name.removeprefix(METRICS) for name in found.metric_names],
        "note": found.note(),
    }


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items at equal distances, with the first and the last one."""
    if len(items) <= count:
        return list(items)
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, count)]


def _chosen(path: pathlib.Path) -> list[pathlib.Path]:
    """The files to read, the newest first."""
    files = [
        (step, kind, file)
        for kind in ("step", "eval")
        for step, file in spread(list(recorded(path, kind).items()), MAX_FILES)
    ]
    return [file for *_, file in sorted(files, key=lambda item: item[:2], reverse=True)]


class _Found:
    """Collects rows, and counts what is left out."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.prompts: dict[str, int] = {}
        self.metric_names: list[str] = []
        self.unreadable: list[str] = []
        self._num_recorded = self._num_cut = 0

    def add(self, run: int, file: pathlib.Path, max_bytes: int) -> None:
        """Adds groups of a file; their texts have at most `max_bytes`, or it is one per source."""
        small = response_files.read(file, ("group_id",), ("benchmark",)).to_pydict()
        sources = small.get("benchmark") or [TRAINING] * len(small["group_id"])
        groups: dict[tuple[str, int], list[int]] = {}
        for index, key in enumerate(zip(sources, small["group_id"])):
            groups.setdefault(key, []).append(index)
        kept = self._fitting(groups, _sizes(file), max_bytes)
        key_of = {index: key for key in kept for index in groups[key]}
        # A file of an evaluation may have gigabytes: of most rows only the sizes are kept.
        found: dict[int, dict[str, Any]] = {}
        first = 0
        for part in response_files.batches(file, NEEDED, OPTIONAL):
            names = {name for name in part.column_names if name.startswith(METRICS)}
            self.metric_names += sorted(names - set(self.metric_names))
            own = [index for index in range(first, first + len(part)) if index in key_of]
            places = pa.array([index - first for index in own], pa.int64())  # typed also if empty
            found.update(zip(own, part.take(places).to_pylist()))
            first += len(part)
        # All rows of a file or none: one of them may be damaged.
        num_cut = self._num_cut
        try:
            self.rows += [self._row(run, *key, found[index]) for index, key in key_of.items()]
        except BaseException:
            self._num_cut = num_cut
            raise
        self._num_recorded += first

    def _fitting(
        self,
        groups: dict[tuple[str, int], list[int]],
        sizes: Int[np.ndarray, " rows"],
        max_bytes: int,
    ) -> list[tuple[str, int]]:
        by_source: dict[str, list[tuple[str, int]]] = {}
        for key in groups:
            by_source.setdefault(key[0], []).append(key)
        stride = 1
        while True:
            kept = [key for keys in by_source.values() for key in keys[::stride]]
            rows = [index for key in kept for index in groups[key]]
            if len(rows) <= MAX_RESPONSES and sizes[rows].sum() <= max_bytes:
                return kept
            if len(kept) == len(by_source):
                return kept
            stride += 1 + stride // 4

    def _row(self, run: int, source: str, group: int, row: dict[str, Any]) -> list[Any]:
        self._num_cut += max(len(row["response"]), len(row["prompt"])) > MAX_CHARACTERS
        prompt = cut(row["prompt"], MAX_CHARACTERS)
        turns = cut_turns(row["response"], row.get("turn_characters") or (), MAX_CHARACTERS)
        logprobs = row.get("rollout_logprobs") or []
        if mask := row.get("response_mask"):
            logprobs = list(itertools.compress(logprobs, mask))
        return [
            run,
            str(source),
            int(row["step"]),
            int(group),
            int(row["sample_index"]),
            self.prompts.setdefault(prompt, len(self.prompts)),
            "".join(turns),
            _short(row.get("reference")),
            _short(row.get("extracted")),
            rounded(row["score"]),
            row["correct"],
            _short(row.get("verifier_error") or None),
            str(row.get("finish_reason") or ""),
            len(logprobs),
            _line(logprobs),
            _line(row.get("effective_ranks") or []),
            script_lengths(turns),
            [rounded(reward) for reward in row.get("turn_rewards") or ()],
            [_metric(row.get(name)) for name in self.metric_names],
            _facts(row),
        ]

    def note(self) -> str:
        """What the page lacks, in sentences."""
        if not self.rows and not self.unreadable:
            return "No response is recorded; logging.rollouts_every_steps sets how often."
        note = f"{len(self.rows)} responses of {self._num_recorded} in the files that were read"
        note += (
            f" (at most {MAX_FILES} files of training and {MAX_FILES} of evaluations per run, and "
            f"{MAX_RESPONSES} responses per file, in whole groups)."
        )
        if self._num_cut:
            note += (
                f" {self._num_cut} of them have more than {MAX_CHARACTERS} characters and are "
                "shortened in the middle."
            )
        if self.unreadable:
            note += f" Unreadable: {', '.join(self.unreadable)}."
        return note + " rollouts/ has all of them."


def _sizes(file: pathlib.Path) -> Int[np.ndarray, " rows"]:
    """The bytes that the texts of each response take on the page."""
    sizes = [np.zeros(0, int)]
    for part in response_files.batches(file, ("response", "prompt"), ()):
        lengths = [np.asarray(pc.binary_length(texts).fill_null(0)) for texts in part.columns]
        sizes.append(np.minimum(lengths, MAX_CHARACTERS).sum(axis=0))
    return np.concatenate(sizes)


def _short(text: str | None) -> str | None:
    return None if text is None else shortened(text, MAX_ANSWER)


def _facts(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of what only the responses of some methods have."""
    found = []
    if row.get("num_prefix"):
        text = f"after the first {row['num_prefix']} tokens of #{row['parent']}"
        found.append(("branch", text))
    if row.get("hint"):
        found.append(("hint", f"{100 * row['hint']:.0f} % of a solution in the prompt"))
    if rewards := row.get("step_rewards"):
        shown = ", ".join(f"{reward:g}" for reward in rewards[:MAX_STEPS])
        found.append(("steps", shown + ", ..." * (len(rewards) > MAX_STEPS)))
    return found


def _line(values: Sequence[float]) -> list[float | None]:
    """At most `NUM_POINTS` means of neighbouring values."""
    count = min(NUM_POINTS, len(values))
    if not count:
        return []
    starts = np.arange(count) * len(values) // count
    sums = np.add.reduceat(np.asarray(values, float), starts)
    return [rounded(mean, 3) for mean in (sums / np.diff([*starts, len(values)])).tolist()]


def _metric(value: float | None) -> float | None:
    return rounded(value) if value is not None and math.isfinite(value) else None
