"""A client whose replicas sleep between the last response and the next weights."""

import re
import threading

import jax
import pytest

from semrl_jax import models
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams, SamplingParams
from tests.rollout.client.test_client import sync
from tests.rollout.client.test_local import CONFIG, assert_equal, jax_requests
from tests.rollout.conftest import TOKEN, assert_sampled, make_requests
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FakeScript
from tests.rollout.server.test_service import CODES, generate_message, refusal
from tests.running import wait_until

SAMPLING = SamplingParams(16)


def test_it_sleeps_until_weights_come(world):
    replicas = [world.replica(), world.replica()]
    client = world.client(*replicas, in_turns=True)
    for step in range(2):
        version = sync(client, 1.0 + step, step=step)
        assert_sampled(client, make_requests(), SAMPLING, version=version)
        client.release()
        assert all(replica.engine.weights for replica in replicas)
        client.release(weights=True)
        client.release(weights=True)  # an attempt that resumes does not know that it sleeps
        assert not any(replica.engine.weights for replica in replicas)
        with pytest.raises(RuntimeError, match="no replica serves weights run/attempt/"):
            list(client.generate(make_requests(), SAMPLING, version=version))
        stub, options = world.stub(replicas[0])
        code, details = refusal(stub.Generate, generate_message(version), **options)
        assert code == CODES.FAILED_PRECONDITION and "serves weights None" in details
    assert client.lines == [] and client.counters["replica_failures"] == 0
    client = world.client(replicas[0])  # of a run that does not sample in turns
    version = sync(client)
    client.release(weights=True)
    assert_sampled(client, make_requests(), SAMPLING, version=version)


def test_it_belongs_to_its_run_while_it_sleeps(world):
    replica = world.replica()
    client = world.client(replica, in_turns=True)
    sync(client)
    other = world.client(replica, run_id="other", in_turns=True)
    with pytest.raises(UserError, match=r"belongs to run 'run'; it does not sleep for run 'other'"):
        other.release(weights=True)
    assert replica.engine.weights
    client.release(weights=True)
    with pytest.raises(UserError, match=r"belongs to run 'run'; it refuses weights of run 'other'"):
        sync(other)
    assert_sampled(client, make_requests(), SAMPLING, version=sync(client, step=1))


def test_running_calls_end_first(world):
    replica = world.replica(FakeScript(delay_s=0.05))
    client, other = world.client(replica), world.client(replica, in_turns=True)
    found, version = [], sync(client)
    calls = client.generate(make_requests(), SAMPLING, version=version)
    sampling = threading.Thread(target=lambda: found.extend(calls))
    sampling.start()
    wait_until(lambda: replica.engine.num_yielded)
    other.release(weights=True)
    assert replica.engine.num_closed == 1  # the one call
    sampling.join()
    assert len(found) == 8


def test_what_cannot_sleep_is_said(world):
    with pytest.raises(UserError, match="does not offer what the call asks for: this engine does"):
        client = world.client(world.replica(FakeScript(sleeps=False)), in_turns=True)
        client.release(weights=True)
    client = world.client(world.replica(FakeScript(remark="it frees nothing")), in_turns=True)
    for _ in range(3):
        client.release(weights=True)
        sync(client)
    (line,) = client.lines
    assert re.fullmatch(r"rollout replica 127\.0\.0\.1:\d+: it frees nothing", line)


def test_one_that_dies_in_its_sleep_is_set_aside_until_it_is_back(world):
    lost, kept = world.replica(), world.replica()
    client = world.client(lost, kept, in_turns=True)
    sync(client)
    client.release(weights=True)
    lost.close(0.0)
    client.release(weights=True)
    assert not kept.engine.weights and client.counters["replica_failures"] == 1
    assert_sampled(client, make_requests(), SAMPLING, version=sync(client, step=1))
    assert any("is set aside" in line for line in client.lines)


@pytest.mark.slow
def test_bytes_that_the_jax_engine_frees():
    policy = models.Policy(CONFIG)
    params = policy.init(0)
    specs = models.tensor_specs(CONFIG, "float32")
    arrays = [array for _, array in models.iterate_hf_tensors(params, CONFIG, "float32")]
    size = sum(array.nbytes for array in arrays)

    def held():
        return sum(array.nbytes for array in jax.live_arrays())

    with (
        EmbeddedReplica(JaxEngine(policy), token=TOKEN) as replica,
        RolloutClient(
            (replica.address,), TOKEN, run_id="run", attempt_id="attempt", in_turns=True
        ) as client,
    ):
        client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=CONFIG.vocab_size)
        before, found = held(), []
        for step in range(2):
            version = client.sync_weights(specs, lambda: iter(arrays), step=step)
            call = client.generate(
                jax_requests(), SAMPLING, HiddenStateParams(), version=version, keep=True
            )
            found.append(list(call))
            awake = held()
            client.release(weights=True)
            assert awake - held() > size  # the weights, and the kept caches
            assert held() <= before
    assert_equal(*found)
