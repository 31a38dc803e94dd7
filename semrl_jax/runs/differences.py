"""The first difference between two records of a step, in the order of its stages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from semrl_jax.sampling.recorded import StepRecord
from semrl_jax.support.response_files import METRICS, SCORES

START, PROMPTS, WEIGHTS = "start", "prompts", "weights"
GRADIENTS = "gradients"
# Columns of `support.response_files` by stage; a name that ends in "/" stands for all such columns.
COLUMNS = {
    "prompts": ("group_id", "sample_index", "prompt_ids", "reference"),
    "tokens": (
        "response_ids", "response_mask", "conversations", "finish_reason", "weight_spans",
        "routed_experts",
    ),
    "log-probabilities": ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values"),
    "rewards": (
        "turn_rewards", "step_ends", "step_rewards", "extracted", "correct", SCORES, "score",
        "verifier_error", "boxed", "reward",
    ),
    "metrics": (
        METRICS, "effective_ranks", "mean_states", "turn_effective_rank",
        "turn_effective_rank_velocity", "turn_effective_rank_acceleration",
    ),
    "advantages": ("trained", "advantages", "returns"),
}  # fmt: skip
FACTS = {START: "before", GRADIENTS: "gradients", WEIGHTS: "after"}
STAGES = (START, *COLUMNS, GRADIENTS, WEIGHTS)
# Keys of the log by stage; the first that fits decides. Scalars of users' probes are metrics.
KEYS = (
    ("prompts", ("prompt/", "curriculum/")),
    ("log-probabilities", ("rollout/logprob_mismatch",)),
    ("metrics", ("rollout/hidden_state_mismatch",)),
    ("rewards", ("response/step",)),
    ("tokens", ("response/", "episode/", "rollout/")),
    ("advantages", (
        "reward/shaped", "advantage/", "shaping/", "critic/return", "critic/value", "algorithm/",
        "critic/explained_variance", "policy/importance_weight",
    )),
    ("rewards", ("reward/",)),
    (GRADIENTS, ("policy/", "critic/")),
    ("metrics", ("",)),
)  # fmt: skip
# What depends on time, on evaluations or on the wire.
VOLATILE = ("time/", "eval/", "policy/mfu", "episode/num_", "rollout/replica/")
COUNTS = {
    *(f"rollout/{name}" for name in ("responses", "retries", "aborted", "duplicates")),
    *(f"rollout/{name}" for name in ("replica_failures", "taken_over")),
    *(f"reward/num_{name}" for name in ("verdicts", "timeouts", "crashes", "exceptions")),
    *(f"reward/num_{name}" for name in ("invalid", "too_long")),
    "response/num_tokens",  # of the row of a run alone
}


class Difference(NamedTuple):
    """Where two records of a step part first, in one stage."""

    step: int
    stage: str  # of STAGES
    what: str  # the column, key of the log, or parameter
    left: Any
    right: Any
    row: int | None = None  # the response, in (group, sample) order
    token: int | None = None  # or the number of an entry of another list
    note: str = ""  # what else is known of it

    def __str__(self) -> str:
        place = "" if self.row is None else f"response {self.row}, "
        if self.token is not None:
            of_tokens = self.what not in ("mean_states", "effective_ranks")
            place += f"{'token' if of_tokens else 'entry'} {self.token}, "
        note = f" ({self.note})" if self.note else ""
        values = f"{_text(self.left)} -> {_text(self.right)}"
        return f"step {self.step}, {self.stage}: {place}{self.what} {values}{note}"


def differences(left: StepRecord, right: StepRecord) -> Iterator[Difference]:
    """The first difference of each stage that has one, in the order of STAGES.

    Only what both records have is compared.
    """
    # Scalars of updates are means over mini-batches, so those after the first one follow from
    # changed weights. With checksums of gradients, they say nothing more about gradients.
    sums = all(FACTS[GRADIENTS] in record.facts for record in (left, right))
    for stage in STAGES:
        if stage in COLUMNS:
            found = _in_columns(stage, left, right)
        else:
            found = _in_sums(stage, left, right)
        keys = {WEIGHTS: (GRADIENTS, WEIGHTS), GRADIENTS: ()} if sums else {}
        if found := found or _in_row(stage, keys.get(stage, (stage,)), left, right):
            yield found


def _in_columns(stage: str, left: StepRecord, right: StepRecord) -> Difference | None:
    tables = [record.columns for record in (left, right)]
    if not all(table.num_columns for table in tables):
        return None  # responses of one side are unknown
    if len({len(table) for table in tables}) > 1:
        if stage != "prompts":
            return None  # rows have no partners
        counts = [len(table) for table in tables]
        return Difference(left.step, stage, "number of responses", *counts, note=_moved(*tables))
    names = [name for name in tables[0].column_names if name in tables[1].column_names]
    for pattern in COLUMNS[stage]:
        for name in names:
            if name != pattern and not (pattern.endswith("/") and name.startswith(pattern)):
                continue
            pair = [table[name] for table in tables]
            if pair[0].equals(pair[1]):
                continue
            if place := _first(*(column.to_pylist() for column in pair)):
                note = _moved(*tables) if stage == "prompts" else _also(name, place, *tables)
                row, token, *values = place
                return Difference(left.step, stage, name, *values, row, token, note)
    return None


def _first(left: list, right: list) -> tuple[int, int | None, Any, Any] | None:
    """Row, entry of a list and both values of the first difference; NaN equals NaN."""
    for row, (a, b) in enumerate(zip(left, right)):
        if _same(a, b):
            continue
        if not (isinstance(a, list) and isinstance(b, list)):
            return row, None, a, b
        for place in range(max(len(a), len(b))):
            one, other = (x[place] if place < len(x) else None for x in (a, b))
            if not _same(one, other):
                return row, place, one, other
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return a == b or both_nan


def _moved(left: pa.Table, right: pa.Table) -> str:
    """How two lists of prompts differ: in their order, or in what one of them lacks."""
    names = ("group_id", "sample_index", "prompt_ids")
    prompts = [
        [json.dumps(row) for row in zip(*(table[name].to_pylist() for name in names))]
        for table in (left, right)
    ]
    one, other = map(set, prompts)
    if one == other:
        return "the same prompts in another order"
    texts = [{json.dumps(ids) for ids in t["prompt_ids"].to_pylist()} for t in (left, right)]
    if len(one) == len(other) and texts[0] == texts[1]:
        return "the same prompts in another order"
    gone, new = len(texts[0] - texts[1]), len(texts[1] - texts[0])
    return "" if not gone and not new else f"{gone} prompts are missing and {new} are new"


def _also(name: str, place: tuple, left: pa.Table, right: pa.Table) -> str:
    """What the log-probabilities of a response say about the cause of the difference."""
    row, engine = place[0], "rollout_logprobs"
    tables = left, right
    if name not in ("response_ids", engine) or any(engine not in t.column_names for t in tables):
        return ""
    if name == "response_ids":
        values = [table[engine][row].as_py()[: place[1]] for table in tables]
        first = next((i for i, (a, b) in enumerate(zip(*values)) if not _same(a, b)), None)
        also = "are equal before it" if first is None else f"differ from token {first} on"
        notes = [f"the log-probabilities of the engine {also}"] if place[1] else []
        left_steps, right_steps = (_weights_of(table, row) for table in tables)
        if left_steps != right_steps:
            notes.append(f"weights of steps {left_steps} -> {right_steps}")
        return "; ".join(notes)
    if any("old_logprobs" not in table.column_names for table in tables):
        return ""
    same = _same(*(table["old_logprobs"].to_pylist() for table in tables))
    return f"the trainer's log-probabilities {'are equal' if same else 'differ too'}"


def _weights_of(table: pa.Table, row: int) -> list[int]:
    """The steps of the weights that sampled a response; [] if they are not recorded."""
    name = "weight_spans"
    return table[name][row].as_py()[::3] if name in table.column_names else []


def _in_sums(stage: str, left: StepRecord, right: StepRecord) -> Difference | None:
    """The first array whose checksums differ; its values are the norms."""
    pair = [record.facts.get(FACTS[stage]) for record in (left, right)]
    if None in pair:
        return None
    different = [
        name for name in pair[0].keys() & pair[1].keys() if pair[0][name][0] != pair[1][name][0]
    ]
    if not different:
        return None
    name = next(name for name in pair[0] if name in different)
    note = f"norms; {len(different)} of {len(pair[0])} arrays differ in their bits"
    return Difference(left.step, stage, name, *(sums[name][1] for sums in pair), note=note)


def _in_row(
    stage: str, keys: Sequence[str], left: StepRecord, right: StepRecord
) -> Difference | None:
    """The first scalar of the log whose own stage is one of `keys`."""
    rows = [record.facts.get("row", {}) for record in (left, right)]
    for name in sorted(rows[0].keys() & rows[1].keys()):
        if not is_compared(name) or stage_of(name) not in keys:
            continue
        if not _same(*(row[name] for row in rows)):
            return Difference(left.step, stage, name, *(row[name] for row in rows))
    return None


def is_compared(key: str) -> bool:
    """Whether the value of a key of the log follows from the settings alone."""
    is_volatile = key.startswith(VOLATILE) or key.endswith(("_per_s", "_bytes"))
    return not is_volatile and key not in COUNTS and key != "step"


def stage_of(key: str) -> str:
    """The stage that a key of the log belongs to."""
    if key.endswith("/learning_rate"):
        return WEIGHTS
    return next(stage for stage, starts in KEYS if key.startswith(starts))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    return "none" if value is None else f"{value!r:.60}"


def known(records: Sequence[StepRecord]) -> str:
    """What records of a run have, for a line such as "rows of 4 steps, responses of 2 steps"."""
    kinds = {
        "rows": lambda record: "row" in record.facts,
        "responses": lambda record: len(record.columns) > 0,
        "gradients": lambda record: "gradients" in record.facts,
        "weights": lambda record: "after" in record.facts or "before" in record.facts,
    }
    steps = {name: {r.step for r in records if has(r)} for name, has in kinds.items()}
    numbers = {name: f"{len(of)} step{'s' * (len(of) > 1)}" for name, of in steps.items() if of}
    return ", ".join(f"{name} of {number}" for name, number in numbers.items())
