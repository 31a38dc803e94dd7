"""A run with hints: resumed to the bit, and what is recorded of it."""

import pyarrow.parquet
import pytest

from semrl_jax.sampling.recorded import file_of, read_record, scored_of
from tests.runs.resuming import rows_of_equal_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]


def test_a_resumed_run_with_hints_equals_an_uninterrupted_run(config, tmp_path):
    """The tiny policy solves no problem, so all groups have the largest hint."""
    config.update_from_flattened_dict(
        {
            "rollout.hint_rounds": 1, "data.hint_input": "{input}{hint}",
            "rollout.max_prompt_tokens": 48,
        }
    )  # fmt: skip
    whole = tmp_path / "whole"
    rows = rows_of_equal_runs(config, whole, tmp_path / "resumed")
    for row in rows:
        assert (row["rollout/hints/fraction"], row["rollout/hints/correct"]) == (1, 0)
        # The update reads the responses after the prompt with the hint, as the engine did.
        assert row["rollout/logprob_mismatch/max"] < 1e-4
        assert row["prompt/length/min"] > 30
    table = pyarrow.parquet.read_table(file_of(whole, 1)).to_pylist()
    assert {row["hint"] for row in table} == {0.5}
    scored = scored_of(read_record(file_of(whole, 1)))
    assert {item.rollout.hint for item in scored} == {0.5}
