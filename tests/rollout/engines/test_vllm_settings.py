"""Checks of the vLLM engine before it starts vLLM; these tests do not need vLLM."""

import asyncio
import dataclasses
import pathlib
import shutil
import sys

import numpy as np
import pytest

from semrl_jax.rollout.engines.vllm import (
    VllmEngine,
    VllmModel,
    VllmSettings,
    _root_cause,
    check_queue_space,
    least_entropies,
)
from semrl_jax.rollout.wire.codec import LimitExceeded, NotOffered
from semrl_jax.support.errors import UserError
from semrl_jax.types import SampleRequest
from tests.launch.conftest import run

PLUGIN = pathlib.Path(__file__).parents[3] / "third_party" / "vllm_patch"
MODEL = VllmModel(
    directory="/nowhere", specs=(), model_hash="m", tokenizer_hash="t", vocab_size=11,
    hidden_size=128, num_layers=2,
)  # fmt: skip


def test_entropies_of_the_likeliest_tokens_are_a_lower_bound():
    """Against sums over a whole vocabulary; -inf is of a token that cannot be sampled."""
    random = np.random.default_rng(0)
    logits = 3 * random.normal(size=(40, 30))
    logits[:20, 4:] = -np.inf
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    exact = np.array([-sum(x * np.log(x) for x in row if x > 0) for row in p])
    with np.errstate(divide="ignore"):
        likeliest = np.log(np.sort(p)[:, ::-1])
    for count in (1, 5, 29, 30):
        found = least_entropies(likeliest[:, :count].astype(np.float32))
        assert (found <= exact + 1e-6).all()
        rest = p.sum(axis=1) - np.sort(p)[:, ::-1][:, :count].sum(axis=1)
        parts = [*np.sort(p)[:, ::-1][:, :count].T, rest]
        lumped = -sum(part * np.log(np.maximum(part, 1e-300)) for part in np.maximum(parts, 0))
        np.testing.assert_allclose(found, lumped, atol=1e-5)
        if count >= 29:
            np.testing.assert_allclose(found, exact, atol=1e-5)
    assert (least_entropies(likeliest[20:, :5]) < exact[20:] - 0.01).any()


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    import semrl_vllm

    monkeypatch.setattr(semrl_vllm, "vllm_version", lambda: "0.32.0")


def test_without_the_plugin(monkeypatch):
    monkeypatch.setitem(sys.modules, "semrl_vllm", None)
    with pytest.raises(UserError, match=r"semrl_vllm.*third_party/vllm_patch/make_env\.sh"):
        VllmEngine(MODEL, VllmSettings())


def test_another_vllm(plugin, monkeypatch):
    import semrl_vllm

    def refuse():
        raise semrl_vllm.VersionError("vllm 9.9 is not among them")

    monkeypatch.setattr(semrl_vllm, "vllm_version", refuse)
    with pytest.raises(UserError, match=r"vllm 9\.9"):
        VllmEngine(MODEL, VllmSettings())


def test_states_that_do_not_fit_into_memory(plugin):
    """9/8 of 10**7 slots with 1024 rows of 256 bytes and a tag of 8 bytes each: 2832 GiB."""
    settings = dataclasses.replace(VllmSettings(), max_num_seqs=10**7)
    with pytest.raises(
        UserError, match=r"vllm_max_num_seqs=10000000 .* 1024 tokens need 2832\.4 GiB"
    ):
        VllmEngine(MODEL, settings, max_response_tokens=1024)
    VllmEngine(MODEL, VllmSettings(max_num_seqs=8), max_response_tokens=64)


def test_states_that_do_not_fit_into_a_container(plugin, monkeypatch):
    engine = VllmEngine(MODEL, VllmSettings(max_num_seqs=8), max_response_tokens=64)
    needed = dataclasses.replace(engine._pool_shape, num_prompt_rows=0).num_bytes
    left = [needed]
    monkeypatch.setattr("semrl_jax.rollout.host_memory._left_in_groups", lambda root: left)
    VllmEngine(MODEL, VllmSettings(max_num_seqs=8), max_response_tokens=64)
    left[0] -= 1
    with pytest.raises(UserError, match=r"lower rollout\.vllm_max_num_seqs"):
        VllmEngine(MODEL, VllmSettings(max_num_seqs=8), max_response_tokens=64)


def test_states_of_prompts_that_do_not_fit_into_memory(plugin, monkeypatch):
    """A replica of 9 slots holds 9 prompts at a time, here of at most 3 tokens of 256 bytes."""
    engine = VllmEngine(MODEL, VllmSettings(max_num_seqs=8), max_response_tokens=64)
    requests = [SampleRequest(str(i), i, 0, np.ones(1 + i % 3, np.int32), 0) for i in range(20)]
    monkeypatch.setattr("semrl_jax.rollout.engines.vllm.available_bytes", lambda: 9 * 3 * 256)
    engine._check_prompt_rows(requests)
    monkeypatch.setattr("semrl_jax.rollout.engines.vllm.available_bytes", lambda: 9 * 3 * 256 - 1)
    with pytest.raises(LimitExceeded, match=r"states of 9 prompts of 3 tokens .* fewer samples"):
        engine._check_prompt_rows(requests)


def test_one_that_was_not_started_to_sleep_says_so(plugin):
    engine = VllmEngine(MODEL, VllmSettings())
    with pytest.raises(NotOffered, match=r"was started without rollout\.in_turns=True"):
        asyncio.run(engine.sleep())


def test_queues_that_do_not_fit_into_shared_memory(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_queue_space(free // 2, str(tmp_path))
    with pytest.raises(UserError, match=rf"need {2**20} MiB of {tmp_path}.*--shm-size"):
        check_queue_space(max(2**40, 2 * free) if free > 2**40 else 2**40, str(tmp_path))


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (None, ""),
        ("EngineCore failed to start.\n  File 'x'\nValueError: too small", "ValueError: too small"),
        ("ValueError: none. Reasons: \nA needs B.\nmore", "ValueError: none. Reasons: A needs B."),
        (
            "WorkerProc failed to start.\ntorch.OutOfMemoryError: 2 GiB\nEngineCore failed.\n"
            "Exception: WorkerProc initialization failed. See stack trace for root cause.",
            "torch.OutOfMemoryError: 2 GiB",
        ),
    ],
)  # fmt: skip
def test_root_cause_in_the_logs_of_vllms_processes(tmp_path, log, cause):
    if log is not None:
        (tmp_path / "errors.log").write_text(log)
    assert _root_cause(tmp_path / "errors.log") == cause


def test_launcher_in_the_trainers_environment(monkeypatch):
    """The error names the environment that is needed and the script that makes it."""
    monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", "a-token-for-tests")
    result = run("launch.rollout", "--config=configs/quickstart.py", "--engine=vllm", "--port=0")
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "semrl_vllm" in line and "third_party/vllm_patch/make_env.sh" in line
