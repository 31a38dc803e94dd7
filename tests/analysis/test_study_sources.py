"""The responses of a run, with their states recomputed."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax.analysis.study_sources import of_run
from semrl_jax.runs import train
from tests.cases import refused
from tests.oracles import metrics as oracle


@pytest.mark.slow
@pytest.mark.usefixtures("reports_where_looked_at")
def test_the_states_of_a_run_are_those_it_measured(config, tmp_path):
    config.hidden_states.dtype = "float32"
    config.evaluation.every_steps = 0
    config.checkpoints.every_steps = 2
    config.checkpoints.extra_steps = ()
    assert train(config, str(tmp_path / "run")) == 0
    for step in (0, 2):  # step 1 left no weights
        studied, source, stride = of_run(tmp_path / "run", step)
        studied = list(studied)
        assert source.endswith(f"step {step}") and stride == config.metrics.stride
        file = tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet"
        table = pq.read_table(file).to_pydict()
        lengths = [len(response.states) for response in studied]
        assert lengths == [len(ids) for ids in table["response_ids"]]
        for response, expected in zip(studied, table["metrics/effective_rank"]):
            # The same weights, decoded token by token there and in one pass here.
            found = oracle.effective_rank(response.states)
            np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert of_run(tmp_path / "run", None)[1].endswith("step 2")
    for response, logprobs in zip(studied, table["rollout_logprobs"]):
        # At temperature 1, the engine samples from the unmodified distribution.
        np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-3)
    assert [response.score for response in studied] == table["score"]
    assert [response.group_id for response in studied] == table["group_id"]
    refused(r"--step=1: .* of the steps \[0, 2\]", of_run, tmp_path / "run", 1)
    for file in (tmp_path / "run" / "checkpoints" / "2").rglob("manifest.ocdbt"):
        file.write_bytes(b"")
    refused("cannot be used", of_run, tmp_path / "run", 2)


def test_a_directory_without_a_run_is_refused(tmp_path):
    refused("is no run", of_run, tmp_path, None)
    (tmp_path / "config.json").write_text(
        '{"config": {"model": {"path": ""}, "metrics": {"stride": 4}}}'
    )
    refused("no step with both", of_run, tmp_path, None)
