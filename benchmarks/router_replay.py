"""How much router replay brings the log-probabilities of trainer and engine together.

    python -m benchmarks.router_replay

Random mixtures of experts sample on the JAX engine. The trainer computes the log-probabilities of
the same tokens, with its routers' own choice of experts and with the engine's. The table is that of
docs/models.md.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import jax
import numpy as np

from semrl_jax import models
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.types import HiddenStateParams, Rollout, SampleRequest, SamplingParams, WeightVersion

CONFIG = models.DecoderConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=6, num_heads=4,
    num_kv_heads=2, head_dim=32, model_type="qwen3_moe",
    experts=models.Experts(32, 4, 64, normalize_weights=True),
)  # fmt: skip
MAX_PROMPT, MAX_RESPONSE = 32, 96
PAIRS = ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")
VERSION = WeightVersion("run", "attempt", 0, "")


class Found(NamedTuple):
    """Differences of log-probabilities."""

    mean: float  # nats
    largest: float
    beyond_two: float  # the share of tokens whose probabilities differ by a factor above 2


def sampled(policy: models.Policy, params: models.Params, count: int) -> list[Rollout]:
    """Responses of the JAX engine to random prompts, with the experts."""
    random, config = np.random.default_rng(0), policy.config
    engine = JaxEngine(policy)
    engine.begin_weight_update(models.tensor_specs(config, policy.compute_dtype))
    tensors = models.iterate_hf_tensors(params, config, policy.compute_dtype)
    engine.load_arrays((spec.name, array) for spec, array in tensors)
    requests = [
        SampleRequest(
            str(group), group, 0,
            random.integers(0, config.vocab_size, MAX_PROMPT).astype(np.int32), group,
        )
        for group in range(count)
    ]  # fmt: skip
    sampling = SamplingParams(MAX_RESPONSE)
    call = GenerateCall(
        tuple(requests), sampling, HiddenStateParams(), VERSION, routed_experts=True
    )

    async def generated() -> list[Rollout]:
        await engine.commit_weight_update(VERSION)
        return [rollout async for rollout in engine.generate(call)]

    found = asyncio.run(generated())
    engine.close()
    return found


def differences(
    trainer: str, engine: str, config: models.DecoderConfig = CONFIG, seed: int = 0, count: int = 32
) -> dict[bool, Found]:
    """The differences without (False) and with replay, for compute dtypes of trainer and engine."""
    params = models.Policy(config).init(jax.random.key(seed))
    rollouts = sampled(models.Policy(config, engine), params, count)
    limits = {"max_prompt_tokens": MAX_PROMPT, "max_response_tokens": MAX_RESPONSE}
    batch = pad_batch(rollouts, pad_token_id=0, routed_experts=config.routed_experts, **limits)
    mesh = models.make_mesh({}, jax.devices()[:1])
    plan, found = RowPlan(mesh, micro_batch_size=8), {}
    for replays in (False, True):
        passed = batch_logprobs(
            params, batch, policy=models.Policy(config, trainer), temperature=1.0, plan=plan,
            replays=replays,
        )  # fmt: skip
        difference = np.abs(passed.logprobs - batch.rollout_logprobs)[batch.response_mask]
        beyond = float((difference > np.log(2)).mean())
        found[replays] = Found(float(difference.mean()), float(difference.max()), beyond)
    return found


def main() -> None:
    """Prints the table, largest values of three models."""
    print("| Trainer, engine | replay | mean | max | tokens beyond a factor of 2 |")
    print("|---|---|---:|---:|---:|")
    for pair in PAIRS:
        found = [differences(*pair, seed=seed) for seed in range(3)]
        for replays in (False, True):
            worst = Found(*np.max([each[replays] for each in found], axis=0).tolist())
            cells = f"{worst.mean:.1e} | {worst.largest:.1e} | {worst.beyond_two:.2%}"
            print(f"| {', '.join(pair)} | {'yes' if replays else 'no'} | {cells} |")


if __name__ == "__main__":
    main()
