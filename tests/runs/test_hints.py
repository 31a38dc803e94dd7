"""A run with hints: resumed to the bit, and what is recorded of it."""

import shutil

import jax
import numpy as np
import pyarrow.parquet
import pytest

from semrl_jax.runs import train
from semrl_jax.sampling.recorded import file_of, read_record, scored_of
from tests.fixtures import read_rows, stable
from tests.launch.comparison import restore_on_host

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]


def test_a_resumed_run_with_hints_equals_an_uninterrupted_run(config, tmp_path):
    """The tiny policy solves no problem, so all groups have the largest hint."""
    config.update_from_flattened_dict(
        {
            "rollout.hint_rounds": 1, "data.hint_input": "{input}{hint}",
            "rollout.max_prompt_tokens": 48, "evaluation.every_steps": 0,
            "logging.replay_every": 1, "training.num_steps": 2,
        }
    )  # fmt: skip
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert train(config, str(whole)) == 0
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "2")
    assert train(config, str(resumed)) == 0
    rows = read_rows(whole)
    assert stable(rows) == stable(read_rows(resumed))
    states = (restore_on_host(run / "checkpoints" / "2" / "state") for run in (whole, resumed))
    jax.tree.map(np.testing.assert_array_equal, *states)
    for row in rows:
        assert (row["rollout/hints/fraction"], row["rollout/hints/correct"]) == (1, 0)
        # The update reads the responses after the prompt with the hint, as the engine did.
        assert row["rollout/logprob_mismatch/max"] < 1e-4
        assert row["prompt/length/min"] > 30
    table = pyarrow.parquet.read_table(file_of(whole, 1)).to_pylist()
    assert {row["hint"] for row in table} == {0.5}
    scored = scored_of(read_record(file_of(whole, 1)))
    assert {item.rollout.hint for item in scored} == {0.5}
