"""Flags of commands on a policy."""

import json
import sys
from types import SimpleNamespace

import pytest
from absl import flags

from configs import default
from launch.fields import (
    chosen_fields,
    chosen_states,
    config_of_policy,
    fields_of_flags,
    template_of_run,
)
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams
from tests.cases import refused

FIELDS = {
    "n": ("rollout.group_size", "integer", ""),
    "prompts": ("data.files", "list", ""),
    "seed": ("seed", "integer", ""),
}


def test_a_run_of_the_built_in_task_keeps_its_template():
    config, record = default.get_config(), "configs/recorded.py:runs/x/config.json"
    assert template_of_run(config, record) == "Q:{input}\nA:"
    assert template_of_run(config, "configs/default.py") == "auto"  # of a model without a run
    config.data.task = "files"
    assert template_of_run(config, record) == "auto"


def test_flags_set_fields_of_the_config():
    values = {"n": 0, "prompts": ["a", "b"], "seed": None}
    assert fields_of_flags(FIELDS, values, ()) == {
        "rollout.group_size": 0,
        "data.files": ("a", "b"),
    }
    with pytest.raises(UserError, match=r"--n and --config\.rollout\.group_size set the same"):
        fields_of_flags(FIELDS, values, {"rollout.group_size"})


def test_a_temperature_of_the_rollouts_is_that_of_the_command(monkeypatch):
    fields = {"temperature": ("evaluation.temperature", "float", "")}
    defaults = {"evaluation.temperature": 1.0, "evaluation.top_k": 0}

    def chosen(temperature=None, **overridden):
        overridden = {name.replace("__", "."): value for name, value in overridden.items()}
        config = SimpleNamespace(override_values=overridden)
        monkeypatch.setattr(flags, "FLAGS", {"config": config})
        return chosen_fields(fields, {"temperature": temperature}, defaults)

    assert chosen(rollout__temperature=0.0) == defaults | {"evaluation.temperature": 0.0}
    assert chosen(0.5, rollout__top_k=3) == {"evaluation.temperature": 0.5, "evaluation.top_k": 3}
    for other in ((0.5, {}), (None, {"evaluation__temperature": 0.5})):
        with pytest.raises(UserError, match=r"--config\.rollout\.temperature and another flag set"):
            chosen(other[0], rollout__temperature=0.0, **other[1])


@pytest.mark.parametrize("of", ["run", "checkpoint", "model"])
def test_the_config_is_that_of_the_policys_run(tmp_path, monkeypatch, of):
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "a"} if of != "model" else {}))
    policy = tmp_path / "checkpoints" / "3" if of == "checkpoint" else tmp_path
    monkeypatch.setattr(sys, "argv", ["program", "--policy", str(policy), "--n=1"])
    assert not config_of_policy()
    added = sys.argv[1]
    if of == "model":
        assert added.endswith("configs/default.py")
    else:
        assert added.endswith(f"recorded.py:{tmp_path / 'config.json'}")
    assert config_of_policy() and sys.argv.count(added) == 1  # a given one is not replaced


def test_hidden_states_that_flags_ask_for():
    assert chosen_states([], None, "float32") is None
    assert chosen_states(["-1", "12"], None, "bfloat16") == HiddenStateParams((-1, 12))
    both = HiddenStateParams((0,), "float32", ("decode", "prefill"))
    assert chosen_states(["0"], ["decode", "prefill"], "float32") == both


@pytest.mark.parametrize(
    ("layers", "kinds", "message"),
    [
        (["x"], None, "--hidden_states has 'x'"),
        (["-2"], None, "--hidden_states has '-2'"),
        (["1", "01"], None, "--hidden_states=1,01 names a layer twice"),
        (["1"], ["all"], "--states has 'all'; choose from decode, prefill."),
        (["1"], [], "--states= must name"),
        (["1"], ["decode", "decode"], "--states=decode,decode must name"),
        ([], ["decode"], "--states needs layers"),
    ],
)
def test_wrong_hidden_states_are_named(layers, kinds, message):
    assert refused(".", chosen_states, layers, kinds, "float32").startswith(message)
