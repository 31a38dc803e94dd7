"""The first difference between two records, and records as files."""

import math

import numpy as np
import pyarrow as pa
import pytest

from semrl_jax.metrics.measurements import Measurement, MetricKey
from semrl_jax.models import array_sums
from semrl_jax.runs.differences import COLUMNS, STAGES, differences, is_compared, known, stage_of
from semrl_jax.sampling.recorded import (
    StepRecord,
    columns_of,
    file_of,
    read_record,
    scored_of,
    write_record,
)
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.response_files import COLUMNS as ALL_COLUMNS
from semrl_jax.training.traces import on_host
from tests.cases import refused
from tests.fixtures import make_scored

KEY = MetricKey("effective_rank")


def scored_responses(count=4):
    items = [
        make_scored(i, score=float(i % 2), response_ids=np.arange(5, 9 + i % 2, dtype=np.int32))
        for i in range(count)
    ]
    values = np.array([1.5, 2.5, 0.0, 3.5][:count], np.float32)
    metrics = {KEY: Measurement(values, values > 0)}
    means = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    return Scored(items, metrics, means)


def record_with(scored=None, step=3, **facts):
    scored = scored_responses() if scored is None else scored
    tokens = {
        name: np.arange(len(scored) * 6, dtype=np.float32).reshape(-1, 6)
        for name in ("old_logprobs", "advantages")
    }
    facts = {
        "row": {"reward/mean": 0.5, "policy/loss": math.nan},
        "sampled": [],
        "position": [0, 4],
        "num_layers": 2,
        "before": {"policy/a": (1, 2.0), "policy/b": (3, 4.0)},
        "gradients": {"policy/a": (5, 6.0)},
        "after": {"policy/a": (7, 8.0)},
    } | facts
    return StepRecord(step, columns_of(scored, tokens, np.arange(len(scored))), facts)


def changed(record, name, row, place=None, value=9):
    """The record with one other entry of a column."""
    rows = record.columns[name].to_pylist()
    if place is None:
        rows[row] = value
    else:
        rows[row][place] = value
    at = record.columns.column_names.index(name)
    field = record.columns.schema.field(name)
    return record._replace(columns=record.columns.set_column(at, field, pa.array(rows, field.type)))


def test_a_record_is_read_as_it_was_written(tmp_path):
    record, file = record_with(), file_of(tmp_path, 3)
    assert read_record(file) is None
    assert write_record(file, record) == file.stat().st_size
    found = read_record(file)
    assert found.columns.column_names == record.columns.column_names and found.step == 3
    assert not list(differences(record, found))
    scored, wanted = scored_of(found), scored_responses()
    np.testing.assert_array_equal(scored.mean_states, wanted.mean_states)
    for ours, theirs in zip(scored.metrics[KEY], wanted.metrics[KEY], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(scored, wanted, strict=True):
        assert (ours.verdict, ours.response) == (theirs.verdict, theirs.response)
        np.testing.assert_array_equal(ours.rollout.response_ids, theirs.rollout.response_ids)
    assert not list(differences(record, record_with(scored)))


def test_a_damaged_record_is_one_line(tmp_path):
    file = file_of(tmp_path, 3)
    write_record(file, record_with())
    content = file.read_bytes()
    for torn in (content[:-5], content[: len(content) // 2], b""):
        file.write_bytes(torn)
        refused("step_000003.parquet.*; remove it, and the step is compared", read_record, file)
    from semrl_jax.support import response_files

    response_files.write(file, record_with().columns.replace_schema_metadata({}))
    refused("is no record of a step; remove it", read_record, file)


def test_the_first_difference_of_each_stage_in_order():
    left = record_with()
    assert not list(differences(left, left))
    right = changed(left, "advantages", 1, 2)
    right = changed(right, "response_ids", 2, 3)
    right = right._replace(facts=right.facts | {"after": {"policy/a": (6, 8.5)}})
    found = list(differences(left, right))
    assert [each.stage for each in found] == ["tokens", "advantages", "weights"]
    assert found[0][2:7] == ("response_ids", 8, 9, 2, 3)
    assert str(found[0]) == (
        "step 3, tokens: response 2, token 3, response_ids 8 -> 9 (the log-probabilities of the "
        "engine are equal before it)"
    )
    (at_once, *_) = differences(left, changed(left, "response_ids", 2, 0))
    assert at_once.note == ""  # nothing is before it
    assert (found[1].what, found[1].row, found[1].token) == ("advantages", 1, 2)
    assert (found[2].what, found[2].left, found[2].right) == ("policy/a", 8.0, 8.5)


@pytest.mark.parametrize(
    "name, place, stage",
    [
        ("prompt_ids", 1, "prompts"), ("old_logprobs", 0, "log-probabilities"),
        ("rollout_logprobs", 3, "log-probabilities"), ("score", None, "rewards"),
        ("reward", None, "rewards"), ("metrics/effective_rank", None, "metrics"),
        ("mean_states", 5, "metrics"), ("advantages", 1, "advantages"),
    ],
)  # fmt: skip
def test_each_column_has_its_stage(name, place, stage):
    left = record_with()
    (found,) = differences(left, changed(left, name, 1, place))
    assert (found.stage, found.what, found.row, found.token) == (stage, name, 1, place)
    (found,) = differences(left, changed(left, name, 1, place, None if place is None else 8))
    assert found.stage == stage


def test_prompts_that_moved_or_are_missing_are_told_apart():
    left, scored = record_with(), scored_responses()
    (found, *_) = differences(left, record_with(scored.take([1, 0, 2, 3])))
    assert (found.stage, found.note) == ("prompts", "the same prompts in another order")
    (found, *_) = differences(left, record_with(scored.take([0, 1, 2])))
    assert (found.what, found.left, found.right) == ("number of responses", 4, 3)


def test_a_scalar_of_the_log_counts_for_its_stage():
    plain = StepRecord(3, record_with().columns.slice(0, 0), {})

    def found(left, right):
        pair = (plain._replace(facts={"row": row}) for row in (left, right))
        return [(each.stage, each.what) for each in differences(*pair)]

    assert not found({"reward/mean": 1.0, "time/step_s": 1.0}, {"reward/mean": 1, "x": 2})
    assert not found({"a": math.nan}, {"a": math.nan})
    rows = {"policy/loss": 1.0, "reward/mean": 2.0}, {"policy/loss": 1.1, "reward/mean": 3}
    assert found(*rows) == [("rewards", "reward/mean"), ("gradients", "policy/loss")]
    # With checksums of gradients, means over mini-batches count for the weights.
    left = record_with()
    row = {"reward/mean": 0.5, "policy/loss": 2.0}
    (found,) = differences(left, left._replace(facts=left.facts | {"row": row}))
    assert found.stage == "weights"


def test_keys_and_columns_have_a_stage():
    assert stage_of("reward/shaped/mean") == "advantages" and stage_of("reward/mean") == "rewards"
    assert stage_of("response/step_reward/mean") == "rewards" != stage_of("response/length/mean")
    assert stage_of("rollout/staleness") == "tokens" and stage_of("my/own") == "metrics"
    assert not is_compared("time/step_s") and not is_compared("rollout/token_bytes")
    assert is_compared("policy/grad_norm")
    named = {name for names in COLUMNS.values() for name in names}
    assert named <= {"score/", "metrics/", *ALL_COLUMNS}
    assert known([record_with()]) == (
        "rows of 1 step, responses of 1 step, gradients of 1 step, weights of 1 step"
    )
    assert set(COLUMNS) < set(STAGES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_changes_with_every_bit_and_not_with_the_order(dtype):
    import jax

    random = np.random.default_rng(0)
    values = np.asarray(jax.numpy.asarray(random.normal(size=(3, 8)), dtype))
    bits = values.view(f"uint{8 * values.dtype.itemsize}")
    factors = 2 * np.arange(values.size, dtype=np.uint64) + 1
    ((name, (sum_, norm)),) = on_host(array_sums({"a": {"b": values}})).items()
    assert name == "a/b"
    assert sum_ == int((bits.reshape(-1).astype(np.uint64) * factors).sum() % 2**32)
    np.testing.assert_allclose(norm, np.sqrt((values.astype(np.float64) ** 2).sum()), rtol=1e-6)
    for place in random.permutation(values.size)[:5]:
        for bit in (0, 8 * values.dtype.itemsize - 1):
            other = bits.copy().reshape(-1)
            other[place] ^= 1 << bit
            flipped = other.view(values.dtype).reshape(values.shape)
            assert on_host(array_sums({"a": {"b": flipped}}))["a/b"][0] != sum_
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    assert on_host(array_sums({"a": {"b": jax.device_put(values, spread)}}))["a/b"][0] == sum_
