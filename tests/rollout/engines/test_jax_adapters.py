"""Adapters that the JAX engine applies unmerged: its numbers, its bytes, and how it gets them."""

import contextlib
import functools
import types

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.jobs.mismatch import compared_weights
from semrl_jax.models import peft
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.types import SamplingParams
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.engines.adapters import Sender, adapted, mismatch
from tests.rollout.engines.responses import make_requests

pytestmark = pytest.mark.slow
CONFIG = models.DecoderConfig(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=32, tie_embeddings=True,
)  # fmt: skip
SAMPLING = SamplingParams(12, 1.0)
TOKEN = "a-token"


def lora_of(rank=4, targets=("all-linear",)):
    return models.Lora(peft.find_modules(CONFIG, targets), rank, alpha=2.0 * rank)


def with_adapter(base, size, lora=None, seed=1):
    return adapted(CONFIG, base, size, lora or lora_of(), seed)


@pytest.fixture(scope="module")
def base():
    return models.Policy(CONFIG).init(jax.random.key(3))


@pytest.fixture
def world():
    """Starts replicas with this compute dtype; `senders` has a client of all of them."""
    with contextlib.ExitStack() as stack:

        def start(count=1, dtype="float32", mesh=None, **options):
            policy = models.Policy(CONFIG, dtype)
            replicas = [
                stack.enter_context(EmbeddedReplica(JaxEngine(policy, mesh=mesh), token=TOKEN))
                for _ in range(count)
            ]
            addresses = [replica.address for replica in replicas]
            client = RolloutClient(addresses, TOKEN, run_id="run", attempt_id="attempt", **options)
            stack.enter_context(client)
            client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=CONFIG.vocab_size)
            return replicas, Sender(client, CONFIG, dtype)

        yield start


def test_an_adapter_alone_gives_the_responses_of_the_merged_model(world, base):
    _, sender = world()
    sender.send(with_adapter(base, 0.3, seed=5), 0)
    before = sender.client.counters["weight_bytes"]
    params = with_adapter(base, 0.3)
    version = sender.send(params, 1)
    assert sender.num_whole == 1  # the base came once
    adapter = models.adapter_of(params, CONFIG)
    sent = sender.client.counters["weight_bytes"] - before
    assert sent == sum(s.num_bytes for s in adapter.specs(models.tensor_specs(CONFIG, "float32")))
    unmerged = sender.sample(version, make_requests(), SAMPLING)
    merged = sender.sample(sender.send(params, 2, unmerged=False), make_requests(), SAMPLING)
    for actual, expected in zip(unmerged, merged, strict=True):
        np.testing.assert_array_equal(actual.response_ids, expected.response_ids)
        # Two orders of the sums of 64 to 96 products, in float32, through two layers.
        np.testing.assert_allclose(actual.rollout_logprobs, expected.rollout_logprobs, atol=2e-5)
    assert mismatch(CONFIG, unmerged, params, "float32") < 1e-6
    assert mismatch(CONFIG, unmerged, base, "float32") > 0.1


def test_in_bfloat16_small_steps_arrive(world, base):
    """Numbers of the adapter's product are below half a unit in the last place of most weights."""
    _, sender = world(dtype="bfloat16")
    params = with_adapter(base, 3e-4)
    merged, unmerged = (
        mismatch(
            CONFIG,
            sender.sample(sender.send(params, 0, unmerged), make_requests(), SAMPLING),
            params,
            "bfloat16",
        )
        for unmerged in (False, True)
    )
    assert unmerged < 0.6 * merged  # 0.0048 and 0.0108


def test_checksums_of_a_base_and_its_adapter(world, base):
    """`launch.mismatch` compares a replica of a run with the trainer's own two parts."""
    _, sender = world(dtype="bfloat16")
    params, other = (with_adapter(base, 0.3, lora_of(targets=["q_proj"]), s) for s in (1, 2))
    sender.send(params, 0)
    sums, reporter = sender.client.tensor_sums(), types.SimpleNamespace(line=lambda text: None)
    compare = functools.partial(compared_weights, "jax", sums)
    assert not compare(params, {}, CONFIG, reporter).differing
    found = compare(other, {"before": params}, CONFIG, reporter).differing
    assert found == {
        f"{layer}/query/{leaf}": "before" for layer in "01" for leaf in ("lora_a", "lora_b")
    }


@pytest.mark.soak
def test_a_mesh_applies_adapters(world, base):
    params = with_adapter(base, 0.3)
    _, one = world()
    expected = one.sample(one.send(params, 0), make_requests(), SAMPLING)
    shape = dict.fromkeys(models.AXES, 1) | {"tensor": 2, "replica": 2}
    _, split = world(mesh=models.make_mesh(shape, jax.devices()[:4]))
    split.send(with_adapter(base, 0.3, seed=8), 0)
    actual = split.sample(split.send(params, 1), make_requests(), SAMPLING)
    for own, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(own.response_ids, other.response_ids)
        np.testing.assert_allclose(own.rollout_logprobs, other.rollout_logprobs, atol=2e-5)
