"""The tinker SDK and recipes of its cookbook, unmodified, in an environment that has them."""

import json
import os
import signal
import subprocess
import threading

import numpy as np
import pytest

from tests.tinker.conftest import KEY, NAME, PYTHON

pytestmark = pytest.mark.slow

TRAINS = """
import json, os, sys
import numpy as np
import tinker
from tinker import types

service = tinker.ServiceClient()
capabilities = service.get_server_capabilities()
name = capabilities.supported_models[0].model_name
training = service.create_lora_training_client(base_model=name, rank=4, seed=1).result()
info = training.get_info()
tokens = [5, 6, 7, 8, 9, 10, 11, 12]

def datum(**inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
    )

adam = types.AdamParams(learning_rate=0.02)
ones = np.ones(len(tokens) - 1, np.float32)
losses = []
for _ in range(int(sys.argv[1])):
    passed = training.forward_backward([datum(weights=ones)] * 3, "cross_entropy")
    stepped = training.optim_step(adam)
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()

found = {"losses": losses, "rank": info.lora_rank}
if len(sys.argv) == 2:
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=[])
    prompt = types.ModelInput.from_ints(tokens[:3])
    answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    found["tokens"] = [list(map(int, each.tokens)) for each in answer.sequences]
    found["logprobs"] = [list(map(float, each.logprobs)) for each in answer.sequences]
    found["prompt"] = answer.prompt_logprobs
    found["scored"] = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    whole = tokens[:3] + found["tokens"][0]
    shifted = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(whole[1:]),
            "logprobs": np.array([0.0, 0.0, *found["logprobs"][0]], np.float32),
            "advantages": np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], np.float32),
        },
    )
    for loss, config in (
        ("importance_sampling", None), ("ppo", {"clip_low_threshold": 0.9}), ("cispo", None),
        ("dro", {"beta": 0.1}),
    ):
        passed = training.forward([shifted], loss, config).result()
        found[loss] = passed.metrics["loss:sum"]
        found["learner"] = list(map(float, passed.loss_fn_outputs[0]["logprobs"].data))
    saved = training.save_state("state").result().path
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(saved).result()
    session = run.training_run_id.partition(":")[0]
    def listed():
        checkpoints = rest.list_checkpoints(run.training_run_id).result().checkpoints
        return [checkpoint.checkpoint_id for checkpoint in checkpoints]
    found["run"] = [
        run.lora_rank, run.base_model, run.last_checkpoint.tinker_path == saved, listed(),
        rest.list_user_checkpoints(limit=1).result().checkpoints[0].tinker_path == saved,
        rest.list_training_runs(limit=1).result().training_runs[0] == run,
        rest.get_session(session).result().training_run_ids == [run.training_run_id],
        rest.list_sessions().result().sessions[0] == session,
    ]
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    def one(client):
        passed = client.forward_backward([datum(weights=ones)], "cross_entropy").result()
        client.optim_step(adam).result()
        return passed.metrics["loss:sum"]
    found["resumed"] = [[one(client) for _ in range(2)] for client in (training, again)]
    weights = training.save_weights_for_sampler("named").result().path
    rest.delete_checkpoint_from_tinker_path(saved).result()
    found["left"] = listed()
    other = service.create_sampling_client(model_path=weights).result()
    found["base_model"] = other.get_base_model()
    try:
        training.forward_backward([datum()], "ppo").result()
    except Exception as error:
        found["refusal"] = str(error)
print(json.dumps(found))
"""


def python(arguments, server, cwd, timeout_s=1200):
    """Runs the Python that has the SDK, as a client of the server."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run benchmarks/peers/make_env.sh tinker")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    process = subprocess.Popen(
        [PYTHON, *map(str, arguments)], cwd=cwd, text=True,
        env={**os.environ, **offline, "TINKER_API_KEY": KEY, "TINKER_BASE_URL": server.url},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err[-4000:]
    return out


def test_it_trains_samples_saves_and_resumes(served, model_directory):
    found = json.loads(python(["-c", TRAINS, 8], served, model_directory).splitlines()[-1])
    assert found["rank"] == 4 and found["base_model"] == NAME
    assert found["losses"][-1] < 0.6 * found["losses"][0]
    assert [len(each) for each in found["tokens"]] == [5, 5]
    assert found["prompt"][0] is None
    np.testing.assert_allclose(found["prompt"][1:], found["scored"][1:3], rtol=1e-3, atol=1e-3)
    # The engine's log-probabilities are the learner's, so the ratio is 1.
    p, q = np.array(found["learner"][2:]), np.array(found["logprobs"][0])
    np.testing.assert_allclose(p, q, rtol=2e-3, atol=2e-3)
    ratio = np.exp(p - q)
    expected = {
        "importance_sampling": -ratio.sum(),
        "ppo": -np.minimum(ratio, np.clip(ratio, 0.9, 1.2)).sum(),
        "cispo": -(ratio * p).sum(),
        "dro": -(p - 0.05 * (p - q) ** 2).sum() + 0.05 * np.square(found["learner"][:2]).sum(),
    }
    for loss, value in expected.items():
        assert found[loss] == pytest.approx(value, rel=1e-3), loss
    assert found["run"] == [4, NAME, True, ["weights/state"], True, True, True, True]
    assert found["left"] == ["sampler_weights/named"]
    here, there = found["resumed"]
    assert there == pytest.approx(here, rel=1e-5)
    assert "ppo takes target_tokens, logprobs, advantages" in found["refusal"]


@pytest.mark.parametrize(("kills", "steps"), [(2, 8), pytest.param(10, 40, marks=pytest.mark.soak)])
def test_its_retries_outlive_killed_servers(own_server, model_directory, kills, steps):
    expected = json.loads(python(["-c", TRAINS, steps, 0], own_server, model_directory))

    ended, killed = threading.Event(), []

    def kill():
        random = np.random.default_rng(0)
        while len(killed) < kills and not ended.wait(random.uniform(0.1, 1.5)):
            killed.append(own_server.stop(signal.SIGKILL))
            own_server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = json.loads(python(["-c", TRAINS, steps, 0], own_server, model_directory))
    finally:
        ended.set()
        killer.join()
    assert len(killed) >= kills // 2  # of a fast machine; the recipe may end before the others
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_supervised_recipe(served, model_directory, tmp_path):
    home = model_directory.parents[1]
    data = home / "HuggingFaceH4" / "no_robots"
    data.mkdir(parents=True)
    messages = [{"role": "user", "content": "4 + 5?"}, {"role": "assistant", "content": "9"}]
    (data / "train.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 24)
    python(
        ["-m", "tinker_cookbook.recipes.sl_loop", f"log_path={tmp_path}", f"model_name={NAME}",
         "batch_size=4", "lora_rank=4", "learning_rate=1e-2", "max_length=128", "save_every=3"],
        served, home,
    )  # fmt: skip
    metrics = lines(tmp_path / "metrics.jsonl")
    assert metrics[-1]["train_mean_nll"] < 0.7 * metrics[0]["train_mean_nll"]
    assert lines(tmp_path / "checkpoints.jsonl")[-1]["name"] == "final"


def test_the_arithmetic_recipe(served, model_directory, tmp_path):
    python(
        ["-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic", f"model_name={NAME}",
         f"log_path={tmp_path / 'log'}", "lora_rank=4", "group_size=4", "groups_per_batch=4",
         "max_tokens=5", "max_steps=2", "loss_fn=importance_sampling", "learning_rate=1e-3",
         "eval_every=0", "save_every=1"],
        served, model_directory.parents[1],
    )  # fmt: skip
    steps = lines(tmp_path / "log" / "metrics.jsonl")[:2]
    # The engine and the trainer have the same log-probabilities.
    assert all(abs(step["optim/kl_sample_train_v1"]) < 1e-4 for step in steps)


@pytest.mark.soak
def test_the_recipe_of_several_turns(served, model_directory, tmp_path):
    python(
        ["-m", "tinker_cookbook.recipes.multiplayer_rl.guess_number.train", f"model_name={NAME}",
         f"log_path={tmp_path / 'log'}", "renderer_name=role_colon", "group_size=2",
         "batch_size=2", "max_tokens=4", "max_steps=1", "eval_every=0", "save_every=0"],
        served, model_directory.parents[1],
    )  # fmt: skip
    assert (tmp_path / "log" / "metrics.jsonl").is_file()
