"""Adapters that vLLM applies unmerged, by its own LoRA support."""

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.models import peft
from semrl_jax.types import SampleRequest, SamplingParams
from tests.rollout.engines.adapters import Sender, adapted, mismatch
from tests.rollout.engines.vllm_replica import serving

pytestmark = pytest.mark.slow
SAMPLING = SamplingParams(24, 1.0)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_adapters_in_vllm(tmp_path, dtype):
    """The same responses as with merged weights; in bfloat16 they are nearer to the trainer's.

    The adapter of rank 3 is in buffers of rank 8. It changes neither the base nor a later one.
    """
    tokenizer = data.character_tokenizer()
    config = models.DecoderConfig(
        model_type="qwen2", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96,
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, tie_embeddings=True,
        max_position_embeddings=512,
    )  # fmt: skip
    base = models.Policy(config).init(jax.random.key(0))
    models.save_directory(tmp_path / "model", base, config, tokenizer)
    random = np.random.default_rng(0)
    requests = [
        SampleRequest(f"{i}", i, 0, random.integers(0, len(tokenizer), 9).astype(np.int32), i)
        for i in range(24)
    ]
    lora = models.Lora(peft.find_modules(config, ["all-linear"]), 3, alpha=6.0)
    size = 0.3 if dtype == "float32" else 3e-4
    first, second = (adapted(config, base, size, lora, seed) for seed in (1, 2))
    with serving(
        tmp_path / "model", "--config.lora.rank=3", f"--config.rollout.weight_dtype={dtype}"
    ) as client:
        (description,) = client.connect(
            model_hash=config.hash, tokenizer_hash="", vocab_size=config.vocab_size
        )
        assert description.max_adapter_rank == 3 and not description.base_digest
        sender = Sender(client, config, dtype)
        sender.send(first, 0)
        version = sender.send(second, 1)
        assert sender.num_whole == 1
        unmerged = sender.sample(version, requests, SAMPLING)
        merged = sender.sample(sender.send(second, 2, unmerged=False), requests, SAMPLING)
        again = sender.sample(sender.send(second, 3), requests, SAMPLING)
    assert [r.rollout_logprobs.tolist() for r in again] == [
        r.rollout_logprobs.tolist() for r in unmerged
    ]
    found = [mismatch(config, each, second, dtype) for each in (unmerged, merged)]
    if dtype == "bfloat16":
        assert found[0] < 0.95 * found[1]  # 0.0076 and 0.0091: most of it is the engine's rounding
        return
    assert max(found) < 1e-5  # float32 sums in another order
    assert mismatch(config, unmerged, first, dtype) > 0.1
    for actual, expected in zip(unmerged, merged, strict=True):
        np.testing.assert_array_equal(actual.response_ids, expected.response_ids)
        np.testing.assert_allclose(actual.rollout_logprobs, expected.rollout_logprobs, atol=1e-4)
