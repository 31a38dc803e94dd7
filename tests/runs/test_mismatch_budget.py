"""A run warns of a mismatch that its dtypes do not explain, once."""

import pytest

from semrl_jax.runs.mismatch_budget import BUDGET, mismatch_warning
from semrl_jax.runs.run import Run

LOGPROB, STATE = "rollout/logprob_mismatch/mean", "rollout/hidden_state_mismatch/mean"


@pytest.mark.parametrize(
    ("fields", "scalars", "warns"),
    [
        ({}, {LOGPROB: 1e-5}, False),
        ({}, {LOGPROB: 1e-4}, True),
        ({}, {LOGPROB: float("nan")}, True),
        ({}, {LOGPROB: 1e-4, "rollout/staleness": 1.0}, False),  # of older weights
        ({}, {STATE: 2.0**-10}, False),  # rounded to bfloat16 on the wire
        ({"hidden_states.dtype": "float32"}, {STATE: 2.0**-10}, True),
        ({"model.compute_dtype": "bfloat16"}, {LOGPROB: 1e-2, STATE: 1e-2}, False),
        ({"model.compute_dtype": "bfloat16"}, {LOGPROB: 0.2}, True),
        ({"rollout.weight_dtype": "bfloat16"}, {LOGPROB: 1e-2}, False),
        ({"rollout.vllm_quantization": "fp8_per_channel"}, {LOGPROB: 0.1}, False),
        ({}, {}, False),
    ],
)
def test_what_dtypes_explain_is_no_warning(config, fields, scalars, warns):
    config.update_from_flattened_dict(fields)
    warning = mismatch_warning(config, scalars, "runs/mine")
    assert bool(warning) == warns
    if warns:
        assert "python -m launch.mismatch --policy=runs/mine" in warning


def test_the_budget_grows_with_coarser_dtypes():
    for name in ("logprob", "hidden_state"):
        of_dtype = [BUDGET[dtype][name] for dtype in ("float32", "bfloat16", "fp8")]
        assert of_dtype == sorted(of_dtype)


def test_a_run_warns_once(config):
    said = []

    class Reporter:
        notice = said.append

    class Workdir:
        path = "runs/mine"

    run = Run(config, Workdir, None, None, Reporter, None, leads=True)
    for _ in range(2):
        run._warn_of_mismatch({LOGPROB: 1.0})
    assert len(said) == 1
