"""The table and the rank curves of single responses."""

import csv
import io
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from semrl_jax import analysis
from semrl_jax.analysis import responses
from tests.oracles import metrics as oracle

STRIDE = 8
LENGTHS = (40, 26, 16, 4, 1, 0)
ORACLE = {
    "effective_rank": oracle.effective_rank,
    "traditional_rank": oracle.traditional_rank,
    "response_entropy": oracle.response_entropy,
    "curvature": oracle.curvature,
}


@pytest.fixture(scope="module")
def batch():
    """Six responses: four too short for some metrics, gaps in the first, NaN outside the masks."""
    rng = np.random.default_rng(0)
    states = np.full((6, 44, 12), np.nan, np.float32)
    mask = np.zeros((6, 44), bool)
    for i, length in enumerate(LENGTHS):
        where = np.sort(rng.permutation(44)[:length]) if i == 0 else np.arange(length)
        states[i, where] = rng.normal(size=(length, 12)) * rng.uniform(0.3, 2, size=12)
        mask[i, where] = True
    return states, mask


@pytest.fixture(scope="module")
def measured(batch):
    return analysis.measure_responses(*batch, stride=STRIDE)


def test_metrics_are_those_of_the_oracle(batch, measured):
    np.testing.assert_array_equal(measured["tokens"], LENGTHS)
    for i, (states, mask) in enumerate(zip(*batch)):
        rows = states[mask]
        velocity, acceleration = oracle.orders(
            oracle.series(oracle.effective_rank, rows, STRIDE, "exact")
        )
        expected = {name: metric(rows) for name, metric in ORACLE.items()}
        if len(rows) < 2:
            expected = dict.fromkeys(expected)
        elif len(rows) < 3:
            expected["curvature"] = None
        expected["effective_rank_velocity"] = velocity
        expected["effective_rank_acceleration"] = acceleration
        for name, value in expected.items():
            value = math.nan if value is None else value
            # 1e-3 is what "gram" promises; the differences lose a digit of the ranks' 10.
            np.testing.assert_allclose(measured[name][i], value, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "window", ["exact", pytest.param("release", marks=pytest.mark.soak), "later"]
)
@pytest.mark.parametrize("num_tokens", [700, 90])
def test_the_orders_follow_from_the_curve(window, num_tokens):
    rows = np.random.default_rng(1).normal(size=(1, 700, 6)).astype(np.float32)
    rows *= np.linspace(0.1, 1, 700)[:, None]
    mask = np.arange(700)[None] < num_tokens
    curve = analysis.rank_curve(rows[0], mask[0], stride=100, window=window)
    measured = analysis.measure_responses(rows, mask, stride=100, window=window)
    for value, name in zip(oracle.orders(curve.effective_rank), ("velocity", "acceleration")):
        expected = math.nan if value is None else value
        found = measured[f"effective_rank_{name}"]
        np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-4)
    if len(curve.num_tokens):
        last = {"exact": num_tokens // 100 * 100, "later": num_tokens}
        assert curve.num_tokens[-1] == last.get(window, (min(num_tokens, 512) - 1) // 100 * 100 + 1)


def test_curve_of_broken_states_is_empty(batch):
    curve = analysis.rank_curve(batch[0][1], np.ones(44, bool), stride=STRIDE)
    assert len(curve.num_tokens) == len(curve.effective_rank) == 0


def test_broken_states_are_shown_as_invalid(batch, tmp_path):
    states, mask = batch
    measured = analysis.measure_responses(states[:2], mask[[0, 0]], stride=STRIDE)
    text = io.StringIO()
    Console(file=text, width=120).print(analysis.response_table(measured))
    lines = [line.strip(" │").split("│") for line in text.getvalue().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells[1] == ["1", "40", *"------"]
    rank = measured["effective_rank"][0]
    assert cells[0][:2] == ["0", "40"] and cells[0][2] == f"{rank:.4g}"
    assert cells[2][0] == "mean" and cells[2][2:] == cells[0][2:]  # the valid one alone
    assert cells[3][0] == "valid" and cells[3][-1] == "1/2"
    analysis.write_columns(tmp_path / "metrics.csv", measured)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert list(rows[0]) == ["response", "tokens", *responses.LABELS]
    assert float(rows[0]["effective_rank"]) == rank
    assert set(list(rows[1].values())[2:]) == {""}


def test_a_long_table_is_truncated(measured):
    many = {name: np.resize(values, 100) for name, values in measured.items()}
    text = io.StringIO()
    Console(file=text, width=120).print(analysis.response_table(many))
    assert text.getvalue().count("\n") < 60 and "60 more" in text.getvalue()


def test_the_mean_is_drawn_while_half_of_the_responses_last(batch, tmp_path):
    states, mask = batch
    curves = [analysis.rank_curve(*response, stride=STRIDE) for response in zip(states, mask)]
    assert [len(curve.num_tokens) for curve in curves] == [5, 3, 2, 0, 0, 0]
    figure = analysis.draw_rank_curves(curves)
    *lines, mean = figure.axes[0].get_lines()
    assert len(lines) == 3
    np.testing.assert_array_equal(mean.get_xdata(), [8, 16, 24])  # beyond that, one curve is left
    np.testing.assert_allclose(
        mean.get_ydata()[:2], np.mean([c.effective_rank[:2] for c in curves[:3]], axis=0)
    )
    analysis.write_rank_curves(tmp_path / "curves.csv", curves)
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert len(rows) == 10
    assert float(rows[5]["effective_rank"]) == curves[1].effective_rank[0]
    assert rows[5]["response"] == "1" and rows[5]["tokens"] == "8"
    empty = analysis.draw_rank_curves(curves[3:])
    assert isinstance(empty, Figure) and "no response" in empty.axes[0].texts[0].get_text()
