"""Whole small runs with other optimisers, rounded parameters and what is kept on the host."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from semrl_jax import models
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs import train
from semrl_jax.runs.policies import find_policies
from semrl_jax.sampling.weights import WeightSync
from semrl_jax.support.errors import UserError
from tests.fixtures import read_rows, stable

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")
FACTORED = {
    "optimizer.name": "adafactor", "optimizer.momentum": 0.9,
    "optimizer.first_moment_dtype": "bfloat16", "optimizer.options.min_size_to_factor": 8,
    "training.adam_b2": 0.999,
}  # fmt: skip
ROUNDED = {"model.param_dtype": "bfloat16", "model.compute_dtype": "bfloat16"}
OFFLOADED = {"training.offload": ("optimizer", "parameters", "reference")}


def state_of(workdir, step):
    """A checkpoint, read by Orbax alone."""
    return ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(step) / "state")


def run(config, workdir, fields, num_steps=2):
    for field, value in fields.items():  # options may be new fields
        section, _, name = field.rpartition(".")
        part = config
        for each in section.split("."):
            part = part[each]
        with part.unlocked():
            part[name] = value
    config.training.num_steps = num_steps
    assert train(config, str(workdir)) == 0


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", FACTORED | ROUNDED | OFFLOADED),
        ("ppo", ROUNDED | {"optimizer.first_moment_dtype": "bfloat16", "rollout.in_turns": True}),
    ],
)
def test_a_resumed_run_continues_to_the_bit(config, tmp_path, rewarded, name, fields):
    config.algorithms.name = name
    if name == "ppo":
        config.algorithms.loss.kl_coefficient = 0.0
    for num_steps, folder in ((2, "straight"), (1, "resumed"), (2, "resumed")):
        run(config, tmp_path / folder, fields, num_steps)
    straight, resumed = (state_of(tmp_path / folder, 2) for folder in ("straight", "resumed"))
    assert_same(resumed, straight)
    rows = [stable(read_rows(tmp_path / folder))[:2] for folder in ("straight", "resumed")]
    assert rows[0] == rows[1]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(straight["params"])} == {"bfloat16"}
    # What an evaluation, an export and another run read.
    (source,) = find_policies(str(tmp_path / "resumed"), [2])
    policy, _ = build_policy(config)
    found = source.params(
        policy, models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"float32"}
    assert_same(
        jax.device_get(found), jax.tree.map(lambda leaf: leaf.astype("f4"), straight["params"])
    )


@pytest.mark.soak
def test_what_is_on_the_host_changes_no_number(config, tmp_path, rewarded, monkeypatch):
    sent, read = [], WeightSync.read

    def recorded(self, params, **options):
        arrays = list(read(self, params, **options))
        sent.append({str(array.dtype) for array in arrays})
        return iter(arrays)

    monkeypatch.setattr(WeightSync, "read", recorded)
    for folder, fields in (("device", FACTORED | ROUNDED), ("host", OFFLOADED)):
        run(config, tmp_path / folder, fields)
    assert_same(*(state_of(tmp_path / folder, 2) for folder in ("host", "device")))
    assert all(dtypes == {"bfloat16"} for dtypes in sent) and sent
    rows = read_rows(tmp_path / "host")
    assert "time/ref_logprobs_s" in rows[0]  # a pass of its own
    assert "time/ref_logprobs_s" not in read_rows(tmp_path / "device")[0]


def test_an_algorithm_without_a_reference_cannot_offload_one(config, tmp_path):
    config.algorithms.loss.kl_coefficient = 0.0
    config.training.offload = ("reference",)
    with pytest.raises(UserError, match="with these settings has no reference; remove 'reference'"):
        train(config, str(tmp_path / "run"))
