"""The command: mistakes in one line, and a small model compiled for a slice that is not here."""

import importlib.util
import json

import jax
import pytest

from configs import default
from semrl_jax import models
from semrl_jax.planning import plan, report, slice_programs
from semrl_jax.support.chips import find_slice
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.launch.conftest import succeed

TINY = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = TINY | {
    "model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 130,
}  # fmt: skip


def config_of(path="Qwen/Qwen2.5-7B"):
    config = default.get_config()
    config.model.path = str(path)
    return config


@pytest.fixture(autouse=True)
def _compiler_is_here(monkeypatch):
    monkeypatch.setattr(plan, "check_compiler", lambda: None)


@pytest.mark.parametrize(
    ("fields", "topology", "message"),
    [
        ({}, "v5e:2x2", "takes 113 GiB; it fits into v5e:2x4"),
        ({"model.path": ""}, "v5e:2x2", r"model\.path is empty"),
        ({"model.path": "nowhere/at-all"}, "v5e:2x2", r"a plan knows Qwen/Qwen2\.5-0\.5B"),
        # A plan does not know these: its memory and times would be those of another run.
        ({"algorithms.name": "ppo"}, "v5p:4x4x4", r"\.name='ppo'.* no critic; choose an algo"),
        ({"lora.rank": 8, "lora.targets": ("c_attn",)}, "v5p:4x4x4", r"lora\.targets has 'c_attn'"),
        ({"rollout.max_prompt_tokens": 40_000}, "v5p:4x4x4", "at most the model's context of 3276"),
    ],
)
def test_mistakes_before_any_work(fields, topology, message):
    config = config_of()
    config.update_from_flattened_dict(fields)
    refused(message, plan.check, config, topology)


def test_a_mesh_that_does_not_fill_the_slice(monkeypatch):
    config = config_of()
    config.mesh.fsdp = 7
    monkeypatch.setattr(plan, "devices_of", lambda where: jax.devices()[:1] * where.num_chips)
    with pytest.raises(UserError, match="needs 7 devices, but 64 are there"):
        plan.make_plan(config, *plan.check(config, "v5p:4x4x4"), print)


def test_the_state_of_adapters_is_that_of_the_base():
    config = config_of()
    config.lora.rank, config.lora.base_dtype = 16, "bfloat16"
    _, architecture = plan.check(config, "v5e:2x2")  # all parameters take 113 GiB
    assert 2 < plan.state_bytes(config, architecture) / plan.num_parameters(architecture) < 2.1


def test_without_the_compiler_the_line_has_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"pip install -e '.\[tpu\]'", slice_programs.check_compiler)


def test_the_weights_of_the_decode_program_have_single_layers():
    architecture = plan.find_architecture("Qwen/Qwen2.5-0.5B")
    mesh = models.make_mesh({}, jax.devices()[:1])
    planned = slice_programs.Programs(config_of(), architecture, find_slice("v5e:1x1"), mesh)
    assert len(planned.engine_params(mesh)["layers"]) == architecture.num_layers


def test_the_state_is_that_of_the_optimiser():
    config = config_of()
    architecture = plan.find_architecture("Qwen/Qwen2.5-7B")
    count = plan.num_parameters(architecture)
    assert plan.state_bytes(config, architecture) == pytest.approx(16 * count, rel=1e-3)
    config.training.offload = ("optimizer",)
    assert plan.state_bytes(config, architecture) == pytest.approx(8 * count)


def test_a_plan_of_which_one_program_does_not_fit():
    """The update leaves its state on the chip while the engine decodes."""
    update = {
        "runs": 2, "bytes": {"parameters": 2**30, "batch": 5, "temporary": 7, "total": 2**31},
        "needed_flops": 1e12, "compiler_options": {}, "flops": 2e12, "mfu": 0.4, "bound": "ICI",
        "times_s": {"compute": 1.0, "hbm": 2.0, "ici_async": 3.0, "ici_sync": 0.5, "total": 3.5},
        "collectives": [
            {"kind": "all-gather", "axes": "fsdp", "times": 3, "sent_bytes": 2**30,
             "overlapped": 0.25}
        ],
    }  # fmt: skip
    decode = {"runs": 8, "bytes": {"cache": 2**30, "total": 2**32}, "compiler_options": {}}
    programs = {"update": update, "decode": decode}
    held, rollout = {"reference": 2**30}, {"max_staleness": 0, "in_turns": False}
    assert plan.peak_bytes(programs, held, rollout) == 2**32 + 2 * 2**30
    # In turns, it leaves the parameters alone, while the engine gets them.
    assert plan.peak_bytes(programs, held, rollout | {"in_turns": True}) == 2**32 + 2**30
    shown = {
        "topology": "v5e:2x4", "accelerator_type": "v5litepod-8", "chips": 8,
        "mesh": {"replica": 1, "fsdp": 8}, "remat": "dots",
        "micro_batch_size": 8, "parameters": 7_615_616_512, "fits": False, "hbm_bytes": 2**31,
        "peak_bytes": 6 * 2**30, "held_bytes": {"reference": 2**30}, "step_s": 7.0,
        "update_mfu": 0.4, "bound": "ICI", "programs": programs, "advice": ["less"],
    }  # fmt: skip
    assert report.headline(shown) == [
        "v5e:2x4 (v5litepod-8): 8 chips, fsdp 8, remat dots, micro-batch 8",
        "model: 7.62 B parameters",
        "DOES NOT FIT: 6.00 of 2.00 GiB per chip",
        "update: 3.5 s, predicted MFU 40.0%, bound by ICI; all updates and passes of a step: 7 s",
        "to make it fit: less",
    ]
    rows = {
        table.__name__: [list(column.cells) for column in table(shown).columns]
        for table in (report.memory_table, report.time_table, report.collective_table)
    }
    names, sizes, of_engine = rows["memory_table"]
    assert dict(zip(names, zip(sizes, of_engine))) == {
        "parameters": ("1.000", ""), "batch": ("0.000", ""), "cache": ("", "1.000"),
        "temporary": ("0.000", ""),
        "total": ("2.000", "4.000"), "stays: reference": ("1.000", "1.000"),
    }  # fmt: skip
    assert rows["time_table"][2] == ["2", "does not fit"]
    assert rows["collective_table"][3:] == [["3"], ["1"], ["25%"]]


def test_small_numbers_stay_short():
    shown = [report._short(x) for x in (0, 9.5e-5, 0.0125, 12.34)]
    assert shown == ["0", "<0.001", "0.0125", "12.3"]
    assert (report._parameters(93_700), report._parameters(7_615_616_512)) == ("0.0937 M", "7.62 B")
    assert (report._seconds(1.16e-4), report._seconds(12.34)) == ("0.116 ms", "12.3 s")


def test_a_refusal_of_the_compiler():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 20.50G of 15.75G hbm. Exceeded"
    assert slice_programs.too_large(message) == 20.5 * 2**30
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (107.52G) exceeds available HBM (95.74G)."
    )
    assert slice_programs.too_large(message) == 107.52 * 2**30
    assert slice_programs.too_large("INTERNAL: RET_CHECK failure") is None


def planned(path, topology, *flags, fields=TINY):
    """The object that the command prints for a small model."""
    (path / "config.json").write_text(json.dumps(fields))
    settings = {
        "model.path": path, "model.compute_dtype": "bfloat16", "data.prompts_per_step": 8,
        "training.prompts_per_minibatch": 8, "training.micro_batch_size": 8,
        "rollout.group_size": 2, "rollout.max_prompt_tokens": 128,
        "rollout.max_response_tokens": 128,
    }  # fmt: skip
    flags = [*(f"--config.{name}={value}" for name, value in settings.items()), *flags]
    command = "launch.plan", "--config=configs/default.py", f"--topology={topology}", "--json"
    done = succeed(*command, *flags, timeout=600)  # three programs, on a busy machine
    return json.loads(done.stdout)


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"
)


@pytest.mark.slow
@needs_compiler
def test_a_small_model_on_a_slice(tmp_path):
    found = planned(tmp_path, "v5e:2x4", "--programs=update")
    update = found["programs"]["update"]
    assert found["fits"] and found["chips"] == 8 and found["mesh"]["fsdp"] == 8
    # remat "dots" computes more than needed; blocks of attention are not skipped.
    assert 1.0 < update["flops"] / update["needed_flops"] < 1.6
    kinds = {one["kind"] for one in update["collectives"] if one["sent_bytes"] > 1e6}
    assert {"all-gather", "reduce-scatter"} <= kinds


@pytest.mark.slow
@needs_compiler
def test_all_programs_on_a_slice_of_one_chip(tmp_path):
    """With adapters too, whose optimiser state is small and whose base stays."""
    batch = "--config.data.prompts_per_step=16"
    whole = planned(tmp_path, "v5e:1x1", batch)
    adapters = planned(tmp_path, "v5e:1x1", batch, "--config.lora.rank=4", "--programs=update")
    assert set(whole["programs"]) == {"update", "pass", "decode"}
    assert all(one["times_s"]["total"] > 0 for one in whole["programs"].values())
    sizes, small = (found["programs"]["update"]["bytes"] for found in (whole, adapters))
    assert small["base"] == pytest.approx(sizes["parameters"], rel=0.01)
    assert small["optimiser"] < sizes["optimiser"] / 10
    needed = adapters["programs"]["update"]["needed_flops"]
    assert needed < 0.9 * whole["programs"]["update"]["needed_flops"]


@pytest.mark.slow
@needs_compiler
def test_a_mixture_of_experts_on_a_slice_runs_as_on_tpus(tmp_path):
    fields = MIXTURE | {"moe_intermediate_size": 128}
    found = planned(
        tmp_path, "v5e:2x2", "--programs=update", "--config.mesh.expert=2", fields=fields
    )
    update = found["programs"]["update"]
    assert found["mesh"]["expert"] == 2
    assert 1.0 < update["flops"] / update["needed_flops"] < 2.5
