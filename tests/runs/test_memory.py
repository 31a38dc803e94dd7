"""The least that a run holds is compared with the machine before weights are loaded."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from semrl_jax import models
from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.models.of_config import build_policy, find_lora
from semrl_jax.runs import memory, train
from semrl_jax.runs.dry_run import dry_run
from semrl_jax.runs.inputs import Inputs
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.training.passes import NONE, PassPlan
from tests.cases import refused


def inputs_of(config, mesh, critic=False):
    policy, _ = build_policy(config)
    algorithm = load_algorithm(config.algorithms.to_dict())
    fields = dict.fromkeys(Inputs._fields) | {
        "algorithm": algorithm,
        "plan": PassPlan.of(algorithm, config),
        "policy": policy,
        "references": {},
        "lora": (find_lora(config, policy) or (None, None))[0],
    }
    if critic:
        fields["critic"] = models.ValueModel.of(dataclasses.replace(policy, mesh=mesh))
    return Inputs(**fields)


def mesh_of(**sizes):
    return models.make_mesh({"replica": 1, "fsdp": 1, "sequence": 1, "tensor": 1} | sizes)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"parameters": 4, "adamw": 8, "gradients": 4, "reference": 4}),
        (
            {"model.reference_dtype": "bfloat16", "model.compute_dtype": "bfloat16"},
            {"parameters": 4, "adamw": 8, "gradients": 4, "reference": 2},
        ),
        (
            {"model.param_dtype": "bfloat16", "rollout.addresses": ("a:1",)},
            {"parameters": 2, "adamw": 12, "gradients": 2, "reference": 4},
        ),
        (
            {"optimizer.first_moment_dtype": "bfloat16", "rollout.max_staleness": 2},
            {"parameters": 4, "adamw": 6, "gradients": 4, "reference": 4, "earlier weights": 8,
             "replica": 4},
        ),
        (
            {"training.num_steps": 0, "algorithms.loss.kl_coefficient": 0.0},
            {"parameters": 4, "adamw": 8, "replica": 4},
        ),
        (
            {"lora.rank": 1, "lora.base_dtype": "bfloat16"},
            {"base": 2},
        ),
    ],
)  # fmt: skip
def test_bytes_per_parameter_by_hand(fields, expected, config):
    """An eighth of the parameters on each of the 8 devices of one machine makes one copy of all."""
    config.algorithms.loss.kl_coefficient = 0.1
    config.update_from_flattened_dict(fields)
    mesh = mesh_of(fsdp=8)
    inputs = inputs_of(config, mesh)
    assert ("reference" in expected) <= (inputs.plan.reference != NONE)
    found = memory.least_parts(config, inputs, mesh)
    count = memory.num_parameters(inputs.policy.config)
    adapters = {"adapters", "adamw", "gradients", "replica"} if config.lora.rank else set()
    assert found.keys() == expected.keys() | adapters
    for name, size in expected.items():
        # Arrays that 8 does not divide are on every device, and the state also has scalars.
        assert found[name] / count == pytest.approx(size, rel=0.05), name
    if adapters:
        # The engine has all weights, but while there are no gradients.
        sampling = found["replica"] + found["gradients"]
        assert sampling / count == pytest.approx(4, rel=0.05)
        assert found["adamw"] == pytest.approx(2 * found["adapters"], rel=0.05)


def test_devices_of_a_machine_have_copies_of_what_is_trained_alone(config):
    """The reference may be one array of the host for all of them."""
    config.algorithms.loss.kl_coefficient = 0.1
    mesh = mesh_of(replica=8)
    found = memory.least_parts(config, inputs_of(config, mesh, critic=True), mesh)
    size = 4 * memory.num_parameters(build_policy(config)[0].config)
    assert found["parameters"] == found["gradients"] == 8 * size
    assert found["critic"] == pytest.approx(3 * 8 * size, rel=0.01)
    assert found["reference"] == size


def test_the_limit_is_that_of_the_machine_or_of_a_device(config, monkeypatch, capsys):
    gib = 2.0**30
    parts = {"parameters": 2 * gib, "adamw": 4 * gib, "replica": 2 * gib}
    monkeypatch.setattr(memory, "total_bytes", lambda: int(8 * gib))
    monkeypatch.setattr(memory, "available_bytes", lambda: int(9 * gib))
    memory.check_room(config, parts, Reporter())
    (line,) = capsys.readouterr().out.splitlines()
    assert line == ("memory: at least 8 GiB of 8 GiB: parameters 2 GiB, adamw 4 GiB, replica 2 GiB")
    monkeypatch.setattr(memory, "available_bytes", lambda: int(5 * gib))
    memory.check_room(config, parts, Reporter(quiet=True))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("memory: only 5 GiB are free now")
    monkeypatch.setattr(memory, "total_bytes", lambda: int(8 * gib) - 1)
    with pytest.raises(UserError) as caught:
        memory.check_room(config, parts)
    message = str(caught.value)
    assert "model.hidden_size=32, model.num_layers=1: training needs at least 8 GiB" in message
    assert "adamw 4 GiB" in message and "this machine or container has 8 GiB" in message
    assert "lora.rank" in message and "rollout.addresses" in message
    assert "reference_dtype" not in message and "fsdp" not in message

    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": int(7 * gib)})
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])
    config.model.path = "a/model"
    with pytest.raises(UserError, match=r"model\.path='a/model': .* a device has 7 GiB; .*mesh\.f"):
        memory.check_room(config, parts)
    for stats in ({"bytes_limit": int(8 * gib)}, {}, None):  # a device may not tell its limit
        device.memory_stats = lambda stats=stats: stats
        memory.check_room(config, parts, Reporter(silent=True))


def test_what_is_offloaded_from_an_accelerator_does_not_count_there(config, monkeypatch):
    config.algorithms.loss.kl_coefficient = 0.1
    config.training.offload = ("optimizer", "reference")
    mesh = mesh_of(fsdp=8)
    inputs = inputs_of(config, mesh)
    assert {"adamw", "reference"} < memory.least_parts(config, inputs, mesh).keys()
    monkeypatch.setattr(memory, "is_machine", lambda mesh: False)
    found = memory.least_parts(config, inputs, mesh)
    assert found.keys() == {"parameters", "gradients", "replica"}
    # The engine's copy on each device, while there are no gradients.
    size = found["replica"] + found["gradients"]
    assert found["parameters"] < 0.2 * size  # of one device of eight


def test_in_turns_a_replica_shares_devices_with_the_parameters_alone(config, monkeypatch):
    config.algorithms.loss.kl_coefficient = 0.1
    config.data.prompts_per_step = config.training.prompts_per_minibatch = 32
    config.rollout.jax_max_batch = 128  # a cache larger than an update
    mesh, num_steps = mesh_of(fsdp=8), config.training.num_steps
    inputs, config.training.num_steps = inputs_of(config, mesh), 0
    on_a_cpu = memory.least_parts(config, inputs, mesh)
    config.rollout.in_turns = True
    assert memory.least_parts(config, inputs, mesh) == on_a_cpu  # host and device are one memory
    config.training.num_steps = num_steps
    monkeypatch.setattr(memory, "is_machine", lambda mesh: False)
    whole = memory.memory_parts(config, inputs, mesh)
    least, peak = memory.least_parts(config, inputs, mesh), memory.peak_parts(config, inputs, mesh)
    others = sum(least[name] for name in ("adamw", "gradients", "reference"))
    assert least["replica"] == pytest.approx(whole["replica"] - others)
    together = least["parameters"] + whole["replica"] + whole["its cache"]
    assert together > whole["update"] + whole["reference"]
    assert sum(peak.values()) == pytest.approx(together)


def test_a_model_that_does_not_fit_is_refused_before_files_are_written(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "total_bytes", lambda: 1000)
    loaded = []
    monkeypatch.setattr("semrl_jax.runs.setup.starting_directory", lambda *_: loaded.append(1))
    for work in (train, dry_run):
        refused("training needs at least", work, config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists() and not loaded


@pytest.mark.slow
def test_arrays_of_a_run_are_no_fewer_than_its_least(config, tmp_path, monkeypatch):
    """The least of a run must not be more than what it holds after its last step."""
    found, held = {}, []
    check = memory.check_room

    def noting(config, parts, reporter=None):
        found.update(parts)
        check(config, parts, reporter)

    monkeypatch.setattr("semrl_jax.runs.setup.check_room", noting)
    monkeypatch.setattr(
        "semrl_jax.runs.run.Run.keep",
        lambda self, state: held.append(sum(array.nbytes for array in jax.live_arrays())),
    )
    config.algorithms.loss.kl_coefficient = 0.1
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "run"), quiet=True) == 0
    assert found and sum(found.values()) - found["gradients"] <= max(held)
