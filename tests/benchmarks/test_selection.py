"""Selection by measures, pairs of equal length, the linear probe, and the share between prompts."""

import math
import re

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.evidence import selection
from semrl_jax.analysis.measures import RANKS, StudiedResponse
from semrl_jax.evaluation.protocols import PerProblem

CORRECT = np.array([[True, False, False, False], [False, True, True, False], [False] * 4])


def test_the_highest_value_is_chosen_and_ties_are_shared():
    values = np.array([[3.0, 1, 2, 0], [5, 5, 1, 0], [1, 2, 3, 4]])
    assert selection.chosen(values, CORRECT).tolist() == [1.0, 0.5, 0.0]
    values[0, 0] = math.nan
    assert selection.chosen(values, CORRECT).tolist() == [0.0, 0.5, 0.0]
    same = np.zeros((3, 4))
    np.testing.assert_array_equal(selection.chosen(same, CORRECT), CORRECT.mean(axis=1))


def test_pairs_are_of_one_prompt_and_of_nearly_equal_lengths():
    values = np.array([[2.0, 1, 3, 2], [1, 1, math.nan, 9], [0] * 4])
    lengths = np.array([[10.0, 10, 11, 20], [10, 10, 10, 11], [10] * 4])
    # First prompt: above 1, below 3, and the last is too long. Second: equal to 1, below 9.
    found = selection.pairs_above(values, CORRECT, lengths)
    assert found.values.tolist() == [0.5, 0.25, 0.0] and found.weights.tolist() == [2, 2, 0]
    # Two prompts say nothing about the spread over prompts.
    assert all(map(math.isnan, selection.with_interval(found)))
    many = PerProblem(np.tile(found.values, 3), np.tile(found.weights, 3))
    mean, low, high = selection.with_interval(many)
    assert mean == 0.375 and low <= mean <= high


@pytest.mark.parametrize("num_mixed", [8, 40])
def test_a_random_choice_is_neither_better_nor_worse(num_mixed):
    """The interval leaves out 0 in at most 2.5 % of cases on each side."""
    rng = np.random.default_rng(0)
    correct = np.zeros((100, 8), bool)
    correct[:num_mixed, 0] = True
    found = np.array([selection.gained(rng.random((100, 8)), correct) for _ in range(400)])
    mean, low, high = found.T
    assert abs(mean.mean()) < 0.003 and (low <= mean).all() and (mean <= high).all()
    # 2.5 % of 400 cases are 10, and by chance up to 16.
    assert np.sum(high < 0) <= 16 and np.sum(low > 0) <= 16


def test_the_majority_counts_equal_answers():
    answers = np.array([["4", "5", "4", "4"]])
    assert selection.majority(answers).tolist() == [[3.0, 1.0, 3.0, 3.0]]
    # Responses without an answer do not agree on one.
    answers = np.array([["", "", "", "4"]])
    assert selection.majority(answers).tolist() == [[0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("signal", [0.0, 3.0])
def test_the_probe_finds_a_direction_of_other_prompts(signal):
    rng = np.random.default_rng(0)
    correct = rng.random((60, 8)) < 0.4
    inputs = rng.normal(size=(60, 8, 20))
    inputs[:, :, 3] += signal * correct
    found = selection.chosen(selection.probed(inputs, correct), correct).mean()
    # Chance gives 0.4, with a standard deviation of 0.06 over 60 prompts.
    assert found > 0.9 if signal else found < 0.6


def test_the_share_between_prompts():
    rng = np.random.default_rng(0)
    own = rng.normal(size=(4000, 1))
    assert selection.between_prompts(np.repeat(own, 8, axis=1) + 0) == pytest.approx(1.0)
    noise = rng.normal(size=(4000, 8))
    # The share is 4 / 5 and 0; its standard error is below 0.01.
    assert selection.between_prompts(2 * own + noise) == pytest.approx(0.8, abs=0.02)
    assert selection.between_prompts(noise) == pytest.approx(0.0, abs=0.02)
    # A response without a value counts neither as one nor against its prompt.
    values = 2 * own + noise
    values[rng.random(values.shape) < 0.4] = math.nan
    assert selection.between_prompts(values) == pytest.approx(0.8, abs=0.02)
    assert math.isnan(selection.between_prompts(np.full((9, 8), math.nan)))


def test_a_setting_changes_how_a_population_is_measured(tmp_path, monkeypatch):
    states = np.random.default_rng(0).normal(3.0, size=(4, 20, 6)).astype(np.float32)
    responses = [StudiedResponse(i, 0, rows) for i, rows in enumerate(states)]
    monkeypatch.setattr(selection, "of_generated", lambda *arguments: (iter(responses), ""))
    columns = {"group_id": range(4), "sample_index": [0] * 4, "benchmark": ["sums"] * 4}
    columns["extracted"] = ["1", "$1$", None, "2"]
    pq.write_table(pa.table(columns), tmp_path / selection.RESPONSES)

    def measured(**setting):
        return selection.populations(tmp_path, None, selection.Setting(**setting))["sums"]

    def effective_ranks(rows):
        p = np.linalg.svd(rows, compute_uv=False)
        p /= p.sum(axis=1, keepdims=True)
        return np.exp(-np.sum(p * np.log(p), axis=1))

    centred = states - states.mean(axis=1, keepdims=True)
    default, raw = measured(), measured(centred=False)
    # The error of the default method, "gram".
    np.testing.assert_allclose(default[RANKS[0]], effective_ranks(centred), rtol=1e-3)
    np.testing.assert_allclose(raw[RANKS[0]], effective_ranks(states), rtol=1e-3)
    assert all((raw[name] != default[name]).all() for name in RANKS)
    assert default["answer"].tolist() == ["1", "1", "", "2"]
    rounded = states.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(measured(bfloat16=True)["features"][:, 6:], rounded[:, -1])
    assert np.isnan(measured(stride=16)[RANKS[2]]).all()  # 20 tokens have one window


def test_figures_of_a_population_and_their_tables():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 8)
    correct = rng.random(240) < 0.5
    length = rng.integers(20, 40, 240).astype(float)
    table = {
        "group_id": groups, "sample_index": np.tile(np.arange(8), 30),
        "correct": correct.astype(float), "length": length,
        "answer": np.where(correct, "1", rng.integers(2, 50, 240).astype(str)),
        "features": rng.normal(size=(240, 6)), "mean_logprob": rng.normal(size=240),
        "effective_rank": length + rng.normal(size=240),
        "effective_rank_velocity": length + rng.normal(size=240),
        "effective_rank_acceleration": correct + 0.1 * rng.normal(size=240),
    }  # fmt: skip
    found = selection.figures(table)
    assert found["prompts"] == 30 and found["random"] == pytest.approx(correct.mean())
    gain, low, _ = found["select"]["ERA"]
    assert gain == pytest.approx(found["any"] - found["random"]) and low > 0
    assert found["above"]["ERA"][0] > 0.95 and 0.3 < found["above"]["log-probability"][0] < 0.7
    assert found["r"]["ER, ERV, all"][0] > 0.9 and abs(found["r"]["ER, ERV, equal length"][0]) < 0.3
    assert found["select"]["longest"] != found["select"]["length"]
    assert {"ERA, correct, all", "ERA, correct, equal length"} <= set(found["r"])
    other = selection.compared(table, table)
    assert other["like"] == pytest.approx(dict.fromkeys(("ER", "ERV", "ERA"), 1.0))
    populations = {"one": found | {"others": {"stride 8": other}}}
    text = selection.section({"populations": populations, "machine": "a machine"})
    assert len(re.findall(r"\| one \| -?0\.\d\d \(", text)) == 2  # pairs, and r with correctness
    assert "| one | 30 | 30 | 30 |" in text and "| stride 8 | 1 | " in text
    places = selection.draw(populations).axes
    assert [len(place.lines) for place in places] == [8, 8]  # seven measures and the random choice


@pytest.mark.parametrize(
    "names, message",
    [((), "--names is needed"), (("--names", "none"), "none has no responses.parquet")],
)
def test_what_is_missing_is_one_line(tmp_path, monkeypatch, names, message):
    monkeypatch.setattr("sys.argv", ["selection", "measure", f"--output={tmp_path}", *names])
    with pytest.raises(SystemExit, match=message):
        selection.main()
