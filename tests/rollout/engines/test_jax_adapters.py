"""Adapters that the JAX engine applies unmerged: its numbers, its bytes, and how it gets them."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.models import peft
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.types import SamplingParams
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.engines.responses import full_forward, make_requests

CONFIG = models.DecoderConfig(
    vocab_size=31, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=32, tie_embeddings=True,
)  # fmt: skip
SAMPLING = SamplingParams(12, 1.0)
TOKEN = "a-token"


def lora_of(rank=4, targets=("all-linear",)):
    return models.Lora(peft.find_modules(CONFIG, targets), rank, alpha=2.0 * rank)


@pytest.fixture(scope="module")
def base():
    return models.Policy(CONFIG).init(jax.random.key(3))


def adapted(base, size, lora=None, seed=1):
    """The base with an adapter whose second matrices have numbers of this size."""
    lora, random = lora or lora_of(), np.random.default_rng(seed)
    own = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape, np.float32), lora.shapes(base)
    )
    for pair in own["layers"].values():
        pair["lora_a"] /= np.sqrt(pair["lora_a"].shape[1], dtype=np.float32)
        pair["lora_b"] *= np.float32(size)
    return models.adapted(own, lora.base(base))


class Sender:
    """A client, and the weights of a step as a run sends them."""

    def __init__(self, client):
        self.client, self.num_whole = client, 0
        self.client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=31)

    def send(self, params, step, dtype="float32", unmerged=True):
        specs = models.tensor_specs(CONFIG, dtype)
        adapter = models.adapter_of(params, CONFIG) if unmerged else None
        if adapter is None:
            return self.client.sync_weights(
                specs, lambda: of(models.iterate_hf_tensors(params, CONFIG, dtype)), step=step
            )

        def read():
            self.num_whole += 1
            base = models.iterate_base_tensors(params, CONFIG, dtype)
            return of(itertools.chain(base, models.iterate_adapter_tensors(params, CONFIG)))

        return self.client.sync_weights(
            specs + adapter.specs(specs),
            read,
            step=step,
            adapter=adapter,
            read_adapter=lambda: of(models.iterate_adapter_tensors(params, CONFIG)),
        )

    def sample(self, version, **options):
        found = self.client.generate(make_requests(), SAMPLING, version=version, **options)
        return sorted(found, key=lambda each: each.sample_id)


def of(tensors):
    return (array for _, array in tensors)


@pytest.fixture
def world():
    """Starts replicas with this compute dtype; `senders` has a client of all of them."""
    with contextlib.ExitStack() as stack:

        def start(count=1, dtype="float32", **options):
            policy = models.Policy(CONFIG, dtype)
            replicas = [
                stack.enter_context(EmbeddedReplica(JaxEngine(policy), token=TOKEN))
                for _ in range(count)
            ]
            addresses = [replica.address for replica in replicas]
            client = RolloutClient(addresses, TOKEN, run_id="run", attempt_id="attempt", **options)
            return replicas, Sender(stack.enter_context(client))

        yield start


def mismatch(rollouts, params, dtype):
    """The mean absolute difference of log-probabilities between engine and trainer."""
    found = full_forward(models.Policy(CONFIG, dtype), params, rollouts)
    differences = [np.abs(rollout.rollout_logprobs - own) for rollout, _, own in found]
    return float(np.concatenate(differences).mean())


def test_an_adapter_alone_gives_the_responses_of_the_merged_model(world, base):
    _, sender = world()
    sender.send(adapted(base, 0.3, seed=5), 0)
    before = sender.client.counters["weight_bytes"]
    params = adapted(base, 0.3)
    version = sender.send(params, 1)
    assert sender.num_whole == 1  # the base came once
    adapter = models.adapter_of(params, CONFIG)
    sent = sender.client.counters["weight_bytes"] - before
    assert sent == sum(s.num_bytes for s in adapter.specs(models.tensor_specs(CONFIG, "float32")))
    unmerged = sender.sample(version)
    merged = sender.sample(sender.send(params, 2, unmerged=False))
    for actual, expected in zip(unmerged, merged, strict=True):
        np.testing.assert_array_equal(actual.response_ids, expected.response_ids)
        # Two orders of the sums of 64 to 96 products, in float32, through two layers.
        np.testing.assert_allclose(actual.rollout_logprobs, expected.rollout_logprobs, atol=2e-5)
    assert mismatch(unmerged, params, "float32") < 1e-6
    assert mismatch(unmerged, base, "float32") > 0.1


def test_in_bfloat16_small_steps_arrive(world, base):
    """Numbers of the adapter's product are below half a unit in the last place of most weights."""
    _, sender = world(dtype="bfloat16")
    params = adapted(base, 3e-4)
    found = {
        unmerged: mismatch(
            sender.sample(sender.send(params, 0, "bfloat16", unmerged)), params, "bfloat16"
        )
        for unmerged in (True, False)
    }
    assert found[True] < 0.5 * found[False]
