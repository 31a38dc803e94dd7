"""The service over a real channel, called by the stub: access, limits, updates and aborts."""

import concurrent.futures
import dataclasses
import re
import time

import grpc
import numpy as np
import pytest
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.rollout.wire.codec import SERVICE_NAME
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import (
    HiddenStateParams,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    WeightVersion,
    manifest_digest,
)
from tests.rollout.caller import make_stub
from tests.rollout.conftest import TOKEN, make_arrays, make_requests
from tests.rollout.fake_engine import FAKE_SPECS, FakeScript
from tests.rollout.wire.test_codec import BAD_REQUESTS
from tests.running import wait_until

CODES = grpc.StatusCode


def update_messages(arrays=None, *, specs=FAKE_SPECS, run_id="run", step=0):
    """The messages of a valid update; tests make one of them invalid."""
    arrays = arrays or make_arrays()
    begin = pb.BeginUpdate(
        run_id=run_id, attempt_id="attempt", step=step, tensors=codec.encode_specs(specs)
    )
    messages = [pb.UpdateWeightsRequest(begin=begin)]
    checksums = []
    for index, array in enumerate(arrays):
        data = array.tobytes()
        checksums.append(xxhash.xxh3_128_digest(data))
        for start in range(0, len(data), codec.CHUNK_BYTES):
            chunk = pb.TensorChunk(tensor_index=index, data=data[start : start + codec.CHUNK_BYTES])
            messages.append(pb.UpdateWeightsRequest(chunk=chunk))
    digest = manifest_digest(specs, checksums)
    commit = pb.CommitUpdate(checksums=checksums, digest=digest)
    return [*messages, pb.UpdateWeightsRequest(commit=commit)]


def sync(stub, options, **settings):
    return codec.decode_version(
        stub.UpdateWeights(iter(update_messages(**settings)), **options).version
    )


def synced(world, script=None, **settings):
    """A replica with weights, its stub and the options of a call, and its version."""
    replica = world.replica(script, **settings)
    stub, options = world.stub(replica)
    return replica, stub, options, sync(stub, options)


def generate_message(version, requests=None, sampling=None, states=None):
    requests, sampling = requests or make_requests(), sampling or SamplingParams(16)
    call = codec.GenerateCall(tuple(requests), sampling, states or HiddenStateParams(), version)
    return codec.encode_request(call)


def refusal(call, *args, **options):
    """The status of a call that must fail; the call may be streaming or not."""
    with pytest.raises(grpc.RpcError) as caught:
        reply = call(*args, **options)
        if hasattr(reply, "__iter__"):
            list(reply)
    return caught.value.code(), caught.value.details()


def test_responses_worked_by_hand(world):
    stub, options = world.stub(world.replica())
    version = sync(stub, options)
    request = SampleRequest("s", 4, 0, np.array([50, 49], np.int32), 2)
    message = generate_message(
        version, [request], SamplingParams(max_tokens=8), HiddenStateParams((-1, 1), "bfloat16")
    )
    (reply,) = stub.Generate(message, **options)
    response = reply.response
    assert (response.sample_id, response.group_id, response.sample_index) == ("s", 4, 0)
    assert list(response.token_ids) == [0, 1, 2]  # (50 + 49 + 2 + t) mod 101, 1 + 2 mod 8 tokens
    assert np.frombuffer(response.logprobs, "<f4").tolist() == [-0.125, -0.25, -0.375]
    assert np.frombuffer(response.raw_logprobs, "<f4").tolist() == [-0.25, -0.5, -0.75]
    assert response.finish_reason == "length"
    assert list(response.layers) == [-1, 1]
    assert list(response.hidden_states.shape) == [3, 2, 8]
    states = np.frombuffer(response.hidden_states.data, codec.STATE_DTYPES["bfloat16"])
    states = states.astype(np.float32).reshape(3, 2, 8)
    assert states[0, 0, :4].tolist() == [125, 126, 127, 0]  # (0 - 3 + d) mod 128
    assert states[2, 1].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]  # 2 + 3 + d
    (span,) = response.versions
    assert (span.start, span.end, codec.decode_version(span.version)) == (0, 3, version)


def all_calls(channel):
    """Every method the server has, by name, as (callable, request)."""
    stub = make_stub(channel)
    health = health_pb2_grpc.HealthStub(channel)
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    query = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        "Describe": (stub.Describe, pb.DescribeRequest()),
        "Generate": (stub.Generate, pb.GenerateRequest()),
        "UpdateWeights": (stub.UpdateWeights, iter(update_messages())),
        "Pause": (stub.Pause, pb.PauseRequest()),
        "Resume": (stub.Resume, pb.ResumeRequest()),
        "Abort": (stub.Abort, pb.AbortRequest()),
        "TensorSums": (stub.TensorSums, pb.TensorSumsRequest()),
        "Sleep": (stub.Sleep, pb.SleepRequest(run_id="run")),
        "HandOver": (stub.HandOver, pb.HandOverRequest(run_id="run", attempt_id="attempt")),
        "Health.Check": (health.Check, health_pb2.HealthCheckRequest()),
        "Health.Watch": (health.Watch, health_pb2.HealthCheckRequest()),
        "Reflection": (reflection.ServerReflectionInfo, iter([query])),
        "Unknown": (channel.unary_unary("/no.such/Method"), b""),
    }


CALLS = list(all_calls(grpc.insecure_channel("127.0.0.1:1")))
OURS = CALLS[:9]


def test_every_method_of_the_service_is_listed():
    service = pb.DESCRIPTOR.services_by_name["RolloutService"]
    assert [method.name for method in service.methods] == OURS


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        token_metadata("a-token-for-testS"),
        token_metadata(""),
        (("authorization", TOKEN),),
        (*token_metadata(TOKEN), *token_metadata("another")),
    ],
)
def test_wrong_token_is_refused_everywhere(world, name, metadata):
    replica = world.replica()
    with grpc.insecure_channel(replica.address) as channel:
        call, request = all_calls(channel)[name]
        code, details = refusal(call, request, timeout=5.0, metadata=metadata)
    assert code == CODES.UNAUTHENTICATED
    assert TOKEN not in details
    assert replica.engine.num_staged == 0


@pytest.mark.parametrize("name", OURS)
def test_call_without_deadline_is_refused(world, name):
    with grpc.insecure_channel(world.replica().address) as channel:
        call, request = all_calls(channel)[name]
        code, details = refusal(call, request, metadata=token_metadata(TOKEN))
    assert code == CODES.INVALID_ARGUMENT
    assert "deadline" in details


def test_health_and_reflection(world):
    with grpc.insecure_channel(world.replica().address) as channel:
        options = {"timeout": 5.0, "metadata": token_metadata(TOKEN)}
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), **options)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        call, request = all_calls(channel)["Reflection"]
        (reply,) = call(request, **options)
        assert SERVICE_NAME in {s.name for s in reply.list_services_response.service}


@pytest.mark.parametrize("index", range(len(BAD_REQUESTS)))
def test_bad_request_is_refused_and_the_server_goes_on(world, index):
    change, error, match = BAD_REQUESTS[index]
    replica, stub, options, version = synced(
        world, max_prompts=4, max_prompt_tokens=8, max_response_tokens=32
    )
    requests = make_requests(1, 2)
    requests = [dataclasses.replace(r, sample_id=f"s{i}") for i, r in enumerate(requests)]
    message = generate_message(version, requests, SamplingParams(8), HiddenStateParams((0,)))
    spoilt = pb.GenerateRequest.FromString(message.SerializeToString())
    change(spoilt)
    code, details = refusal(stub.Generate, spoilt, **options)
    codes = {
        codec.LimitExceeded: CODES.RESOURCE_EXHAUSTED,
        codec.NotOffered: CODES.UNIMPLEMENTED,
        ValueError: CODES.INVALID_ARGUMENT,
    }
    assert code == codes[error]
    assert re.search(match, details) and "\n" not in details
    assert replica.engine.num_closed == 0  # nothing reached the engine
    assert len(list(stub.Generate(message, **options))) == 2


def test_message_above_the_limit_is_refused(world, monkeypatch):
    monkeypatch.setattr("semrl_jax.rollout.server.server._OPTIONS", (
        ("grpc.max_receive_message_length", 10_000),
    ))  # fmt: skip
    stub, options = world.stub(world.replica())
    message = generate_message(WeightVersion("r", "a", 0, "d"), make_requests(600))
    assert message.ByteSize() > 10_000
    code, details = refusal(stub.Generate, message, **options)
    assert code == CODES.RESOURCE_EXHAUSTED and "larger than max" in details
    assert stub.Describe(pb.DescribeRequest(), **options).engine == "fake"


def test_only_the_served_version_is_sampled(world):
    stub, options = world.stub(world.replica())
    ghost = WeightVersion("run", "attempt", 0, "0" * 64)
    code, details = refusal(stub.Generate, generate_message(ghost), **options)
    assert code == CODES.FAILED_PRECONDITION
    assert "serves weights None" in details and str(ghost) in details
    version = sync(stub, options)
    for field, value in [("run_id", "x"), ("attempt_id", "x"), ("step", 1), ("digest", "0" * 64)]:
        other = dataclasses.replace(version, **{field: value})
        code, details = refusal(stub.Generate, generate_message(other), **options)
        assert code == CODES.FAILED_PRECONDITION
        assert str(version) in details and str(other) in details
    assert len(list(stub.Generate(generate_message(version), **options))) == 8


def flip(messages, index=1):
    data = bytearray(messages[index].chunk.data)
    data[-1] ^= 1
    messages[index].chunk.data = bytes(data)


BAD_UPDATES = {
    "tampered chunk": (flip, CODES.DATA_LOSS, "'embed.weight' arrived with checksum"),
    "wrong digest": (
        lambda m: setattr(m[-1].commit, "digest", "0" * 64), CODES.DATA_LOSS, "digest",
    ),
    "missing checksum": (
        lambda m: m[-1].commit.checksums.pop(), CODES.INVALID_ARGUMENT, "1 checksums for 2",
    ),
    "short checksum": (
        lambda m: m[-1].commit.checksums.__setitem__(0, m[-1].commit.checksums[0][:15]),
        CODES.INVALID_ARGUMENT,
        "the checksum of 'embed.weight' has 15 bytes, not 16",
    ),
    "missing tensor": (lambda m: m.pop(2), CODES.INVALID_ARGUMENT, "commit came where a chunk"),
    "missing in the manifest": (
        lambda m: m[0].begin.tensors.pop(), CODES.INVALID_ARGUMENT, "missing: norm.weight",
    ),
    "extra in the manifest": (
        lambda m: m[0].begin.tensors.add(name="x", dtype="float32"),
        CODES.INVALID_ARGUMENT,
        "not of this model: x",
    ),
    "repeated in the manifest": (
        lambda m: m[0].begin.tensors.append(m[0].begin.tensors[0]),
        CODES.INVALID_ARGUMENT,
        "repeated: embed.weight",
    ),
    "misshapen": (
        lambda m: m[0].begin.tensors[0].shape.append(1),
        CODES.INVALID_ARGUMENT,
        r"'embed.weight' is [16, 8, 1], not [16, 8]",
    ),
    "dtype": (
        lambda m: setattr(m[0].begin.tensors[0], "dtype", "object"),
        CODES.INVALID_ARGUMENT,
        "dtype 'object'",
    ),
    "wrong order": (
        lambda m: m.insert(1, m.pop(2)), CODES.INVALID_ARGUMENT, "tensor 0 ('embed.weight') is due",
    ),
    "too long": (
        lambda m: m.insert(2, m[1]), CODES.INVALID_ARGUMENT, "tensor 1 ('norm.weight') is due",
    ),
    "overfull": (
        lambda m: setattr(m[1].chunk, "data", m[1].chunk.data + b"x"),
        CODES.INVALID_ARGUMENT,
        "has 512 bytes; 513 came",
    ),
    "empty chunk": (
        lambda m: setattr(m[1].chunk, "data", b""), CODES.INVALID_ARGUMENT, "a chunk of 0 bytes",
    ),
    "large chunk": (
        lambda m: setattr(m[1].chunk, "data", bytes(codec.CHUNK_BYTES + 1)),
        CODES.INVALID_ARGUMENT,
        "chunk of 1048577 bytes",
    ),
    "no begin": (lambda m: m.pop(0), CODES.INVALID_ARGUMENT, "where a begin"),
    "second begin": (
        lambda m: m.insert(1, m[0]), CODES.INVALID_ARGUMENT, "begin came where a chunk",
    ),
    "broken off": (lambda m: m.pop(), CODES.INVALID_ARGUMENT, "ended where a commit"),
    "broken off early": (lambda m: m.__delitem__(slice(1, None)), CODES.INVALID_ARGUMENT, "ended"),
    "nothing": (lambda m: m.clear(), CODES.INVALID_ARGUMENT, "ended where a begin"),
    "no payload": (
        lambda m: m[1].ClearField("chunk"), CODES.INVALID_ARGUMENT, "None came where a chunk",
    ),
    "no run": (
        lambda m: m[0].begin.ClearField("run_id"), CODES.INVALID_ARGUMENT, "begin.run_id",
    ),
    "no attempt": (
        lambda m: m[0].begin.ClearField("attempt_id"), CODES.INVALID_ARGUMENT, "begin.attempt_id",
    ),
    "negative step": (
        lambda m: setattr(m[0].begin, "step", -1), CODES.INVALID_ARGUMENT, "step=-1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_bad_update_leaves_the_old_weights(world, name):
    spoil, code, fragment = BAD_UPDATES[name]
    replica, stub, options, version = synced(world)
    messages = update_messages(make_arrays(9.0), step=1)
    spoil(messages)
    actual, details = refusal(stub.UpdateWeights, iter(messages), **options)
    assert (actual, fragment in details) == (code, True), details
    assert "\n" not in details
    assert not replica.engine.is_staging
    np.testing.assert_array_equal(replica.engine.weights["norm.weight"], make_arrays()[1])
    assert len(list(stub.Generate(generate_message(version), **options))) == 8
    assert sync(stub, options, arrays=make_arrays(9.0), step=1).step == 1


def test_manifest_is_refused_before_buffers_are_made(world):
    replica = world.replica()
    stub, options = world.stub(replica)
    huge = TensorSpec("embed.weight", (2**40, 2**20), "float32")
    begin = pb.BeginUpdate(
        run_id="run", attempt_id="a", tensors=codec.encode_specs([huge, FAKE_SPECS[1]])
    )
    code, details = refusal(
        stub.UpdateWeights, iter([pb.UpdateWeightsRequest(begin=begin)]), **options
    )
    assert code == CODES.INVALID_ARGUMENT and "1099511627776" in details
    assert replica.engine.num_staged == 0


def test_client_gone_in_mid_update(world):
    replica, stub, options, version = synced(world)

    def half():
        yield from update_messages(make_arrays(9.0), step=1)[:2]
        time.sleep(60)

    call = stub.UpdateWeights.future(half(), **options)
    wait_until(lambda: replica.engine.is_staging)
    code, details = refusal(stub.UpdateWeights, iter(update_messages(step=2)), **options)
    assert code == CODES.UNAVAILABLE and "another weight update" in details
    call.cancel()
    wait_until(lambda: not replica.engine.is_staging)
    assert len(list(stub.Generate(generate_message(version), **options))) == 8
    assert sync(stub, options, step=3).step == 3


def test_failed_commit_keeps_the_old_version(world):
    replica, stub, options, version = synced(world)
    replica.engine.script.fail_commit = True
    code, details = refusal(stub.UpdateWeights, iter(update_messages(step=1)), **options)
    assert code == CODES.INTERNAL and details == "RuntimeError: the script says so"
    replica.engine.script.fail_commit = False
    assert len(list(stub.Generate(generate_message(version), **options))) == 8


def test_commit_waits_for_running_calls_and_new_ones_for_the_commit(world):
    replica, stub, options, old = synced(world, FakeScript(delay_s=0.05))
    running = stub.Generate(generate_message(old), **options)
    next(running)
    update = stub.UpdateWeights.future(iter(update_messages(step=1)), **options)
    wait_until(lambda: replica.engine.num_staged == 2)
    time.sleep(0.1)
    assert not update.done()
    late = stub.Generate(generate_message(old), **options)  # waits, then finds other weights
    rest = list(running)
    assert len(rest) == 7
    assert {codec.decode_version(r.response.versions[0].version) for r in rest} == {old}
    assert update.result().version.step == 1
    with pytest.raises(grpc.RpcError) as caught:
        next(late)
    assert caught.value.code() == CODES.FAILED_PRECONDITION


def test_commit_gives_up_with_the_callers_deadline(world):
    _, stub, options, old = synced(world, FakeScript(delay_s=0.1))
    running = stub.Generate(generate_message(old), **options)
    next(running)
    code, _ = refusal(
        stub.UpdateWeights, iter(update_messages(step=1)), **options | {"timeout": 0.2}
    )
    assert code == CODES.DEADLINE_EXCEEDED
    assert len(list(running)) == 7
    assert len(list(stub.Generate(generate_message(old), **options))) == 8


def test_commit_once_begun_is_completed_for_a_caller_that_left(world):
    replica = world.replica(FakeScript(commit_delay_s=0.3))
    stub, options = world.stub(replica)
    code, _ = refusal(stub.UpdateWeights, iter(update_messages()), **options | {"timeout": 0.15})
    assert code == CODES.DEADLINE_EXCEEDED
    wait_until(lambda: stub.Describe(pb.DescribeRequest(), **options).HasField("version"))
    assert sync(stub, options, step=1).step == 1


def test_sleep_waits_for_a_commit_whose_caller_left(world):
    replica = world.replica(FakeScript(commit_delay_s=0.3))
    stub, options = world.stub(replica)
    refusal(stub.UpdateWeights, iter(update_messages()), **options | {"timeout": 0.15})
    stub.Sleep(pb.SleepRequest(run_id="run"), **options)
    assert replica.engine.num_sleeps == 1
    assert not stub.Describe(pb.DescribeRequest(), **options).HasField("version")


def test_another_run_may_send_weights_once_the_owner_has_handed_the_replica_over(world):
    _, stub, options, version = synced(world)
    others = update_messages(run_id="second")
    code, message = refusal(stub.UpdateWeights, iter(others), **options)
    assert code == CODES.PERMISSION_DENIED and "belongs to run 'run'" in message
    for run_id, attempt_id in (("second", version.attempt_id), (version.run_id, "an older one")):
        stub.HandOver(pb.HandOverRequest(run_id=run_id, attempt_id=attempt_id), **options)
        assert not stub.Describe(pb.DescribeRequest(), **options).is_free
    own = pb.HandOverRequest(run_id=version.run_id, attempt_id=version.attempt_id)
    stub.HandOver(own, **options)
    described = stub.Describe(pb.DescribeRequest(), **options)
    assert described.is_free and codec.decode_version(described.version) == version  # still served
    stub.UpdateWeights(iter(others), **options)
    assert not stub.Describe(pb.DescribeRequest(), **options).is_free
    code, _ = refusal(stub.UpdateWeights, iter(update_messages()), **options)
    assert code == CODES.PERMISSION_DENIED


def test_slow_reader_holds_the_engine_back(world):
    replica, stub, options, version = synced(world, hidden_size=65_536)
    requests = [dataclasses.replace(r, seed=63) for r in make_requests(32, 1)]  # 8 MB each
    states = HiddenStateParams((-1,))
    message = generate_message(version, requests, SamplingParams(64), states)
    call = stub.Generate(message, **options)
    next(call)
    time.sleep(0.5)
    assert replica.engine.num_yielded <= 4  # one is being sent, the channel's window holds others
    messages = 1 + sum(1 for _ in call)
    assert messages == 32 * (1 + 8)


def test_pause_waits_refuses_and_resumes(world):
    _, stub, options, version = synced(world, FakeScript(delay_s=0.03))
    running = stub.Generate(generate_message(version), **options)
    next(running)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        paused = pool.submit(stub.Pause, pb.PauseRequest(), **options)
        assert len(list(running)) == 7
        assert codec.decode_version(paused.result().version) == version
    code, details = refusal(stub.Generate, generate_message(version), **options)
    assert code == CODES.UNAVAILABLE and "paused" in details
    stub.Pause(pb.PauseRequest(), **options)  # a second Pause has no effect
    assert sync(stub, options, step=1).step == 1
    stub.Resume(pb.ResumeRequest(), **options)
    code, details = refusal(stub.Generate, generate_message(version), **options)
    assert code == CODES.FAILED_PRECONDITION


def test_a_second_pause_waits_too(world):
    _, stub, options, version = synced(world, FakeScript(delay_s=0.1))
    running = stub.Generate(generate_message(version), **options)
    next(running)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        short = options | {"timeout": 0.3}
        first = pool.submit(refusal, stub.Pause, pb.PauseRequest(), **short)
        second = pool.submit(stub.Pause, pb.PauseRequest(), **options)
        assert first.result()[0] == CODES.DEADLINE_EXCEEDED
        assert not second.done()  # calls run
        assert len(list(running)) == 7
        second.result()
    code, details = refusal(stub.Generate, generate_message(version), **options)
    assert code == CODES.UNAVAILABLE and "paused" in details  # though the first was undone


def test_pause_that_times_out_is_undone(world):
    _, stub, options, version = synced(world, FakeScript(delay_s=0.05))
    running = stub.Generate(generate_message(version), **options)
    next(running)
    code, _ = refusal(stub.Pause, pb.PauseRequest(), **options | {"timeout": 0.1})
    assert code == CODES.DEADLINE_EXCEEDED
    assert len(list(running)) == 7
    assert len(list(stub.Generate(generate_message(version), **options))) == 8
