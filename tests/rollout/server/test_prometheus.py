"""The counts of a replica as Prometheus reads them, and the standard health service."""

import concurrent.futures
import socket
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from semrl_jax import data
from semrl_jax.rollout.engines.base import EngineDeadError
from semrl_jax.rollout.server import Http
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.rollout.wire.codec import SERVICE_NAME
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import HiddenStateParams, SamplingParams, WeightVersion
from tests.rollout.conftest import TOKEN, assert_sampled, make_arrays, make_requests
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine, FakeScript
from tests.rollout.server.test_service import generate_message, update_messages
from tests.rollout.server.test_service import sync as sync_by_stub
from tests.running import wait_until

STATUS = health_pb2.HealthCheckResponse


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def counted(world):
    """Starts a replica with HTTP; returns it and a function that reads its counts."""

    def start(script=None, **settings):
        port = free_port()
        engine = FakeEngine(script=script or FakeScript())
        http = Http(port, "127.0.0.1", data.character_tokenizer(), (1,), "fake")
        replica = EmbeddedReplica(engine, token=TOKEN, http=http, **settings)
        world.stack.callback(replica.close, 0.0)
        replica.engine = engine
        return replica, lambda: read(port)

    return start


def read(port):
    """The samples of the page: {(name without prefix, label): value}."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.name.startswith("semrl_rollout_")
            labels = sample.labels if "info" in sample.name else tuple(sample.labels.values())
            name = sample.name.removeprefix("semrl_rollout_")
            found[name if not sample.labels or "info" in name else (name, *labels)] = (
                labels if "info" in name else sample.value
            )
    return found


def test_counts_are_those_of_the_client(world, counted):
    replica, metrics = counted()
    before = metrics()
    assert "weight_step" not in before and before[("responses_total", "eos")] == 0
    info = before["replica_info"]
    assert (info["engine"], info["engine_version"]) == ("fake", "1") and info["replica"]
    client = world.client(replica)
    version = client.sync_weights(FAKE_SPECS, lambda: make_arrays(), step=7)
    requests = make_requests(10, 3)
    sampling = SamplingParams(16, eos_token_ids=(9,), stop_token_ids=(14,))
    states = HiddenStateParams((-1, 2), "bfloat16", ("decode", "prefill"))
    rollouts = assert_sampled(client, requests, sampling, states, version=version)
    after, counters = metrics(), client.counters
    assert after["response_tokens_total"] == sum(len(r.response_ids) for r in rollouts)
    for reason in ("eos", "stop", "length", "aborted"):
        expected = sum(r.finish_reason == reason for r in rollouts)
        assert after["responses_total", reason] == expected
    assert after["sent_bytes_total", "tokens"] == counters["token_bytes"] > 0
    assert after["sent_bytes_total", "states"] == counters["state_bytes"] > 0
    assert after["weight_step"] == 7
    assert after["running_calls"] == after["unfinished_responses"] == after["paused"] == 0


def test_gauges_of_running_calls_pauses_and_aborts(world, counted):
    replica, metrics = counted(FakeScript(hang_after=2))
    stub, options = world.stub(replica)
    version = sync_by_stub(stub, options)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        replies = pool.submit(lambda: list(stub.Generate(generate_message(version), **options)))
        wait_until(lambda: metrics()["unfinished_responses"] == 6)
        assert metrics()["running_calls"] == 1
        assert stub.Abort(pb.AbortRequest(), **options).num_aborted == 6
        replies.result()
    stub.Pause(pb.PauseRequest(), **options)
    found = metrics()
    assert (found["aborts_total"], found["responses_total", "aborted"]) == (1, 6)
    assert (found["running_calls"], found["unfinished_responses"], found["paused"]) == (0, 0, 1)
    stub.Resume(pb.ResumeRequest(), **options)
    assert metrics()["paused"] == 0


def test_a_call_that_its_client_leaves_is_no_longer_running(world, counted):
    replica, metrics = counted(FakeScript(hang_after=2))
    stub, options = world.stub(replica)
    call = stub.Generate(generate_message(sync_by_stub(stub, options)), **options)
    next(call)
    call.cancel()
    wait_until(lambda: metrics()["running_calls"] == 0)
    assert metrics()["unfinished_responses"] == 0


def test_updates_are_timed_and_calls_wait_for_them(world, counted):
    replica, metrics = counted(FakeScript(commit_delay_s=0.3))
    stub, options = world.stub(replica)
    messages = update_messages()

    def late():
        yield messages[0]
        time.sleep(0.2)
        yield from messages[1:]

    update = stub.UpdateWeights.future(late(), **options)
    wait_until(lambda: not replica._server._service._gate.is_set())
    other = WeightVersion("run", "attempt", 5, "0" * 64)
    call = stub.Generate(generate_message(other), **options)
    wait_until(lambda: metrics()["waiting_calls"] == 1)
    update.result()
    with pytest.raises(grpc.RpcError):
        list(call)
    found = metrics()
    assert (found["weight_updates_total", "committed"], found["waiting_calls"]) == (1, 0)
    # The sender's 0.2 s count as time of the update, and not as a pause. Sleeps are never shorter.
    assert 0.3 <= found["weight_pause_seconds_total"] < found["weight_update_seconds_total"] - 0.19
    replica.engine.script.fail_commit = True
    with pytest.raises(grpc.RpcError):
        sync_by_stub(stub, options, step=1)
    again = metrics()
    assert again["weight_updates_total", "failed"] == 1
    assert again["weight_update_seconds_total"] == found["weight_update_seconds_total"]
    assert again["weight_pause_seconds_total"] > found["weight_pause_seconds_total"]
    assert again["weight_step"] == 0
    messages.pop()
    with pytest.raises(grpc.RpcError):
        stub.UpdateWeights(iter(messages), **options)
    assert metrics()["weight_updates_total", "failed"] == 2
    # Nothing waited for an update that never came to its commit.
    assert metrics()["weight_pause_seconds_total"] == again["weight_pause_seconds_total"]


@pytest.mark.parametrize("in_a_call", [True, False])
def test_health_follows_the_engine(world, monkeypatch, in_a_call):
    """A supervisor that asks or watches learns of a dead engine, also if no call meets it."""
    monkeypatch.setattr("semrl_jax.rollout.server.server._CHECK_S", 0.05)
    replica = world.replica(FakeScript(die_after=2 if in_a_call else None))
    stub, options = world.stub(replica)
    version = sync_by_stub(stub, options)
    options = {"timeout": 10.0, "metadata": token_metadata(TOKEN)}
    with grpc.insecure_channel(replica.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        watch = health.Watch(request, **options)
        assert next(watch).status == STATUS.SERVING
        if in_a_call:
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(generate_message(version), **options))
        else:

            def check():
                raise EngineDeadError("the test says so")

            replica.engine.check = check
        assert next(watch).status == STATUS.NOT_SERVING
        for service in ("", SERVICE_NAME):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), **options)
            assert reply.status == STATUS.NOT_SERVING
        watch.cancel()
