"""Estimates by formula: worked by hand for one model, and compared with a compiled plan."""

import pytest

from configs import default
from semrl_jax.planning import estimate, plan, report
from semrl_jax.support.chips import find_cluster
from tests.cases import refused
from tests.launch.conftest import succeed
from tests.planning.test_plan import needs_compiler, planned

PARAMETERS = 494_032_768  # of Qwen2.5-0.5B
LAYER = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864  # numbers in the kernels of a layer
RESPONSES, PROMPT, RESPONSE = 256, 256, 768
LENGTH = PROMPT + RESPONSE


def config_of(**fields):
    config = default.get_config()
    config.update_from_flattened_dict(
        {
            "model.path": "Qwen/Qwen2.5-0.5B", "model.compute_dtype": "bfloat16",
            "model.remat": "full", "data.prompts_per_step": 32,
            "training.prompts_per_minibatch": 32, "training.micro_batch_size": 16,
            "rollout.group_size": 8, "rollout.max_prompt_tokens": PROMPT,
            "rollout.max_response_tokens": RESPONSE, "algorithms.loss.kl_coefficient": 0.0,
        } | fields
    )  # fmt: skip
    return config


def estimated(topology, replica_nodes=0, **fields):
    config = config_of(**fields)
    where, architecture = plan.check(config, topology, compiles=False)
    return estimate.make_estimate(config, where, architecture, replica_nodes)


def test_memory_of_an_update_by_hand():
    update = estimated("h100:1x8")["programs"]["update"]
    tokens = 2 * LENGTH  # two rows of a micro-batch on each of the eight cards
    whole = 7 * 896 + 4 * 896 + 5 * 128 + 4 * 4864 + 2 * 14 * LENGTH
    expected = {
        "parameters": 4 * PARAMETERS / 8,
        "optimiser": 8 * PARAMETERS / 8,
        "gradients": 8 * PARAMETERS / 8,
        "activations": 2 * tokens * 896 * 24,
        "working layer": 2 * tokens * whole,
        "logits": 16 * 2**24,  # of a tile, which is less than 2 * 768 * 151_936
        "gathered": 2 * 2 * LAYER + (2 + 4) * 151_936 * 896,
    }
    assert update["bytes"].keys() == expected.keys() | {"total"}
    for kind, size in expected.items():
        assert update["bytes"][kind] == pytest.approx(size, rel=1e-6), kind
    assert update["bytes"]["total"] == pytest.approx(sum(expected.values()), rel=1e-6)


def test_times_of_an_update_by_hand():
    found = estimated("h100:1x8")
    update = found["programs"]["update"]
    forward = 2 * RESPONSES * LENGTH * 24 * LAYER + 2 * RESPONSES * RESPONSE * 896 * 151_936
    forward += 2 * RESPONSES * LENGTH * LENGTH * 896 * 24  # attention
    moved = 16 * (3 * 2 * PARAMETERS + 2 * 2 * 2 * LENGTH * 896 * 24) + 2 * 20 * PARAMETERS / 8
    sent = 16 * 7 / 8 * PARAMETERS * (2 * 2 + 4)  # gathered twice, and gradients scattered
    times = update["times_s"]
    assert times["compute"] == pytest.approx(4 * forward / 8 / 989.4e12, rel=1e-6)  # remat: full
    assert times["hbm"] == pytest.approx(moved / 3350e9, rel=1e-4)
    assert times["ici_async"] == pytest.approx(sent / 450e9, rel=1e-6)
    assert update["needed_flops"] == pytest.approx(3 * forward / 8)
    assert update["mfu"] == pytest.approx(0.75, abs=1e-3) and update["bound"] == "compute"
    assert found["fits"] and "pass" not in found["programs"]


def test_replicas_on_nodes_of_their_own():
    found = estimated(
        "h100:4x8", 2, **{"rollout.vllm_tensor_parallelism": 2, "training.micro_batch_size": 16}
    )
    replica, sample = found["replica"], found["programs"]["sample"]
    assert (found["chips"], found["mesh"]["fsdp"]) == (16, 16)
    assert (replica["copies"], replica["cards"], replica["responses"]) == (8, 2, 32)
    per_token = 2 * 2 * 24 * 2 * 64 / 2  # keys and values of two heads, on two cards
    assert replica["slots"] == 32
    assert sample["bytes"] == {
        "replica weights": PARAMETERS,
        "cache": 32 * LENGTH * per_token,
        "total": PARAMETERS + 32 * LENGTH * per_token,
    }
    read = PARAMETERS + 32 * (PROMPT + RESPONSE / 2) * per_token  # for each of 768 tokens
    assert sample["times_s"]["hbm"] == pytest.approx(RESPONSE * read / 3350e9)
    update = found["programs"]["update"]["times_s"]
    both = update["total"] + sample["times_s"]["total"]
    assert found["step_s"] == pytest.approx(both)
    ahead = estimated(
        "h100:4x8", 2, **{"rollout.vllm_tensor_parallelism": 2, "rollout.max_staleness": 1}
    )
    assert ahead["step_s"] < both and ahead["programs"]["update"]["bytes"]["earlier weights"]


def test_what_leaves_a_node():
    """Gathers around 16 cards of two nodes leave each node once; sums of eight pairs, eight times.

    In the second mesh, gathers stay within a node.
    """
    whole = estimated("h100:2x8")["programs"]["update"]
    assert whole["times_s"]["ici_async"] == 0  # the network between nodes is not known
    assert whole["leaving_bytes"] == pytest.approx(16 * 15 / 16 * PARAMETERS * (2 * 2 + 4))
    pairs = estimated("h100:2x8", **{"mesh.replica": 2, "mesh.fsdp": 8})["programs"]["update"]
    assert pairs["leaving_bytes"] == pytest.approx(16 * 8 * 2 * 4 * PARAMETERS / 8 / 2)
    sent = 16 * 7 / 8 * PARAMETERS * (2 * 2 + 4)
    assert pairs["times_s"]["ici_async"] == pytest.approx(sent / 450e9)


@pytest.mark.parametrize(("tensor", "heads"), [(2, 1), (4, 2)])
def test_a_cache_whose_heads_do_not_divide_is_whole_on_each_card(tensor, heads):
    """Qwen2.5-1.5B has two; with four cards, each has the keys and values of both."""
    settings = {"model.path": "Qwen/Qwen2.5-1.5B", "rollout.jax_tensor_parallelism": tensor}
    decode = estimated("h100:1x8", **settings)["programs"]["decode"]
    slots, per_token = 128, 2 * 2 * 28 * heads * 128
    assert decode["bytes"]["cache, or new weights"] == slots * LENGTH * per_token
    read = decode["bytes"]["engine weights"] + slots * (PROMPT + RESPONSE / 2) * per_token
    assert decode["times_s"]["hbm"] == pytest.approx(2 * RESPONSE * read / 3350e9)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_on_the_cards_of_the_trainer_takes_turns_with_it(lag):
    settings = {"rollout.jax_data_parallelism": -1, "rollout.max_staleness": lag}
    found = estimated("a100-40:1x8", **settings)
    sizes = {name: part["bytes"] for name, part in found["programs"].items()}
    assert found["replica"]["copies"] == 8
    assert sizes["decode"]["engine weights"] == 2 * PARAMETERS
    kept = sizes["update"]["parameters"] + sizes["update"]["optimiser"]
    updating = sizes["update"]["total"] + 2 * PARAMETERS * lag
    assert found["peak_bytes"] == max(updating, sizes["decode"]["total"] + kept)


def test_what_does_not_fit_gets_advice(capsys):
    found = estimated("l40s:1x4", **{"model.path": "Qwen/Qwen2.5-7B", "rollout.engine": "vllm"})
    assert not found["fits"]
    assert any("l40s:2x4" in line for line in found["advice"])
    assert found["most_of_a_card"] == pytest.approx(0.1)  # vLLM has 0.9 of some of these cards
    text = "\n".join(report.headline(found))
    assert "DOES NOT FIT" in text and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.1" in text
    assert any("rollout.in_turns" in line for line in found["advice"])
    turns = estimated(
        "h100:1x4", **{"rollout.engine": "vllm", "rollout.vllm_gpu_memory_utilization": 0.65,
        "rollout.in_turns": True},
    )  # fmt: skip
    assert turns["fits"] and turns["most_of_a_card"] == 0.9
    assert "set XLA_PYTHON_CLIENT_ALLOCATOR=platform" in "\n".join(report.headline(turns))
    alone = estimated(
        "l40s:4x4", 2, **{"model.path": "Qwen/Qwen2.5-32B", "training.micro_batch_size": 8}
    )
    assert not alone["replica"]["fits"]
    assert any("vllm_tensor_parallelism=2" in line for line in alone["advice"])


@pytest.mark.parametrize(
    ("topology", "replica_nodes", "fields", "message"),
    [
        ("h100:4", 0, {}, "nodes x GPUs of each, as h100:4x8"),
        ("b1:4x8", 0, {}, "the GPU one of h100, h200, a100-80, a100-40, l40s"),
        ("h100:2x8", 2, {}, "--replica_nodes=2 must be below the nodes"),
        ("v5p-8", 1, {}, "--replica_nodes=1 must be below the nodes of --topology"),
        ("h100:2x8", 1, {"rollout.vllm_tensor_parallelism": 16}, "=16 must be at most 8"),
        ("l40s:1x2", 0, {"model.path": "Qwen/Qwen2.5-7B"}, "takes 113 GiB; it fits into l40s:2x2"),
        ("h100:1x8", 0, {"training.micro_batch_size": 12}, "a multiple of the 8 data shards"),
    ],
)
def test_mistakes_are_one_line(topology, replica_nodes, fields, message):
    refused(message, estimated, topology, replica_nodes, **fields)


def test_a_cluster():
    assert find_cluster("v5p:2x4x4") is None
    found = find_cluster("a100-80:2x8")
    assert (found.name, found.num_chips, found.hbm_bytes) == ("a100-80:2x8", 16, 16 * 80e9)


@pytest.mark.slow
def test_the_command_needs_no_gpu():
    flags = ("--config=configs/gsm8k_qwen2_5_0_5b.py", "--topology=h100:2x8", "--replica_nodes=1")
    done = succeed("launch.plan", *flags)
    assert "h100:2x8 (estimated), h100:1x8 trains: 8 chips, fsdp 8" in done.stdout
    assert "replicas: 8 of 1 device(s), 64 of 64 responses side by side" in done.stdout


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:2x4"])
def test_the_estimate_is_near_the_compiled_plan(tmp_path, topology):
    compiled = planned(tmp_path, topology, "--programs=update")["programs"]["update"]
    found = planned(tmp_path, topology, "--estimate")["programs"]["update"]
    assert found["needed_flops"] == compiled["needed_flops"]
    least = compiled["bytes"]["total"]  # a small model on one chip needs less than the formula says
    assert least < estimate.MARGIN * found["bytes"]["total"] < 1.75 * least
