"""Whole small runs with adapters, in this process, on 8 forced devices."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.convert import convert
from semrl_jax import models
from semrl_jax.models import peft
from semrl_jax.models.lora import A, B, modules_with_adapters
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs import train
from semrl_jax.runs.adapters import AdapterRecord
from semrl_jax.runs.checkpoint_files import read_meta
from semrl_jax.runs.config_checks import validate
from semrl_jax.runs.policies import find_policies
from semrl_jax.support.errors import UserError
from semrl_jax.training import loop
from tests.cases import refused
from tests.fixtures import read_rows, scores_by_length, stable
from tests.launch.comparison import restore_on_host
from tests.runs.test_algorithms import PPO, RUNS
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")
slow = pytest.mark.slow
LORA = {"lora.rank": 4, "lora.alpha": 8.0}
DROPOUT = {"lora.dropout": 0.1}


def lora_config(**fields):
    config = tiny_config()
    config.update_from_flattened_dict(LORA | fields)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run of 3 steps, with the model and the adapter."""
    workdir = tmp_path_factory.mktemp("runs") / "lora"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "group_rewards", scores_by_length)
        patch.setattr("semrl_jax.runs.run.write_report", lambda workdir: None)
        fields = {"training.export": "float32", "lora.base_dtype": "bfloat16"}
        config = lora_config(**fields, **DROPOUT)
        assert train(config, str(workdir)) == 0
    return workdir


def merged_by_hand(workdir, step):
    """Hugging Face tensors of a checkpoint: tensors of the base in bfloat16, plus 2 B A."""
    tensors = load_file(workdir / "warm_start" / "model.safetensors")
    saved = restore_on_host(workdir / "checkpoints" / str(step) / "state")["params"]["layers"]
    tensors = {
        name: np.asarray(jax.numpy.bfloat16(array), np.float32) for name, array in tensors.items()
    }
    names = {"query": "self_attn.q_proj", "down": "mlp.down_proj"}
    return {
        f"model.layers.0.{hf}.weight": tensors[f"model.layers.0.{hf}.weight"]
        + 2.0 * (saved[name][A][0] @ saved[name][B][0]).T
        for name, hf in names.items()
    } | {"model.norm.weight": tensors["model.norm.weight"]}


def assert_merged(directory, expected):
    found = load_file(directory / "model.safetensors")
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


@slow
def test_a_run_trains_sends_saves_and_exports_adapters(finished):
    rows = read_rows(finished)
    for row in rows[:3]:
        # Replicas have the merged weights, and the policy has them apart; both are float32.
        assert row["rollout/logprob_mismatch/max"] < 1e-4
    assert rows[0]["policy/kl"] < 1e-4 < rows[2]["policy/kl"]  # two updates per step
    state = restore_on_host(finished / "checkpoints" / "3" / "state")
    assert state["params"].keys() == {"layers"}
    leaves = {name for pair in state["params"]["layers"].values() for name in pair}
    assert leaves == {A, B}
    record = read_meta(finished / "checkpoints" / "3")["lora"]
    assert record["base"] == str(finished / "warm_start") and record["rank"] == 4
    assert_merged(finished / "model", merged_by_hand(finished, 3))
    exported = load_file(finished / "adapter" / "adapter_model.safetensors")
    content = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert content["lora_dropout"] == 0.1
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(exported[name], state["params"]["layers"]["query"][A][0].T)


@slow
def test_a_resumed_run_continues_to_the_bit(finished, tmp_path, rewarded):
    fields = {"training.export": "float32", "lora.base_dtype": "bfloat16"} | DROPOUT
    assert train(lora_config(**fields, **{"training.num_steps": 1}), str(tmp_path / "run")) == 0
    assert train(lora_config(**fields), str(tmp_path / "run")) == 0
    rows, expected = stable(read_rows(tmp_path / "run")), stable(read_rows(finished))
    for row, want in zip(rows, expected, strict=True):
        assert {key: row[key] for key in want} == want
    states = (path / "checkpoints" / "3" for path in (tmp_path / "run", finished))
    own, other = (restore_on_host(folder / "state") for folder in states)
    jax.tree.map(np.testing.assert_array_equal, own, other)
    with pytest.raises(UserError, match=r"another config \(lora.rank: 4 -> 2\)"):
        train(lora_config(**fields | {"lora.rank": 2}), str(tmp_path / "run"))
    file = tmp_path / "run" / "warm_start" / "model.safetensors"
    save_file({name: array + 1 for name, array in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"checkpoint .* has adapters of .*restore the weights"):
        train(lora_config(**fields | {"training.num_steps": 4}), str(tmp_path / "run"))


@pytest.mark.soak
@pytest.mark.parametrize(
    "fields",
    [{}, {"rollout.in_turns": True}, {"rollout.max_staleness": 1}, {"rollout.jax_processes": 2}],
    ids=lambda fields: "".join(fields) or "child",
)
def test_child_processes_get_the_adapter_alone(fields, tmp_path, rewarded):
    """Runs that end and continue have the same numbers, although the base then comes again."""
    fields = {"rollout.jax_processes": 1, "evaluation.every_steps": 0} | fields
    first = {"training.num_steps": 2}
    assert train(lora_config(**fields), str(tmp_path / "whole")) == 0
    assert train(lora_config(**fields | first), str(tmp_path / "run")) == 0
    assert train(lora_config(**fields), str(tmp_path / "run")) == 0
    rows, expected = (read_rows(tmp_path / name)[:3] for name in ("run", "whole"))
    sizes = [[row.pop("rollout/weight_bytes") for row in found] for found in (rows, expected)]
    for row, want in zip(stable(rows), stable(expected), strict=True):
        assert row == want
    if "rollout.max_staleness" not in fields:  # the policy of the update is another one there
        assert all(row["rollout/logprob_mismatch/max"] < 1e-4 for row in rows)
    count = fields["rollout.jax_processes"]
    base, adapter = count * 29568, count * 6656
    with_base = {0, 1, 2} if fields.get("rollout.in_turns") else {0}
    for found, resumed in zip(sizes, ({2}, set())):
        assert found == [adapter + base * (step in with_base | resumed) for step in range(3)]


@pytest.mark.soak
def test_commands_read_runs_and_adapters(finished, tmp_path, capsys):
    """Runs, checkpoints and directories in PEFT's format are policies and starting models."""
    expected = merged_by_hand(finished, 3)
    convert(finished, tmp_path / "merged")
    assert_merged(tmp_path / "merged", expected)
    convert(finished, tmp_path / "adapter", adapter=True)
    files = (path / "adapter" / "adapter_model.safetensors" for path in (tmp_path, finished))
    jax.tree.map(np.testing.assert_array_equal, *map(load_file, files))
    convert(tmp_path / "adapter", tmp_path / "again")  # upon the base in float32
    found = load_file(tmp_path / "again" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(found[name], expected[name], atol=2e-3)
    config = lora_config()
    for path in (finished, finished / "checkpoints" / "2", tmp_path / "adapter"):
        (source,) = find_policies(str(path), None)
        config.model.path = str(source.model)
        policy, _ = build_policy(config)
        source.check(policy)
        params = source.params(policy, models.make_mesh(config.mesh.to_dict()))
        assert modules_with_adapters(params["layers"])
    refused("is an adapter: leave out", convert, tmp_path / "adapter", tmp_path / "no", step=3)
    plain = tmp_path / "plain"
    convert(tmp_path / "merged", plain)
    with pytest.raises(UserError, match=r"--adapter: checkpoint .* has no adapters"):
        convert(plain, tmp_path / "no", adapter=True)


@pytest.mark.soak
def test_training_goes_on_from_an_adapter(finished, tmp_path, rewarded):
    """`lora.path` continues it upon its base; `model.path` merges it."""
    fields = {
        "model.path": str(finished / "warm_start"), "lora.path": str(finished / "adapter"),
        "lora.base_dtype": "bfloat16", "training.num_steps": 1,
    }  # fmt: skip
    assert train(lora_config(**fields), str(tmp_path / "continued")) == 0
    first, last = read_rows(tmp_path / "continued")[0], read_rows(finished)[-1]
    for name in ("greedy_accuracy", "finished_fraction"):
        assert first[f"eval/arithmetic/{name}"] == last[f"eval/arithmetic/{name}"]
    assert first["policy/kl"] > 1e-4  # the reference is the base without the adapter
    config = lora_config(**{"model.path": str(finished / "adapter"), "training.num_steps": 0})
    assert train(config, str(tmp_path / "merged")) == 0
    assert_merged(tmp_path / "merged" / "start", {})


@pytest.mark.soak
@pytest.mark.parametrize("name", [*RUNS, "ppo", "ahead"])
def test_every_algorithm(name, tmp_path, rewarded):
    """Two steps; with PPO and sampling ahead, a third one after a resume, compared to the bit."""
    settings = RUNS | {"ppo": PPO, "ahead": {"rollout.max_staleness": 1}}
    dropout = DROPOUT if name in ("ppo", "ahead") else {}
    config = lora_config(**settings[name], **{"evaluation.every_steps": 0}, **dropout)
    config.training.num_steps = 2
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")[:2]
    assert all(row["policy/update_skipped"] == 0 for row in rows)
    assert any(row["policy/grad_norm"] > 0 for row in rows)
    if name not in ("ppo", "ahead"):
        return
    state = restore_on_host(tmp_path / "run" / "checkpoints" / "2" / "state")
    if name == "ppo":
        critic = state["critic"]["params"]
        assert critic.keys() == {"layers", "value_head"} and critic["value_head"]["bias"] > 0
        assert critic["layers"]["up"][B].any()
    else:
        earlier = state["earlier"]["0"] if isinstance(state["earlier"], dict) else state["earlier"]
        earlier = earlier[0] if isinstance(earlier, (list, tuple)) else earlier
        assert earlier.keys() == {"layers"} and earlier["layers"]["up"][B].dtype == np.float32
    config.training.num_steps = 3
    for part in ("run", "whole"):
        assert train(config, str(tmp_path / part)) == 0
    folders = (tmp_path / part / "checkpoints" / "3" / "state" for part in ("run", "whole"))
    jax.tree.map(np.testing.assert_array_equal, *map(restore_on_host, folders))


def test_mistakes_of_settings(tmp_path):
    for fields, message in (
        ({"lora.targets": ()}, r"lora.targets=\(\) names no module"),
        ({"lora.rank": 0, "lora.path": "a"}, "lora.path='a' is not read with lora.rank=0"),
        ({"lora.rank": 0, "lora.dropout": 0.1}, "lora.dropout=0.1 needs adapters"),
        ({"lora.path": "a"}, "lora.path='a' needs its base"),
        ({"model.reference_dtype": "bfloat16"}, "model.reference_dtype='bfloat16' is not read"),
    ):
        refused(message, validate, lora_config(**fields))
    for fields, message in (
        ({"lora.targets": ("c_attn",)}, "lora.targets has 'c_attn', which matches no linear mod"),
        ({"lora.rank": 17}, "lora.rank=17 must be at most 16"),
    ):
        refused(message, train, lora_config(**fields), str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def test_an_adapter_names_a_base_that_others_can_read(tmp_path):
    """PEFT reads no GGUF file, and a relative path means nothing elsewhere."""
    file, converted = tmp_path / "model.gguf", tmp_path / "converted"
    file.touch()
    converted.mkdir()
    lora = models.Lora(("query",), 4, 8.0)
    for path in (file, converted):
        assert AdapterRecord.of(lora, str(path), converted, "float32").base == str(converted)
    assert AdapterRecord.of(lora, "owner/name", converted, "float32").base == "owner/name"


@pytest.mark.slow
def test_an_adapter_must_fit_the_settings(tmp_path):
    config = lora_config()
    policy, tokenizer = build_policy(config)
    params = policy.init(jax.random.key(0))
    models.save_directory(tmp_path / "base", params, policy.config, tokenizer)
    lora = models.Lora(("query", "up"), 4, 8.0)
    peft.save_adapter(
        tmp_path / "adapter", lora.init(params, 0), lora, policy.config, tmp_path / "base", "x/base"
    )
    base = {"model.path": str(tmp_path / "base"), "lora.path": str(tmp_path / "adapter")}
    for fields, message in (
        ({}, r"lora\.targets=\('q_proj', 'k_pr.* has \('q_proj', 'up_proj'\)"),
        ({"lora.rank": 8}, r"lora\.rank=8, but .* has 4; set that"),
        ({"lora.alpha": 4.0}, r"lora\.alpha=4\.0, but .* has 8\.0"),
        ({"lora.path": str(tmp_path)}, r"lora\.path: .* is no adapter"),
    ):
        with pytest.raises(UserError, match=message):
            train(lora_config(**base | fields), str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert content["target_modules"] == ["q_proj", "up_proj"]
