"""Files of a run: rows, events, rollouts, the report, the directory."""

import dataclasses
import functools
import json
import types

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax.algorithms import group_relative_advantages
from semrl_jax.data import character_tokenizer, full_text
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.pages.report import write_report
from semrl_jax.runs import run
from semrl_jax.runs.records import MetricWriter, keep_damaged_log, remove_rollouts, write_rollouts
from semrl_jax.runs.trackers import TensorBoard
from semrl_jax.runs.workdir import open_workdir
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.rows import read_rows
from semrl_jax.training.probes.mismatch import logprob_mismatch, state_differences
from semrl_jax.training.rollout_batch import bucket, pad_batch
from semrl_jax.types import FINISH_REASONS, SamplingParams
from tests.cases import refused
from tests.fixtures import make_scored
from tests.launch.comparison import logged_events


def write_rows(path, steps, first_step=0, **scalars):
    writer = MetricWriter(path, first_step, [TensorBoard(path / "tensorboard", {})])
    for step in steps:
        writer.write(step, {"reward/mean": step / 10} | scalars)
    writer.close()


def test_a_damaged_log_is_kept(tmp_path):
    lines = []
    write_rows(tmp_path, range(4))
    keep_damaged_log(tmp_path, lines.append)
    assert lines == [] and not (tmp_path / "damaged_metrics.jsonl").exists()
    file = tmp_path / "metrics.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-5])  # of a kill: the last line has no end
    keep_damaged_log(tmp_path, lines.append)
    assert lines == []
    file.write_bytes(content.replace(b'"step": 1', b'"step" 1'))
    keep_damaged_log(tmp_path, lines.append)
    assert [line.startswith("line 2 of ") and "(3 lines)" in line for line in lines] == [True]
    assert (tmp_path / "damaged_metrics.jsonl").read_bytes() == file.read_bytes()


def test_tensorboard_has_the_settings_and_the_final_figures(tmp_path):
    tracker = TensorBoard(tmp_path, {"seed": 3, "data.files": ["a"], "model.path": ""})
    tracker.write(0, {"reward/mean": 0.5})
    tracker.close({"final/reward/mean": 0.5})
    events = {tag for tag, *_ in logged_events(tmp_path)}
    assert {"reward/mean", "final/reward/mean", "_hparams_/session_start_info"} <= events
    (file,) = tmp_path.iterdir()
    assert b"data.files" in file.read_bytes()


def test_no_step_occurs_twice_after_a_resume(tmp_path):
    write_rows(tmp_path, range(5))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')  # incomplete after a kill
    write_rows(tmp_path, range(3, 6), first_step=3)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(6))
    events = logged_events(tmp_path / "tensorboard")
    assert [step for tag, step, _ in events if tag == "reward/mean"] == list(range(6))


def test_rollout_files_of_repeated_steps_are_removed(tmp_path):
    """The evaluation of step s comes before the update of step s, so it is repeated."""
    scored = Scored.of([make_scored(i) for i in range(4)])
    for step in range(4):
        write_rollouts(tmp_path, step, scored, lambda ids: str(list(ids)))
        write_rollouts(tmp_path, step, scored, lambda ids: str(list(ids)), ["gsm8k"] * 4)
    (tmp_path / "step_000001.writing").write_bytes(b"torn")
    (tmp_path / "eval_000001.writing").write_bytes(b"torn")
    (tmp_path / "notes.parquet").write_bytes(b"of the user")
    remove_rollouts(tmp_path, 2)
    kept = [f"{kind}_00000{step}.parquet" for kind in ("eval", "step") for step in (0, 1)]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*kept, "notes.parquet"])


def test_recorded_responses_have_text_and_verdict(tmp_path):
    tokenizer = character_tokenizer()
    half = "\ud800"  # half a surrogate pair, as a verifier may extract from a JSON response
    eos, seven = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("7")
    scored = Scored(
        [
            make_scored(0, response_ids=np.array([seven, eos], np.int32), error="timeout"),
            make_scored(1, extracted=f"7{half}", response_ids=np.array([seven], np.int32)),
        ]
    )
    text = functools.partial(full_text, tokenizer)
    write_rollouts(tmp_path, 3, scored, text, ["gsm8k", "math500"])
    table = pq.read_table(tmp_path / "eval_000003.parquet")
    assert table.column("response").to_pylist() == ["7<eos>", "7"]
    assert table.column("extracted").to_pylist() == [None, "7?"]
    assert table.column("verifier_error").to_pylist() == ["timeout", ""]
    assert table.column("benchmark").to_pylist() == ["gsm8k", "math500"]
    write_rollouts(tmp_path, 3, scored[:1], text)
    training = pq.read_table(tmp_path / "step_000003.parquet")
    assert training.schema.names == [name for name in table.schema.names if name != "benchmark"]
    assert training.schema.field("extracted").type == table.schema.field("extracted").type
    parts = [make_scored(i, parts={"math": 0.5, "short": -float(i)}) for i in range(2)]
    write_rollouts(tmp_path, 5, Scored(parts), text)
    table = pq.read_table(tmp_path / "step_000005.parquet")
    assert table.column("score/math").to_pylist() == [0.5, 0.5]
    assert table.column("score/short").to_pylist() == [0.0, -1.0]
    # A benchmark with a verifier of its own has other parts, or none.
    parts = [make_scored(0, parts={"math": 0.5}), make_scored(1), make_scored(2, parts={"env": 1})]
    write_rollouts(tmp_path, 6, Scored(parts), text, ["mine", "gsm8k", "played"])
    table = pq.read_table(tmp_path / "eval_000006.parquet")
    assert table.column("score/math").to_pylist() == [0.5, None, None]
    assert table.column("score/env").to_pylist() == [None, None, 1.0]
    write_rollouts(tmp_path, 4, Scored(()), text, [])  # all problems are too long
    assert pq.read_table(tmp_path / "eval_000004.parquet").num_rows == 0


def test_recorded_responses_with_context_have_a_mask(tmp_path):
    masks = [np.array([True, False, True]), None]
    ids = np.array([5, 6, 1], np.int32)
    items = [make_scored(i, response_ids=ids, response_mask=m) for i, m in enumerate(masks)]
    scored = Scored(items)
    write_rollouts(tmp_path, 0, scored, str)
    table = pq.read_table(tmp_path / "step_000000.parquet")
    assert table.column("response_mask").to_pylist() == [[True, False, True], [True] * 3]
    write_rollouts(tmp_path, 1, scored[1:], str)
    names = pq.read_table(tmp_path / "step_000001.parquet").schema.names
    assert names == [name for name in table.schema.names if name != "response_mask"]


def test_rows_end_at_the_first_invalid_one(tmp_path):
    log = tmp_path / "metrics.jsonl"
    write_rows(tmp_path, range(3))
    whole = log.read_bytes()
    damages = b"[" * 100_000, b"[]", b"3", b'{"reward": 1}', b'{"step": "3"}', b'{"step": 3, "\xff'
    for damage in damages:
        log.write_bytes(whole + damage + b"\n")
        write_rows(tmp_path, range(3, 5), first_step=3)
        assert [row["step"] for row in read_rows(log)] == list(range(5))


def test_no_file_of_a_run_is_written_through_a_link(config, tmp_path):
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    run = tmp_path / "run"
    open_workdir(str(run), config).close()
    (run / "rollouts").mkdir()
    for name in (
        "metrics.jsonl", "metrics.writing", "curves.png", "curves.writing", "report.html",
        "report.writing", "rollouts/step_000001.parquet", "rollouts/step_000001.writing",
    ):  # fmt: skip
        (run / name).symlink_to(target)
    remove_rollouts(run / "rollouts", 2)
    assert [file.name for file in (run / "rollouts").iterdir()] == ["step_000001.parquet"]
    (run / "rollouts" / "step_000001.writing").symlink_to(target)
    write_rows(run, range(3))
    write_rollouts(run / "rollouts", 1, Scored.of([make_scored(i) for i in range(4)]), str)
    write_report(run)
    assert target.read_text() == "years of work"
    assert not [path for path in run.rglob("*") if path.is_symlink()]
    (run / "metrics.jsonl").unlink()
    writer = MetricWriter(run, 0, [TensorBoard(run / "tensorboard", {})])
    writer.close()
    assert (run / "metrics.jsonl").read_text() == ""


def test_drawings_of_a_long_log_take_a_tenth_of_the_time(config, monkeypatch):
    now, drawn = [1000.0], []
    config.logging.plot_every_steps = 2
    checkpoints = types.SimpleNamespace(due=lambda *_: False)
    training = run.Run(config, None, checkpoints, None, None, None, leads=True)

    def draw(self):
        drawn.append(step)
        now[0] += 10.0  # with each row it takes longer

    monkeypatch.setattr(run.Run, "draw_report", draw)
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    for step in range(1, 101):
        now[0] += 4.0
        training.keep(types.SimpleNamespace(step=step))
    assert drawn == [2, 26, 50, 74, 98]


def test_statistics_match_values_computed_by_hand():
    metrics = [
        {MetricKey("effective_rank"): Measurement(value, value > 0)}
        for value in (4.0, 2.0, 0.0, 8.0)
    ]
    items = [
        make_scored(0, score=1.0, metrics=metrics[0]),
        make_scored(1, score=-1.0, metrics=metrics[1], finish_reason="length"),
        make_scored(2, score=-1.0, metrics=metrics[2], response_ids=np.array([1], np.int32)),
        make_scored(3, score=1.0, metrics=metrics[3], error="timeout"),
    ]
    scored = Scored.of(items)
    rewards = np.array([[1, -1], [-1, -1]], np.float32)
    scalars = batch_scalars(scored, rewards)
    assert scalars["reward/correct"] == 0.5
    assert scalars["reward/mean"] == -0.5
    assert scalars["reward/zero_variance_group_fraction"] == 0.5
    assert scalars["reward/verifier_error_fraction"] == 0.25
    assert scalars["response/length/mean"] == 7 / 4
    assert scalars["response/length_fraction"] == 0.25
    assert scalars["metrics/effective_rank/mean"] == 14 / 3
    assert scalars["metrics/effective_rank/correct"] == 6
    assert scalars["metrics/effective_rank/correct_max"] == 8
    assert scalars["metrics/effective_rank/correct_min"] == 4
    assert scalars["response/length_fraction/incorrect"] == 0.5
    assert scalars["response/length_fraction/correct"] == 0
    assert scalars["prompt/length/max"] == scalars["prompt/length/min"] == 2
    assert scalars["metrics/effective_rank/incorrect"] == 2
    assert scalars["metrics/effective_rank/valid_fraction"] == 0.75
    assert not any(key.startswith("reward/math/") for key in scalars)
    parts = [make_scored(i, parts={"math": 0.5, "short": -float(i)}) for i in range(4)]
    scalars = batch_scalars(Scored(parts), rewards)
    assert (scalars["reward/math/mean"], scalars["reward/short/mean"]) == (0.5, -1.5)
    values, valid = scored.metrics[MetricKey("effective_rank")]
    np.testing.assert_array_equal(values, [4, 2, 0, 8])
    np.testing.assert_array_equal(valid, [True, True, False, True])


def test_lengths_and_mismatches_count_only_policy_tokens():
    masks = [np.array([True, False, True, True]), np.array([False, True])]
    ids = [np.ones(len(mask), np.int32) for mask in masks]
    scored = [
        make_scored(i, response_ids=row, response_mask=mask)
        for i, (row, mask) in enumerate(zip(ids, masks))
    ]
    scalars = batch_scalars(Scored(scored), np.zeros((1, 2), np.float32))
    assert (scalars["response/length/max"], scalars["response/length/min"]) == (3, 1)
    # The engine gave -(t + 1) to response token t. Context and padding hold arbitrary values.
    old = np.array([[-1.5, 99, -3, -4], [99, -2, 99, 99]], np.float32)
    rollouts = [item.rollout for item in scored]
    found = logprob_mismatch(rollouts, old, SamplingParams(1))
    assert found["rollout/logprob_mismatch/max"] == 0.5
    assert found["rollout/logprob_mismatch/mean"] == 0.125
    # The engine sent a state for each response token, the policy has only those of its tokens.
    states = np.repeat(np.array([1, np.nan, 1, 2], np.float32), 2).reshape(4, 1, 2)
    rollout = dataclasses.replace(rollouts[0], hidden_states=states, layers=(-1,))
    with_states = [dataclasses.replace(scored[0], rollout=rollout), scored[1]]
    ours = {0: np.ones((3, 2), np.float32), 1: np.ones((1, 2), np.float32)}
    assert state_differences(with_states, ours) == {"count": 3.0, "sum": 1.0, "max": 1.0}


def test_fractions_of_finish_reasons_sum_to_one():
    reasons = [*FINISH_REASONS, "eos"]
    scored = Scored([make_scored(i, finish_reason=reason) for i, reason in enumerate(reasons)])
    scalars = batch_scalars(scored, np.zeros((1, len(scored)), np.float32))
    found = {r: scalars[f"response/{r}_fraction"] for r in FINISH_REASONS}
    assert found == {r: reasons.count(r) / len(reasons) for r in FINISH_REASONS}


@pytest.mark.parametrize("reward", [0.6, 0.1, -1.0])
def test_zero_variance_groups_are_the_groups_without_advantages(reward):
    """The float32 mean of seven rewards of 0.6 is rounded; their standard deviation is 6e-8."""
    rewards = np.full((4, 7), reward, np.float32)
    rewards[0, 3] = np.nextafter(rewards[0, 3], np.float32(9))
    scored = Scored([make_scored(i, group_size=7) for i in range(28)])
    advantages = group_relative_advantages(jnp.asarray(rewards))
    without = float(np.mean(np.all(np.asarray(advantages) == 0, axis=1)))
    assert without == 0.75
    scalars = batch_scalars(scored, rewards)
    assert scalars["reward/zero_variance_group_fraction"] == without


@pytest.mark.parametrize(
    ("temperature", "options", "raw", "largest"),
    [
        (0.5, {}, False, 0.25),  # both of the model's own distribution, at any temperature
        (1.0, {"top_p": 0.5}, True, 0.125),
        (1.0, {"top_k": 2}, True, 0.125),
        (1.0, {"min_p": 0.1}, True, 0.125),
        (1.0, {"presence_penalty": -1.0}, True, 0.125),
        (1.0, {"frequency_penalty": 1.0}, True, 0.125),
        (1.0, {"repetition_penalty": 1.1}, True, 0.125),
        (1.0, {"min_tokens": 2}, True, 0.125),
        (0.5, {"top_p": 0.5}, True, None),  # raw log-probabilities are at temperature 1
        (1.0, {"top_p": 0.5}, False, None),
    ],
)
def test_only_log_probabilities_of_one_distribution_are_compared(
    temperature, options, raw, largest
):
    old = np.array([[-1, -2, 7], [-3, 7, 7]], np.float32)
    lengths, rollouts = (2, 1), []
    for row, length in zip(old, lengths):
        fields = {"rollout_logprobs": row[:length] + np.float32(0.25)}
        if raw:
            fields["rollout_raw_logprobs"] = row[:length] - np.float32(0.125)
        rollout = make_scored(response_ids=np.ones(length, np.int32)).rollout
        rollouts.append(dataclasses.replace(rollout, **fields))
    sampling = SamplingParams(1, temperature, **options)
    scalars = logprob_mismatch(rollouts, old, sampling)
    assert set(scalars.values()) == ({largest} if largest else set())


def test_padding_matches_values_written_by_hand():
    scored = [
        make_scored(0),
        make_scored(1, response_ids=np.array([6, 7, 8], np.int32)),
    ]  # fmt: skip
    batch = pad_batch(
        [item.rollout for item in scored], pad_token_id=9,
        max_prompt_tokens=3, max_response_tokens=4,
    )  # fmt: skip
    np.testing.assert_array_equal(batch.token_ids, [[9, 3, 4, 5, 1, 9, 9], [9, 3, 4, 6, 7, 8, 9]])
    np.testing.assert_array_equal(batch.positions, [[0, 0, 1, 2, 3, 0, 0], [0, 0, 1, 2, 3, 4, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.response_mask, batch.segment_ids[:, 3:] == 1)
    np.testing.assert_array_equal(batch.response_ids, [[5, 1, 9, 9], [6, 7, 8, 9]])
    np.testing.assert_array_equal(batch.rollout_logprobs, [[-1, -2, 0, 0], [-1, -2, -3, 0]])
    mask = np.array([False, True, True])
    context = make_scored(2, response_ids=np.array([6, 7, 8], np.int32), response_mask=mask)
    (row,) = pad_batch(
        [context.rollout], pad_token_id=9, max_prompt_tokens=2, max_response_tokens=4
    ).response_mask
    np.testing.assert_array_equal(row, [False, True, True, False])
    assert [bucket(n, 100) for n in (1, 16, 17, 64, 65, 100)] == [16, 16, 32, 64, 100, 100]


def test_a_directory_belongs_to_one_run_at_a_time(config, tmp_path):
    first = open_workdir(str(tmp_path / "run"), config)
    assert not first.resumed
    refused("belongs to a run that still runs", open_workdir, str(tmp_path / "run"), config)
    first.close()
    config.training.num_steps = 7
    second = open_workdir(str(tmp_path / "run"), config)
    assert second.resumed and second.run_id == first.run_id
    assert second.attempt_id != first.attempt_id
    assert second.changed == ("training.num_steps: 3 -> 7",)
    second.close()
    config.seed = 5
    refused(r"another config \(seed: 0 -> 5\)", open_workdir, str(tmp_path / "run"), config)


def test_a_run_older_than_a_setting_had_its_default(config, tmp_path):
    open_workdir(str(tmp_path / "run"), config).close()
    file = tmp_path / "run" / "config.json"
    record = json.loads(file.read_text())
    del record["config"]["training"]["pack_sequences"], record["config"]["critic"]
    del record["config"]["rollout"]["top_p"]
    file.write_text(json.dumps(record))
    config.rollout.top_p = 0.5  # may differ, although it is no setting of a resumed run
    reopened = open_workdir(str(tmp_path / "run"), config)
    reopened.close()
    assert reopened.changed == ("rollout.top_p: 1.0 -> 0.5",)


def test_characters_of_turns_are_recorded_unless_the_parts_make_another_text(tmp_path):
    ids, mask = np.array([10, 11, 12, 9], np.int32), np.array([True, True, False, True])
    rewards = np.zeros(2, np.float32)
    item = make_scored(response_ids=ids, response_mask=mask, turn_rewards=rewards)
    for step, separator in enumerate(("", ",")):
        text = functools.partial(_joined_by, separator)
        write_rollouts(tmp_path, step, Scored([item]), text)
    found = [
        pq.read_table(tmp_path / f"step_00000{step}.parquet")["turn_characters"].to_pylist()
        for step in range(2)
    ]
    assert found == [[[4, 2, 1]], [[]]]


def _joined_by(separator, ids):
    return separator.join(map(str, ids))
