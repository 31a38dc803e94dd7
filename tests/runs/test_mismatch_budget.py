"""A run warns of a mismatch that its dtypes do not explain, once."""

import types

import jax
import pytest

from semrl_jax.rewards.verdict import Verdict
from semrl_jax.rollout.engines.jax import _StagedWeights
from semrl_jax.runs import train
from semrl_jax.runs.mismatch_budget import BUDGET, mismatch_warning
from semrl_jax.runs.run import Run
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")
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
    right, wrong = Verdict(1.0, True, True, None), Verdict(0.0, False, False, None, "exception: x")
    result = types.SimpleNamespace(scored=[types.SimpleNamespace(verdict=right)] * 3)
    for _ in range(2):
        run._warn(result, {LOGPROB: 1.0, "rollout/branches/fraction": 0.5})
    assert len(said) == 1 and "launch.mismatch" in said[0]
    result.scored += [types.SimpleNamespace(verdict=wrong)] * 3
    for _ in range(2):
        run._warn(result, {LOGPROB: 1.0, "rollout/branches/fraction": 0.0})
    assert len(said) == 3 and "3 of 6 responses have no verdict" in said[1]
    assert "set min_characters=1" in said[2]


def scaled(params):
    """An engine that loads twice the kernel of one tensor."""
    (layer,) = params["layers"]
    value = jax.tree.map(lambda leaf: 2 * leaf, layer["value"])
    return params | {"layers": (layer | {"value": value},)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["scaled tensor", "stale weights", "a lag of 1 that is meant"])
def test_a_training_run_warns_once_if_its_engine_is_wrong(fault, tmp_path, capsys, monkeypatch):
    """The line has the command. In tests/runs/test_train.py, a healthy run does not warn."""
    load, loaded = _StagedWeights.finish, []

    def finish(staged):
        loaded.append(load(staged))
        return scaled(loaded[-1]) if fault == "scaled tensor" else loaded[0]

    if "lag" not in fault:
        monkeypatch.setattr(_StagedWeights, "finish", finish)
    config = tiny_config()
    config.evaluation.every_steps = config.logging.rollouts_every_steps = 0
    config.rollout.max_staleness = int("lag" in fault)
    assert train(config, str(tmp_path / "run")) == 0
    said = "".join(capsys.readouterr()).count(f"launch.mismatch --policy={tmp_path / 'run'} names")
    assert said == ("lag" not in fault)
