"""Families with options of their own in vLLM, before and after new weights; by hand."""

import pytest

from semrl_jax import models
from tests.rollout.engines import test_vllm
from tests.rollout.engines.vllm_replica import serving

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gemma2", "phi3"])
def test_states_and_logprobs_after_a_sync_are_those_of_transformers(family, tmp_path, monkeypatch):
    def architecture(tokenizer, tied):
        return models.random_config(
            family, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=192,
            num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, tie_embeddings=tied,
            max_position_embeddings=512,
        )  # fmt: skip

    monkeypatch.setattr(test_vllm, "architecture", architecture)
    tied = family.startswith("gemma")
    pair = [test_vllm.Model(tmp_path, tied, seed=seed, scale=1.5) for seed in (0, 1)]
    flags = (
        "--config.rollout.max_prompt_tokens=200", "--config.rollout.max_response_tokens=64",
        "--config.rollout.vllm_max_num_seqs=16", "--config.rollout.vllm_kv_cache_gib=0.05",
    )  # fmt: skip
    with serving(pair[0].path, *flags) as client:
        for step, model in enumerate(pair):
            version = model.sync(client, step)
            prompts = test_vllm.random_prompts(model, [1, 7, 30, 64, 130])
            requests = test_vllm.requests_of(prompts, 2)
            found = test_vllm.sampled(client, version, requests, states=test_vllm.BOTH)
            test_vllm.assert_right(found.values(), model, tolerance=2e-5)
