"""The table of responses: its columns, its page, and the files of earlier releases."""

import math
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax import data
from semrl_jax.evaluation.generated_files import (
    CONVERSATIONS,
    RESPONSES,
    response_table,
    write_conversations,
)
from semrl_jax.evaluation.samples import read_samples
from semrl_jax.jobs import view
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.pages.report import recorded_responses
from semrl_jax.runs.records import write_rollouts
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import COLUMNS, METRICS, OLD_NAMES, SCORES
from tests.evaluation.making import make_sample, write_samples
from tests.fixtures import make_scored
from tests.old_formats import EVALUATION, GENERATION, make_old, make_old_rollouts

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "run_directory.md"
RANK = MetricKey("effective_rank")


def scored(count=4):
    """Responses, the first of which is too short for a metric."""
    items = [
        make_scored(i, group_size=2, metrics={RANK: Measurement(float(i), i > 0)})
        for i in range(count)
    ]
    return Scored.of(items)


def generated(**options):
    prompts = [
        data.PromptExample(f"Q: {i}", np.array([3], np.int32), "7", "set", 10 * i, "{}", f"{i}")
        for i in range(2)
    ]
    options = {"with_logprobs": False, "is_graded": True} | options
    return response_table(scored(), prompts, **options)


def test_the_page_has_the_columns_with_types_and_meanings():
    lines = [f"| `{name}` | `{kind}` | {meaning} |" for name, (kind, meaning) in COLUMNS.items()]
    found = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    first = found.index(lines[0]) if lines[0] in found else 0
    assert found[first : first + len(lines)] == lines


def test_a_table_has_the_types_and_the_order_of_the_columns():
    columns = {"metrics/b": [math.nan, 1], "score": [1, 2], "metrics/a": [None, 2],
               "group_id": [3, 4], "response": ["a\ud800b", "c"], "score/x": [1, 1]}  # fmt: skip
    table = response_files.table_of(columns)
    assert table.column_names == [
        "group_id", "response", "score", "score/x", "metrics/a", "metrics/b",
    ]  # fmt: skip
    assert table["response"].to_pylist() == ["a?b", "c"]
    assert table["metrics/a"].to_pylist() == [None, 2] and table["metrics/b"].null_count == 0
    for name in COLUMNS:
        assert response_files.table_of({name: []}).schema.field(0).type is not None
    for name in (METRICS + "x", SCORES + "x"):
        assert response_files.kind_of(name) == pa.float64()
    assert response_files.kind_of("series/x").value_type == pa.float32()
    with pytest.raises(ValueError):
        response_files.table_of({"mine": []})


def test_no_present_column_has_an_old_name():
    assert not OLD_NAMES.keys() & COLUMNS.keys() and set(OLD_NAMES.values()) <= COLUMNS.keys()


def test_samples_of_an_old_evaluation_are_read(tmp_path):
    file = tmp_path / "samples.parquet"
    expected = [make_sample(p, s, metrics={"effective_rank": 2.0}) for p in (0, 3) for s in (0, 1)]
    write_samples(file, expected)
    make_old(file, EVALUATION)
    assert {"problem", "sample"} < set(pq.read_schema(file).names)
    assert repr(read_samples(file)) == repr(expected)  # NaN is NaN


def test_an_old_generation_is_read_and_joined_with_a_new_part(tmp_path):
    old, new = tmp_path / "0.parquet", tmp_path / "1.parquet"
    for file in (old, new):
        response_files.write(file, generated())
    make_old(old, GENERATION)
    assert {"prompt_index", "data_source"} < set(pq.read_schema(old).names)
    same = (repr(response_files.read(file).to_pydict()) for file in (old, new))  # NaN is NaN
    assert next(same) == next(same)
    response_files.join([old, new], tmp_path / RESPONSES)
    table = pq.read_table(tmp_path / RESPONSES)
    assert table["group_id"].to_pylist() == [0, 0, 10, 10] * 2
    assert table["benchmark"].to_pylist() == ["set"] * 8 and not OLD_NAMES.keys() & {*table.schema}
    make_old(tmp_path / RESPONSES, GENERATION)
    settings = {"only_correct": False, "system_prompt": "", "template": "plain"}
    assert write_conversations(tmp_path, **settings) == (8, 0)
    assert '"group_id": 10' in (tmp_path / CONVERSATIONS).read_text()
    names = [f"set {p} sample 1" if s else f"set {p}" for p in (0, 10) for s in (0, 1)]
    assert list(view.read_responses(tmp_path / RESPONSES)) == names


def test_rollouts_of_an_old_run_are_read(tmp_path):
    found = []
    for name in ("old", "new"):
        rollouts = tmp_path / name / "rollouts"
        rollouts.mkdir(parents=True)
        write_rollouts(rollouts, 3, scored(), lambda ids: str(ids))
        write_rollouts(rollouts, 3, scored(), lambda ids: str(ids), ["sums"] * 4)
        if name == "old":
            for file in rollouts.iterdir():
                make_old_rollouts(file)
                assert "metrics/effective_rank_valid" in pq.read_schema(file).names
        write_rollouts(rollouts, 4, Scored(()), str, [])  # all problems were too long
        shown = recorded_responses._Found()
        for file in sorted(rollouts.iterdir()):
            shown.add(0, file, 10**6)
        file = rollouts / "eval_000003.parquet"
        table = response_files.read(file, ("group_id",), (METRICS,))
        found.append((repr(shown.rows), repr(table.to_pydict()), view.read_responses(file).keys()))
    assert found[0] == found[1]
    assert shown.metric_names == ["metrics/effective_rank"]
    assert [row[recorded_responses.COLUMNS.index("metrics")] for row in shown.rows] == [
        [None],
        [1.0],
        [2.0],
        [3.0],
    ] * 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"score": [1.0]}, r"has no column 'prompt_ids' \(rollouts/ of a run and"),
        ({"prompt_ids": [[1]], "response_ids": [[2]]}, "has no column 'group_id'"),
        ({"prompt_ids": [[1]], "response_ids": [[2]], "group_id": [None]}, "row 0 has no 'group_i"),
        ({"prompt_ids": [[1]], "response_ids": [["a"]], "group_id": [1]}, "row without token ids"),
    ],
)
def test_what_is_missing_is_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=rf"x\.parquet.*{message}"):
        response_files.read(tmp_path / "x.parquet", ("prompt_ids", "response_ids", "group_id"))


def test_a_present_name_goes_before_an_old_one(tmp_path):
    pq.write_table(pa.table({"sample": ["of blood"], "sample_index": [3]}), tmp_path / "x.parquet")
    assert response_files.read(tmp_path / "x.parquet").to_pylist() == [{"sample_index": 3}]
