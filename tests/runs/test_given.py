"""Runs in which the data gives responses: resumed to the bit, and what is recorded of them."""

import numpy as np
import pyarrow.parquet
import pytest

from semrl_jax.sampling.recorded import file_of, read_record, scored_of
from tests.runs.resuming import rows_of_equal_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]
# Corrections and losses in several places. The tiny policy solves no problem.
RUNS = {
    "failed groups": {
        "rollout.given_when": "failed", "algorithms.loss.given_surrogate": "sft",
        "algorithms.batch_rules.max_sampling_rounds": 2, "training.ppo_epochs": 2,
        "algorithms.importance.level": "sequence", "hidden_states.source": "policy",
    },
    "in parts, packed": {
        "algorithms.loss.given_surrogate": "rl_plus", "rollout.max_staleness": 2,
        "rollout.in_flight": "keep", "training.prompts_per_minibatch": 4,
        "training.pack_sequences": True, "training.micro_batch_tokens": 80,
        "metrics.of_groups": ("elliptical_novelty",),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_with_given_responses_equals_an_uninterrupted_run(name, config, tmp_path):
    config.rollout.given_responses, whole = 1, tmp_path / "whole"
    config.update_from_flattened_dict(RUNS[name])
    for row in rows_of_equal_runs(config, whole, tmp_path / "resumed", num_steps=3):
        assert (row["given/fraction"], row["given/correct"], row["reward/correct"]) == (0.25, 1, 0)
        assert row["rollout/logprob_mismatch/max"] is not None
        assert row["policy/update_skipped"] == 0 and row["policy/given_loss"] != 0
        assert row["policy/importance_weight/max"] <= 2 and row["rollout/staleness"] <= 2
    table = pyarrow.parquet.read_table(whole / "rollouts" / "step_000002.parquet").to_pylist()
    given = [row for row in table if row["finish_reason"] == "given"]
    assert [row["sample_index"] for row in given] == [3] * 4
    for row in given:
        assert row["correct"] and np.isnan(row["rollout_logprobs"]).all()
        assert row["response"].endswith("}<eos>") and row["prompt"][2:9] == row["response"][:7]
        is_measured = config.hidden_states.source == "policy"
        assert np.isfinite(row["metrics/effective_rank"]) == is_measured
    scored = scored_of(read_record(file_of(whole, 2)))
    assert [item.rollout.is_given for item in scored] == [False, False, False, True] * 4
