"""Differences between runs on the same problems, and the CSV of their rows."""

import csv

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax.pages.report import page, reading, several_runs
from semrl_jax.runs.records import write_rollouts
from semrl_jax.sampling.scoring import Scored
from tests.pages.report.making import add_row, make_run, scored, text_of
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs; the second solves one problem more at every step, of another learning rate."""
    directory, config = tmp_path_factory.mktemp("runs"), tiny_config()
    first = make_run(directory / "first", config, gain=0.02)
    config.training.learning_rate = 0.5
    return first, make_run(directory / "second", config, gain=0.03)


def test_seeds_of_a_setting_are_one_variant(tmp_path):
    config, paths = tiny_config(), []
    for rate in (0.5, 0.25):
        for seed in range(2):
            config.training.learning_rate, config.seed = rate, seed
            config.logging.plot_every_steps = seed
            paths.append(make_run(tmp_path / f"{rate}-{seed}", config))
    figures = page.figures(reading.read_runs(paths))
    assert figures["variants"] == ["training.learning_rate=0.5", "training.learning_rate=0.25"]
    assert [run["variant"] for run in figures["runs"]] == [0, 0, 1, 1]
    assert len(figures["pace"]) == 2
    alone = page.figures(reading.read_runs(paths[:2]))
    assert alone["variants"] == [""] and [run["variant"] for run in alone["runs"]] == [0, 0]


def test_differences_are_paired_by_problem(runs):
    rows = several_runs.paired(reading.read_runs(runs))
    assert [(row["step"], row["benchmark"], row["run"]) for row in rows] == [
        (0, "sums", 1), (4, "sums", 1), (8, "sums", 1),
    ]  # fmt: skip
    last = rows[-1]
    assert (last["problems"], last["first"], last["other"]) == (8, 4 / 8, 5 / 8)
    # One of 8 problems differs: mean 1/8, sample variance (1 - 1/8) / 7 = 1/8.
    assert last["difference"] == 1 / 8
    assert last["half"] == pytest.approx(1.96 * np.sqrt(1 / 8 / 8), rel=1e-12)


def test_several_samples_of_a_problem_are_averaged_and_other_problems_are_left_out(tmp_path):
    config, found = tiny_config(), []
    for name, solved in (("a", (0, 1)), ("b", (0, 1, 2, 3))):
        run = make_run(tmp_path / name, config, num_steps=1)
        samples = [scored(i, correct=i in solved, group_size=2) for i in range(4)]
        other = [scored(i, correct=True, group_size=1) for i in range(2 if name == "a" else 3)]
        names = ["twice"] * 4 + ["other"] * len(other)
        write_rollouts(run / "rollouts", 5, Scored.of(samples + other), text_of, names)
        found.append(run)
    rows = several_runs.paired(reading.read_runs(found))
    assert [row["benchmark"] for row in rows] == ["sums", "twice"]
    assert (rows[1]["first"], rows[1]["other"], rows[1]["problems"]) == (0.5, 1.0, 2)
    assert rows[1]["half"] == pytest.approx(1.96 * np.sqrt(0.5 / 2), rel=1e-12)


def test_an_unreadable_evaluation_is_named(tmp_path):
    runs = [make_run(tmp_path / name, tiny_config(), num_steps=5) for name in ("a", "b")]
    file = runs[1] / "rollouts" / "eval_000004.parquet"
    table = pq.read_table(file)
    without = table.drop(["correct"])
    for damaged in (without, without.append_column("correct", pa.nulls(8, pa.bool_()))):
        pq.write_table(damaged, file)
        notes = []
        rows = several_runs.paired(reading.read_runs(runs), notes)
        assert [row["step"] for row in rows] == [0]
        assert notes == [
            "b/rollouts/eval_000004.parquet cannot be read; no accuracies are compared at step 4."
        ]


def test_mean_times_are_of_all_rows_although_evaluations_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_ROWS", 10)
    run = make_run(tmp_path / "run", tiny_config(), num_steps=0)
    for step in range(100):
        evaluated = {"eval/a/mean_score": 1.0, "time/evaluate_s": 9.0} if step % 10 == 0 else {}
        add_row(run, step, {"time/step_s": 10.0, "time/sample_s": 1.0, **evaluated})
    (shown,) = page.figures(reading.read_runs([run]))["runs"]
    assert len(shown["steps"]) < 25
    assert shown["stage_means"] == pytest.approx(
        {"time/sample_s": 1.0, "time/evaluate_s": 0.9, "time/other_s": 8.1}
    )


def test_the_page_of_several_runs_has_the_settings_that_differ(runs):
    figures = page.figures(reading.read_runs(runs))
    assert figures["title"] == "first, second" and len(figures["paired"]) == 3
    differ = [field for field, _, *values in figures["settings"] if len(set(values)) > 1]
    assert differ == ["training.learning_rate"]


def test_the_csv_has_the_rows_of_all_runs(runs, tmp_path):
    logs = reading.read_runs(runs)
    several_runs.write_csv(tmp_path / "rows.csv", logs)
    with open(tmp_path / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["first"] * 12 + ["second"] * 12
    for row, expected in zip(rows, [*logs[0].rows, *logs[1].rows]):
        found = {key: float(value) for key, value in row.items() if key != "run" and value}
        assert found == expected
