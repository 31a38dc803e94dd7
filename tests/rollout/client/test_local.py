"""A replica of this process does what one behind a server does, without a server."""

import dataclasses
import gc
import time
import weakref

import grpc
import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire import codec
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams, MetricParams, SampleRequest, SamplingParams
from tests.cases import raised, slow_after
from tests.rollout.client.test_client import sync
from tests.rollout.conftest import FAKE, TOKEN, assert_sampled, make_arrays, make_requests
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeScript
from tests.running import wait_until

SAMPLING = SamplingParams(16)
CONFIG = models.DecoderConfig(
    vocab_size=31, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=32, tie_embeddings=False,
)  # fmt: skip


@pytest.fixture
def local(world):
    return world.local


def fields_of(rollout):
    """All but the time and the names of replica and weights."""
    found = dataclasses.asdict(rollout)
    found["versions"] = [(span.start, span.end) for span in rollout.versions]
    for name in ("generate_s", "replica_id"):
        del found[name]
    return {
        name: (value.dtype, value.shape, value.tobytes()) if hasattr(value, "tobytes") else value
        for name, value in found.items()
    }


def assert_equal(some, others):
    some, others = ({r.sample_id: fields_of(r) for r in rollouts} for rollouts in (some, others))
    assert some == others and some


@pytest.mark.parametrize(
    ("states", "metrics"),
    [
        (HiddenStateParams(), None),
        (HiddenStateParams((-1, 1), "float32", ("decode", "prefill")), None),
        (HiddenStateParams((-1,)), None),
        (HiddenStateParams(), MetricParams(("effective_rank", "curvature"), stride=4)),
    ],
)
@pytest.mark.parametrize("groups_per_call", [0, 1])
def test_the_same_rollouts_and_counts_as_from_a_server(
    local, world, states, metrics, groups_per_call
):
    found, waits = [], {"stall_timeout_s": 60.0, "generate_timeout_s": 60.0}  # metrics are compiled
    for client in (local(**waits), world.client(world.replica(), **waits)):
        rollouts = client.generate(
            make_requests(),
            SAMPLING,
            states,
            version=sync(client),
            metrics=metrics,
            groups_per_call=groups_per_call,
        )
        found.append((list(rollouts), client.counters))
    (here, here_counts), (there, there_counts) = found
    assert_equal(here, there)
    assert here_counts == there_counts


def test_no_server_channel_or_message(local, monkeypatch):
    for name in ("insecure_channel", "secure_channel"):
        monkeypatch.delattr(grpc, name)
    monkeypatch.delattr(grpc.aio, "server")
    for name in ("encode_request", "encode_rollout", "encode_description", "RolloutDecoder"):
        monkeypatch.delattr(codec, name)
    client = local()
    rollouts = list(client.generate(make_requests(), SAMPLING, version=sync(client)))
    assert len(rollouts) == 8 and client.lines == []


def test_it_serves_the_version_of_its_last_weights(local):
    client = local()
    old, new = sync(client), sync(client, 2.0, step=1)
    np.testing.assert_array_equal(client.engine.weights["norm.weight"], make_arrays(2.0)[1])
    assert (old.step, new.step, new.digest) == (0, 1, "")
    assert_sampled(client, make_requests(), SAMPLING, version=new)
    with pytest.raises(RuntimeError, match="no replica serves weights run/attempt/0/"):
        list(client.generate(make_requests(), SAMPLING, version=old))


def test_the_errors_of_a_server(local):
    client = local()
    version, name = sync(client), "the embedded rollout replica"
    long = [dataclasses.replace(make_requests()[0], prompt_ids=np.ones(65, np.int32))]
    wrong = [dataclasses.replace(make_requests()[0], prompt_ids=np.array([101], np.int32))]
    for requests, expected in (
        (long, r"prompts\[0\] has 65 tokens; the replica takes 64"),
        (wrong, r"prompts\[0\] has token id 101"),
    ):
        with pytest.raises(ValueError, match=f"{name} refuses the call: {expected}"):
            list(client.generate(requests, SAMPLING, version=version))
    with pytest.raises(ValueError, match=r"sampling.top_k=102 must be in"):
        list(client.generate(make_requests(), SamplingParams(4, top_k=102), version=version))
    with pytest.raises(UserError, match="has model_hash='fake-model', the trainer 'another'"):
        client.connect(**FAKE | {"model_hash": "another"})


def test_weights_that_cannot_be_used(local):
    client = local()
    version = sync(client)
    arrays = make_arrays()
    arrays[1][3] = np.nan
    with pytest.raises(RuntimeError, match=r"refuses the weights: .*in tensor 'norm.weight'"):
        client.sync_weights(FAKE_SPECS, lambda: arrays, step=1)
    with pytest.raises(ValueError, match=r"missing: norm.weight"):
        client.sync_weights(FAKE_SPECS[:1], lambda: make_arrays()[:1], step=1)
    with pytest.raises(ValueError, match="1 arrays for 2 specs"):
        client.sync_weights(FAKE_SPECS, lambda: make_arrays()[:1], step=1)
    with pytest.raises(ValueError, match=r"'embed.weight' is float64\[16, 8\]; its spec says flo"):
        client.sync_weights(FAKE_SPECS, lambda: [np.zeros((16, 8))], step=1)

    def unreadable():
        yield make_arrays()[0]
        raise KeyError("the test says so")

    with pytest.raises(KeyError):
        client.sync_weights(FAKE_SPECS, unreadable, step=1)
    wait_until(lambda: not client.engine.is_staging)
    assert_sampled(client, make_requests(), SAMPLING, version=version)


def test_a_commit_that_takes_too_long(local):
    client = local(FakeScript(commit_delay_s=2.0), sync_timeout_s=0.3)
    raised(RuntimeError, r"no replica took the weights of step 0 within 0.3 s", sync, client)


def test_the_engine_waits_for_a_slow_consumer(local):
    client = local(stall_timeout_s=1.0)
    rollouts = client.generate(make_requests(60, 1), SAMPLING, version=sync(client))
    next(rollouts)
    time.sleep(1.5)
    assert client.engine.num_yielded < 30
    assert len(list(rollouts)) == 59 and client.counters["replica_failures"] == 0


@pytest.fixture(scope="module")
def policy():
    policy = models.Policy(CONFIG)
    return policy, jax.tree.map(lambda leaf: leaf * 1.5, policy.init(jax.random.key(3)))


def jax_requests():
    rng = np.random.default_rng(0)
    return [
        SampleRequest(f"{g}/{i}", g, i, prompt, 4 * g + i)
        for g, prompt in enumerate(rng.integers(3, 31, (5, 6), np.int32))
        for i in range(4)
    ]


@pytest.mark.parametrize("weight_dtype", slow_after(1, ["float32", "bfloat16"]))
def test_the_jax_engine_has_the_same_weights_and_rollouts(policy, weight_dtype):
    """To the bit; the engine's weights are its own, even if the trainer's are gone."""
    policy, params = policy
    specs = models.tensor_specs(CONFIG, weight_dtype)
    found = []

    def arrays(params, on_host):
        tensors = models.iterate_hf_tensors(params, CONFIG, weight_dtype, on_host=on_host)
        return (array for _, array in tensors)

    def sampled(client, params, on_host):
        client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=31)
        version = client.sync_weights(specs, lambda: arrays(params, on_host), step=0)
        if not on_host:
            jax.tree.map(lambda leaf: leaf.delete(), params)
        sampling, states = SamplingParams(24, eos_token_ids=(1,)), HiddenStateParams((-1,))
        found.append(list(client.generate(jax_requests(), sampling, states, version=version)))
        return version

    ids = {"run_id": "run", "attempt_id": "attempt"}
    with EmbeddedReplica(JaxEngine(policy, chunk=7), token=TOKEN) as replica:
        with RolloutClient([replica.address], TOKEN, **ids) as client:
            version = sampled(client, params, on_host=True)
    assert version.digest == codec.weights_digest(specs, arrays(params, on_host=True))
    for on_host in (True, False):
        own = jax.tree.map(lambda leaf: leaf + 0, params)
        with RolloutClient(local=LocalReplica(JaxEngine(policy, chunk=7)), **ids) as client:
            sampled(client, own, on_host)
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def test_weights_of_a_mesh_are_checked_on_its_devices(policy):
    """The engine has one device, and the trainer has four."""
    policy, params = policy
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1) | {"fsdp": 4}, jax.devices()[:4])
    params = jax.device_put(params, models.parameter_shardings(params, mesh))
    client = RolloutClient(
        local=LocalReplica(JaxEngine(policy)), run_id="run", attempt_id="attempt"
    )

    def read():
        tensors = models.iterate_hf_tensors(params, CONFIG, "float32", on_host=False)
        return (array for _, array in tensors)

    specs = models.tensor_specs(CONFIG, "float32")
    with client:
        client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=31)
        version = client.sync_weights(specs, read, step=0)
        assert len(list(client.generate(jax_requests(), SAMPLING, version=version))) == 20
        scale = params["final_norm"]["scale"]
        params["final_norm"]["scale"] = scale.at[0].set(np.inf)
        with pytest.raises(RuntimeError, match=r"not finite, in tensor 'model.norm"):
            client.sync_weights(specs, read, step=1)


def test_weights_can_be_freed_until_the_next_ones(policy):
    policy, params = policy
    engine = JaxEngine(policy)
    specs = models.tensor_specs(CONFIG, "float32")
    arrays = [array for _, array in models.iterate_hf_tensors(params, CONFIG, "float32")]
    client = RolloutClient(local=LocalReplica(engine), run_id="run", attempt_id="attempt")
    with client:
        client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=31)
        found = []
        for step in range(2):
            version = client.sync_weights(specs, lambda: iter(arrays), step=step)
            found.append(list(client.generate(jax_requests(), SAMPLING, version=version)))
            held = [weakref.ref(leaf) for leaf in jax.tree.leaves(engine._params)]
            client.release()
            assert all(ref() is not None for ref in held)
            client.release(weights=True)
            gc.collect()
            assert held and not any(ref() is not None for ref in held)
            with pytest.raises(RuntimeError, match="no replica serves weights run/attempt/"):
                list(client.generate(jax_requests(), SAMPLING, version=version))
    assert_equal(*found)
