"""How a vLLM replica of the production kind (worker processes, bfloat16) starts and ends."""

import dataclasses
import os
import pathlib
import re
import signal
import tempfile
import time

import jax
import numpy as np
import pytest
import torch
import transformers

from semrl_jax import data, models
from semrl_jax.types import HiddenStateParams
from tests.rollout.engines.test_vllm import SAMPLING as FLOAT32_SAMPLING
from tests.rollout.engines.test_vllm import (
    Model,
    architecture,
    random_prompts,
    requests_of,
    sampled,
)
from tests.rollout.engines.vllm_replica import running
from tests.rollout.server.test_prometheus import free_port, read
from tests.running import is_running

STATES = HiddenStateParams((-1,), "bfloat16")
SAMPLING = dataclasses.replace(FLOAT32_SAMPLING, max_tokens=256)
FLAGS = (
    "--config.rollout.weight_dtype=bfloat16", "--config.rollout.max_prompt_tokens=100",
    "--config.rollout.max_response_tokens=256", "--config.rollout.vllm_max_num_seqs=16",
    "--config.rollout.vllm_kv_cache_gib=0.25",
)  # fmt: skip
# Worker processes behind queues in /dev/shm, as on a machine of several devices.
WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("models"), tied=False)


@pytest.fixture
def temporary(monkeypatch):
    """Temporary files that a replica left: its own, and vLLM's sockets."""
    with tempfile.TemporaryDirectory() as directory:  # pytest's paths are too long for sockets
        monkeypatch.setenv("TMPDIR", directory)
        yield lambda: [
            path.name
            for path in pathlib.Path(directory).iterdir()
            if path.name.startswith("semrl-") or path.is_socket()
        ]


def queues(pids):
    """The files in /dev/shm that these processes have mapped; other programs have some, too."""
    maps = "".join(pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {pathlib.Path(path) for path in re.findall(r"/dev/shm/psm_\w+", maps)}


def title(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def assert_gone(pids, within_s):
    """All of these processes end by themselves."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def distances(found, expected):
    """Errors of rows, relative to their norm."""
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


def bfloat16_errors(model, rollouts):
    """Errors of the states, of the engine and of transformers, against float32."""
    rounded, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(
            model.path, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        for _ in range(2)
    )
    exact = exact.float()
    ours, theirs = [], []
    for rollout in rollouts:
        states, _ = model.states_and_logits(rollout, exact)
        ours.append(distances(rollout.hidden_states[:, 0].astype(np.float32), states))
        theirs.append(distances(model.states_and_logits(rollout, rounded)[0], states))
    return np.concatenate(ours), np.concatenate(theirs)


@pytest.mark.soak
def test_bfloat16_then_a_signal_in_the_middle_of_a_call(model, temporary, tmp_path):
    """States are as near to those of a float32 pass as those of transformers in bfloat16.

    With weights as they are drawn the mean is 0.9e-2; it is more with larger ones. The largest of
    some hundred rows depends on what was sampled (0.019 to 0.021).
    """
    port = free_port()
    metrics = f"--http_port={port}"
    with (
        running(model.path, *FLAGS, metrics, variables=WORKERS) as replica,
        replica.client() as client,
    ):
        info = read(port)["replica_info"]
        assert info["engine"] == "vllm" and re.match(r"\d+\.\d+", info["engine_version"])
        version = model.sync(client, 0, "bfloat16")
        requests = requests_of(random_prompts(model, [1, 17, 100]), 2)
        rollouts = sampled(client, version, requests, states=STATES)
        ours, theirs = bfloat16_errors(model, rollouts.values())
        assert ours.mean() < 1.5 * theirs.mean() and ours.max() < 2 * theirs.max(), (ours, theirs)
        plain = Model(tmp_path, tied=False, scale=1.0)
        of_plain = plain.sync(client, 1, "bfloat16")
        rollouts = sampled(client, of_plain, requests, states=STATES)
        assert bfloat16_errors(plain, rollouts.values())[0].mean() < 1.5e-2
        version = model.sync(client, 2, "bfloat16")
        counts, received = read(port), client.counters
        assert counts["sent_bytes_total", "states"] == received["state_bytes"] > 0
        assert counts["sent_bytes_total", "tokens"] == received["token_bytes"] > 0
        assert (counts["weight_step"], counts["weight_updates_total", "committed"]) == (2, 3)

        pids = [replica.pid, *replica.descendants()]
        shared = queues(pids)
        assert len(pids) >= 3 and shared  # the engine's process and its worker
        many = client.generate(
            requests_of(random_prompts(model, [50] * 200), 4), SAMPLING, STATES, version=version
        )
        next(many)
        replica.process.send_signal(signal.SIGINT)
        assert replica.wait(30) == 0, replica.lines
        assert_gone(pids, 1.0)
        assert not [path for path in shared if path.exists()] and not temporary()
        said = "\n".join(replica.lines)
        assert "Traceback" not in said and "leaked" not in said, said
        many.close()


@pytest.mark.soak
def test_a_replica_whose_engine_process_dies_between_calls_ends(model):
    """A supervisor can start it again before the next call meets it."""
    with running(model.path, *FLAGS, variables=WORKERS) as replica:
        replica.address()
        (engine,) = (pid for pid in replica.descendants() if "EngineCore" in title(pid))
        os.kill(engine, signal.SIGKILL)
        assert replica.wait(30) == 1, replica.lines
        assert "is dead" in replica.lines[-1], replica.lines[-5:]


@pytest.mark.soak
def test_no_process_outlives_a_replica_that_is_killed(model):
    with running(model.path, *FLAGS, variables=WORKERS) as replica:
        replica.address()
        pids = replica.descendants()
        shared = queues(pids)
        assert len(pids) >= 2 and shared
        replica.kill()
        assert_gone(pids, 10.0)
        assert not [path for path in shared if path.exists()]


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_replica_that_ends_while_it_starts(model, temporary, number):
    """The engine's process has no connection yet, and would wait for ever."""
    with running(model.path, *FLAGS, variables=WORKERS) as replica:
        deadline = time.monotonic() + 60
        while len(pids := replica.descendants()) < 2:
            assert time.monotonic() < deadline and replica.process.poll() is None, replica.lines
            time.sleep(0.1)
        time.sleep(2.0)
        replica.process.send_signal(number)
        code = replica.wait(30)
        assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL), replica.lines
        assert_gone(pids, 10.0)
        if number == signal.SIGTERM:
            assert not temporary()


@pytest.mark.soak
def test_last_line_has_the_cause_of_a_failed_engine_process(model, temporary):
    """A trainer shows only the last line of its child; that of vLLM is "See root cause above"."""
    flags = ("--config.rollout.vllm_kv_cache_gib=0.0001", "--config.rollout.max_prompt_tokens=256")
    with running(model.path, *FLAGS, *flags, variables=WORKERS) as replica:
        assert replica.wait(120) == 2
        assert "cannot serve this model: ValueError: " in replica.lines[-1], replica.lines[-5:]
        assert "cache" in replica.lines[-1] and "rollout.vllm_kv_cache_gib" in replica.lines[-1]
        assert not temporary()


@pytest.mark.soak
def test_heads_that_vllm_would_serve_wrong_are_refused(tmp_path):
    """Hidden size 128 and four heads: without the check, states had a relative error of 1.4."""
    policy = models.Policy(
        dataclasses.replace(architecture(data.character_tokenizer(), False), head_dim=48)
    )
    models.save_directory(
        tmp_path / "model",
        policy.init(jax.random.key(0)),
        policy.config,
        data.character_tokenizer(),
    )
    with running(tmp_path / "model", *FLAGS) as replica:
        assert replica.wait(90) == 2
        assert "heads are 48 wide" in replica.lines[-1] and "--engine=jax" in replica.lines[-1]
