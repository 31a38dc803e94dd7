"""Runs in which responses branch: resumed to the bit, and what is recorded of them."""

import numpy as np
import pyarrow.parquet
import pytest

from semrl_jax.sampling.recorded import file_of, read_record, scored_of
from tests.runs.resuming import rows_of_equal_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]
RUNS = [
    ("cure:branches=1:min_characters=1", {"hidden_states.source": "rollout"}),
    pytest.param(
        "random_token:branches=1:min_characters=1:trains_prefix=1",
        {"rollout.max_staleness": 1, "hidden_states.source": "rollout"},
        marks=pytest.mark.soak,
    ),
]


@pytest.mark.parametrize(("entry", "others"), RUNS)
def test_a_resumed_run_with_branches_equals_an_uninterrupted_run(entry, others, config, tmp_path):
    config.rollout.branching = entry
    config.update_from_flattened_dict(others)
    whole = tmp_path / "whole"
    rows = rows_of_equal_runs(config, whole, tmp_path / "resumed")
    for row in rows:
        assert 0.25 <= row["rollout/branches/fraction"] <= 0.5
        assert row["rollout/logprob_mismatch/max"] < 1e-4 or "max_staleness" in str(others)
    table = pyarrow.parquet.read_table(file_of(whole, 1)).to_pylist()
    assert len(table) == config.data.prompts_per_step * config.rollout.group_size
    of_group = {(row["group_id"], row["sample_index"]): row for row in table}
    branches = [row for row in table if row["parent"] >= 0]
    assert branches and all(row["sample_index"] >= 2 for row in branches)
    for row in branches:
        parent, count = of_group[row["group_id"], row["parent"]], row["num_prefix"]
        assert parent["parent"] == -1 and 0 < count < len(parent["response_ids"])
        assert row["response_ids"][:count] == parent["response_ids"][:count]
        trains = "trains_prefix=1" in entry  # then there is no context, and no column of masks
        mask = np.array(row.get("response_mask") or [True] * len(row["response_ids"]))
        assert mask[:count].all() == trains and mask[count:].all()
        # The update trains on the tokens of the mask alone, with the policy's own values.
        np.testing.assert_array_equal(np.array(row["trained"])[:count], trains)
        if trains:
            of_prefix = parent["rollout_logprobs"][:count]
            assert row["rollout_logprobs"][:count] == of_prefix
        else:
            assert row["rollout_logprobs"][:count] == [0.0] * count
        if not config.rollout.max_staleness:
            difference = np.subtract(row["rollout_logprobs"], row["old_logprobs"])
            assert np.abs(difference[count:]).max() < 1e-4
    scored = scored_of(read_record(file_of(whole, 1)))
    found = {(r.group_id, r.sample_index): r.num_prefix for r in (i.rollout for i in scored)}
    assert found == {key: row["num_prefix"] for key, row in of_group.items()}
