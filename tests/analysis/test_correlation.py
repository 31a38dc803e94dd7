"""Correlations of ER with ERV and ERA: coefficients, responses of a run."""

import csv
import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from semrl_jax import analysis
from semrl_jax.analysis.correlation import Correlation
from semrl_jax.analysis.study_sources import of_run, states_of_run
from semrl_jax.runs import train
from semrl_jax.support.errors import UserError
from tests.launch.tiny_config import get_config
from tests.oracles import metrics as oracle


def correlation_of(tokens, rank, velocity, acceleration):
    arrays = [np.asarray(x, np.float32) for x in (rank, velocity, acceleration)]
    return Correlation("here", "exact", 4, np.asarray(tokens), *arrays)


def test_coefficients_by_hand():
    # ERV follows ER; ERA is orthogonal to it.
    found = correlation_of([8] * 4, [1, 2, 3, 4], [2, 4, 6, 8], [1, -1, -1, 1])
    np.testing.assert_allclose(found.with_rank("velocity"), 1.0)
    np.testing.assert_allclose(found.with_rank("acceleration"), 0.0, atol=1e-7)
    # All lengths are equal, so nothing is subtracted.
    np.testing.assert_allclose(found.with_rank("velocity", equal_length=True), 1.0)


def test_a_correlation_by_length_alone_disappears_at_equal_length():
    rng = np.random.default_rng(0)
    tokens, a, b = rng.integers(50, 500, size=400), *rng.normal(size=(2, 400))
    found = correlation_of(tokens, tokens + a, 0.25 * tokens + b, a)
    assert found.with_rank("velocity") > 0.99
    # The |r| of 400 independent pairs stays below 3 / sqrt(400).
    assert abs(found.with_rank("velocity", equal_length=True)) < 0.15
    assert (
        found.with_rank("acceleration", equal_length=True)
        > 0.99
        > 0.15
        > found.with_rank("acceleration")
    )


def test_a_correlation_that_does_not_exist_is_nan():
    two = correlation_of([8, 9], [1, 2], [1, 2], [1, 2])
    constant = correlation_of([8, 9, 10], [1, 2, 4], [3, 3, 3], [1.1, 1.1, 1.1])
    # In proportion to the length except for float32: at equal length, only rounding remains.
    line = correlation_of([8, 9, 10, 13], [0.8, 0.9, 1.0, 1.3], [1, 5, 2, 3], [0, 1, 0, 0])
    for value in (
        two.with_rank("velocity"),
        constant.with_rank("velocity"),
        constant.with_rank("acceleration"),
        line.with_rank("velocity", equal_length=True),
    ):
        assert np.isnan(value)
    assert not np.isnan(line.with_rank("velocity"))


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)
    responses = [rng.normal(size=(n, 6)).astype(np.float32) for n in (20, 33, 40, 47, 64)]
    responses[3] *= np.linspace(0.1, 3, 6, dtype=np.float32)
    return responses, analysis.correlate(responses, strides=(10,), windows=("exact", "later"))


def test_responses_are_measured_as_the_oracle_does(found):
    responses, correlations = found
    assert [(c.window, c.stride) for c in correlations] == [("exact", 10), ("later", 10)]
    for c, num_short in zip(correlations, (1, 1)):  # 20 tokens: two windows, no ERA
        assert len(c.tokens) == 5 - num_short
        for i, rows in enumerate(responses[num_short:]):
            assert c.tokens[i] == len(rows)
            expected = oracle.orders(oracle.series(oracle.effective_rank, rows, 10, c.window))
            np.testing.assert_allclose(c.effective_rank[i], oracle.effective_rank(rows), rtol=1e-3)
            # "gram" is accurate to 1e-3, and the ranks are near 5.
            np.testing.assert_allclose(
                [c.velocity[i], c.acceleration[i]], expected, atol=5e-3, err_msg=c.window
            )
        ranks = [oracle.effective_rank(rows) for rows in responses[num_short:]]
        np.testing.assert_allclose(
            c.with_rank("velocity"), np.corrcoef(ranks, c.velocity)[0, 1], atol=1e-2
        )


def test_table_file_and_picture_hold_every_correlation(found, tmp_path):
    correlations = [*found[1], correlation_of([8, 9], [1, 2], [1, 2], [1, 2])]
    text = io.StringIO()
    Console(file=text, width=80).print(analysis.correlation_table(correlations))
    assert "…" not in text.getvalue()  # fits if the output is not a terminal
    lines = text.getvalue().splitlines()
    assert any(f"{correlations[0].with_rank('velocity'):.2f}" in line for line in lines)
    analysis.write_correlations(tmp_path, "c", correlations)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert float(rows[1]["r_acceleration"]) == correlations[1].with_rank("acceleration")
    assert [row["responses"] for row in rows] == ["4", "4", "2"] and rows[2]["r_velocity"] == ""
    figure = analysis.draw_correlations(correlations)
    assert len(figure.axes) == 4  # two orders by two windows
    drawn = figure.axes[0].collections[0].get_offsets()
    np.testing.assert_allclose(drawn[:, 1], correlations[0].velocity, rtol=1e-6)


@pytest.mark.slow
def test_the_states_of_a_run_are_those_it_measured(tmp_path):
    config = get_config()
    config.training.num_steps = 3
    config.hidden_states.dtype = "float32"
    config.logging.rollouts_every_steps = 1
    config.checkpoints.every_steps = 2
    config.checkpoints.extra_steps = ()
    assert train(config, str(tmp_path / "run")) == 0
    states, stride = states_of_run(tmp_path / "run")
    assert stride == config.metrics.stride
    assert set(states) == {0, 2}  # step 1 left no weights
    for step, responses in states.items():
        file = tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet"
        table = pq.read_table(file).to_pydict()
        assert [len(rows) for rows in responses] == [len(ids) for ids in table["response_ids"]]
        for rows, expected in zip(responses, table["metrics/effective_rank"]):
            # The same weights, decoded token by token there and in one pass here.
            np.testing.assert_allclose(oracle.effective_rank(rows), expected, rtol=2e-3)
    studied, source, stride = of_run(tmp_path / "run", None)
    studied = list(studied)
    assert source.endswith("step 2") and stride == config.metrics.stride
    for response, rows, logprobs in zip(studied, responses, table["rollout_logprobs"]):
        np.testing.assert_array_equal(response.states, rows)
        # At temperature 1, the engine samples from the unmodified distribution.
        np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-3)
    assert [response.score for response in studied] == table["score"]
    assert [response.group_id for response in studied] == table["group_id"]
    with pytest.raises(UserError, match=r"--step=1: .* of the steps \[0, 2\]"):
        of_run(tmp_path / "run", 1)
    for file in (tmp_path / "run" / "checkpoints" / "2").rglob("manifest.ocdbt"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be used"):
        states_of_run(tmp_path / "run")


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no run"):
        states_of_run(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"config": {"model": {"path": ""}, "metrics": {"stride": 4}}}'
    )
    with pytest.raises(UserError, match="no step with both"):
        states_of_run(tmp_path)
