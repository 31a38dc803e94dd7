"""Hostile peers of a replica or client: large messages, invalid headers, calls that stall."""

import contextlib
import logging
import re
import socket
import struct
import threading
import time
import weakref
from concurrent import futures

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.rollout.server import request_checks
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import HiddenStateParams, SamplingParams, TensorSpec
from tests.cases import raised, refused
from tests.rollout.conftest import FAKE, TOKEN, make_arrays, make_requests
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine
from tests.rollout.server.test_service import (
    CALLS,
    CODES,
    generate_message,
    refusal,
    sync,
    synced,
    update_messages,
)
from tests.rollout.wire.test_codec import VERSION, make_call
from tests.running import wait_until

OPTIONS = {"timeout": 10.0, "metadata": token_metadata(TOKEN)}
SERVICE = "/semrl.rollout.v1.RolloutService"
PATHS = {
    "Health.Check": "/grpc.health.v1.Health/Check",
    "Health.Watch": "/grpc.health.v1.Health/Watch",
    "Reflection": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}
READERS = bounds.request_readers(FakeEngine().describe(), FAKE_SPECS)


def raw(channel, name):
    """A method as a function of a request's bytes; unary and streaming are the same on the wire."""
    call = channel.stream_stream(PATHS.get(name, f"{SERVICE}/{name}"))
    return lambda data, **options: list(call(iter([data]), **options))


def field(number, data):
    """A length-delimited field on the wire."""
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def assert_quiet(caplog):
    """Checks the log is empty, except for the event loop of a replica that a test has closed."""
    noise = [r for r in caplog.records if r.levelno >= logging.WARNING and r.name != "asyncio"]
    assert not noise


MANY = 1 << 20
VERSIONED = pb.GenerateRequest(version=codec.encode_version(VERSION)).SerializeToString()
ASKED = VERSIONED + field(2, codec.encode_request(make_call()).sampling.SerializeToString())
LARGE, WRONG = CODES.RESOURCE_EXHAUSTED, CODES.INVALID_ARGUMENT
BOMBS = {
    "specs": ("UpdateWeights", field(1, b"\x22\x00" * MANY), LARGE, "at most"),
    "few specs": ("UpdateWeights", field(1, b"\x22\x00" * 1000), WRONG, "run_id"),
    "checksums": ("UpdateWeights", field(3, b"\x0a\x00" * MANY), LARGE, "at most"),
    "commits": ("UpdateWeights", b"\x1a\x00" * 1000, WRONG, "commit came where a begin"),
    "layers": ("Generate", VERSIONED + field(3, field(1, bytes(MANY))), LARGE, "layers has"),
    "kinds": (
        "Generate", ASKED + field(3, b"\x08\x01" + field(2, b"float32") + b"\x1a\x00" * MANY),
        LARGE, "kinds has",
    ),
    "end tokens": ("Generate", VERSIONED + field(2, field(5, bytes(MANY))), LARGE, "eos_token_ids"),
    "metrics": ("Generate", VERSIONED + field(6, b"\x0a\x00" * MANY), LARGE, "names has"),
    "samples": ("Generate", ASKED + b"\x2a\x00" * MANY, LARGE, "1048576 samples"),
    "prompts": ("Generate", ASKED + b"\x2a\x00" + b"\x22\x00" * MANY, WRONG, "prompts for 1 sam"),
    "tokens": ("Generate", ASKED + b"\x2a\x00" + field(4, field(1, bytes(MANY))), LARGE, "tokens"),
    "unknown": ("Generate", b"\x7a\x00" * 1000, WRONG, "version"),
    "all": ("Generate", bytes(codec.MAX_REQUEST_BYTES + 1), LARGE, "larger than max"),
    "describe": ("Describe", bytes([0x0A, 0]) * MANY, LARGE, "at most 4096"),
    "pause": ("Pause", bytes([0x0A, 0]) * MANY, LARGE, "at most 4096"),
    "health": ("Health.Check", field(1, bytes(MANY)), LARGE, "at most 4096"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_message_of_too_many_parts_is_refused_in_one_line(world, name):
    method, data, expected, match = BOMBS[name]
    replica = world.replica()
    began = time.monotonic()
    sends = (("grpc.max_send_message_length", 2 * codec.MAX_REQUEST_BYTES),)
    with grpc.insecure_channel(replica.address, sends) as channel:
        code, details = refusal(raw(channel, method), data, **OPTIONS)
    assert code == expected
    assert match in details and "\n" not in details and len(details) < 200
    assert time.monotonic() - began < 5.0
    assert replica.engine.num_staged == 0


def test_a_refused_message_is_freed_at_once():
    """A request of 64 MiB takes 2 GiB, so no two of them may be in memory."""
    held = []

    def parse(data):
        message = threading.Event()
        held.append(weakref.ref(message))
        raise ValueError("wrong")

    raised(ValueError, "wrong", bounds.Reader(parse).read, b"")
    assert held[0]() is None


@pytest.mark.parametrize("name", CALLS[:-1])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05a", b"\x0b"])
def test_bytes_that_are_no_message_are_refused_in_one_line(world, name, data, caplog):
    with grpc.insecure_channel(world.replica().address) as channel:
        code, details = refusal(raw(channel, name), data, **OPTIONS)
    assert code == CODES.INVALID_ARGUMENT
    assert details.startswith("the bytes are no ")
    assert_quiet(caplog)


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_never_pass(data):
    with pytest.raises(ValueError):
        READERS["Generate"].read(data)
    for name in ("UpdateWeights", "Describe"):  # these ignore unknown fields
        with contextlib.suppress(ValueError):
            READERS[name].read(data)


@pytest.mark.parametrize(
    "data",
    [
        field(1, field(8, b"") * 5000),  # versions
        field(1, field(11, b"") * 5000),  # metrics
        field(1, field(9, bytes(100_000))),  # layers
        field(2, field(2, bytes(2 << 20))),  # one chunk
        b"\xff",
    ],
)
def test_reply_of_too_many_parts_is_refused(data):
    decoder = codec.RolloutDecoder(make_call(), vocab_size=16)
    with pytest.raises(ValueError, match=r"was not asked for|out of turn|no GenerateResponse"):
        decoder.feed(bounds.parse_generate_reply(data))


@given(data=st.binary(max_size=64))
def test_a_chunk_of_another_form_is_read_by_protobuf(data):
    """Both readers agree on what the bytes are."""
    for start in (b"", b"\x12", field(2, b"\x08\x01" + field(2, data))):
        with contextlib.suppress(ValueError):
            reply = bounds.parse_generate_reply(start + data)
            expected = pb.GenerateResponse.FromString(start + data).state_chunk
            if isinstance(reply, codec.Chunk):
                assert bytes(reply.data) == expected.data
                assert reply.sample_id == expected.sample_id


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (b"\xff", "unreadable reply to Describe: the bytes are no DescribeResponse message"),
        (field(10, b"decode") * 5000, "state_kinds has 5000 entries"),
    ],
)
def test_replica_that_describes_itself_wrongly(world, reply, match):
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: reply)
    handlers = grpc.method_handlers_generic_handler(SERVICE[1:], {"Describe": handler})
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    world.stack.callback(server.stop, 0)
    client = world.client(f"127.0.0.1:{port}", connect=False)
    refused(match, client.connect, **FAKE)


def frame(kind, flags, stream, payload):
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def test_header_that_is_no_text_is_not_printed(world, caplog):
    headers = {
        b":method": b"POST", b":scheme": b"http", b":path": f"{SERVICE}/Describe".encode(),
        b":authority": b"x", b"te": b"trailers", b"content-type": b"application/grpc",
        b"authorization": b"Bearer secret\xff",
    }  # fmt: skip
    block = b"".join(
        b"\x10" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in headers.items()
    )
    host, port = world.replica().address.split(":")
    request = frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
    with socket.create_connection((host, int(port)), 5.0) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + request)
        received = b""
        while b"grpc-message" not in received:
            received += connection.recv(4096)
    assert b"grpc-status\x02" + str(CODES.UNAUTHENTICATED.value[0]).encode() in received
    assert "secret" not in caplog.text and "Traceback" not in caplog.text


def test_client_that_does_not_read_loses_its_call(world, caplog, monkeypatch):
    monkeypatch.setattr(request_checks, "_ABORT_S", 0.05)
    replica, stub, options, version = synced(world, hidden_size=65_536, stall_timeout_s=0.3)
    requests = make_requests(8, 1, first_seed=15)
    message = generate_message(version, requests, SamplingParams(64), HiddenStateParams((-1,)))
    call = stub.Generate(message, **options)
    wait_until(lambda: replica.engine.num_closed == 1)
    assert sync(stub, options, step=1).step == 1  # other calls do not wait for it
    time.sleep(0.1)  # only what has already arrived can be read now
    code, details = refusal(lambda: call)
    assert code == CODES.ABORTED and "the client took no message for 0.3 s" in details
    assert_quiet(caplog)


def test_client_that_does_not_send_loses_its_update(world):
    replica = world.replica(stall_timeout_s=0.2)
    stub, options = world.stub(replica)
    ended = threading.Event()

    def half():
        yield from update_messages()[:1]
        ended.wait()

    world.stack.callback(ended.set)
    error = stub.UpdateWeights.future(half(), **options).exception()
    assert error.code() == CODES.ABORTED
    assert "the client sent no chunk for 0.4 s" in error.details()
    assert not replica.engine.is_staging
    assert sync(stub, options).step == 0


def test_deadline_that_is_too_far_away_is_refused(world, sampling):
    replica = world.replica()
    stub, options = world.stub(replica)
    code, details = refusal(stub.Describe, pb.DescribeRequest(), **options | {"timeout": 1e6})
    assert code == CODES.INVALID_ARGUMENT
    assert re.fullmatch(r"the call's deadline is 100\d+ s away, of at most 86400 s\.", details)
    client = world.client(replica, sync_timeout_s=1e6, generate_timeout_s=1e6)
    version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
    assert len(list(client.generate(make_requests(), sampling, version=version))) == 8


def test_refusal_of_any_length_keeps_its_status(world, monkeypatch):
    replica, stub, options, version = synced(world)
    message = generate_message(version, states=HiddenStateParams((0,)))
    message.hidden_states.dtype = "é" * 30_000
    code, details = refusal(stub.Generate, message, **options)
    assert code == CODES.INVALID_ARGUMENT
    assert details.startswith("hidden_states.dtype='éé") and len(details) < 300
    assert details.endswith("must be one of bfloat16, float32.")

    async def fail(aborting):
        raise RuntimeError("line\n" + "é" * 30_000)

    monkeypatch.setattr(replica.engine, "_play", fail)
    code, details = refusal(stub.Generate, generate_message(version), **options)
    assert code == CODES.INTERNAL
    assert details.startswith("RuntimeError: line éé") and details.endswith("é ...")


@pytest.mark.parametrize("dtype", codec.WEIGHT_DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(world, dtype, value):
    replica = world.replica()
    client = world.client(replica)
    version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
    specs = [TensorSpec(spec.name, spec.shape, dtype) for spec in FAKE_SPECS]
    arrays = [np.full(s.shape, 9, codec.WEIGHT_DTYPES[dtype]) for s in specs]
    arrays[1][-1] = value
    with pytest.raises(RuntimeError, match=r"of step 1 .* not finite, in tensor 'norm.weight'.$"):
        client.sync_weights(specs, lambda: arrays, step=1)
    np.testing.assert_array_equal(replica.engine.weights["norm.weight"], make_arrays()[1])
    assert world.caller(replica).describe().version == version


@pytest.mark.parametrize("dtype", codec.WEIGHT_DTYPES)
def test_every_bit_pattern_is_told_finite_or_not(dtype):
    numpy_dtype = codec.WEIGHT_DTYPES[dtype]
    bits = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float32":
        bits = bits.astype(np.uint32) << 16 | 1
    finite = np.isfinite(bits.view(numpy_dtype).astype(np.float32))
    assert codec.are_finite(bits[finite].view(np.uint8), dtype)
    for pattern in bits[~finite][:: np.sum(~finite) // 100 | 1]:
        assert not codec.are_finite(pattern[None].view(np.uint8), dtype)


def test_chunk_that_ends_inside_a_value_is_checked_whole(world):
    replica = world.replica()
    stub, options = world.stub(replica)
    arrays = make_arrays()
    arrays[0][0, 0] = np.nan
    messages = update_messages(arrays)
    data = messages[1].chunk.data
    halves = [pb.TensorChunk(tensor_index=0, data=part) for part in (data[:3], data[3:])]
    messages[1:2] = [pb.UpdateWeightsRequest(chunk=half) for half in halves]
    code, details = refusal(stub.UpdateWeights, iter(messages), **options)
    assert code == CODES.OUT_OF_RANGE and "'embed.weight'" in details
    assert not replica.engine.is_staging
