"""Garbage, truncated, oversized and out-of-order messages on every method of a real server.

A seed makes real messages and changes them. Each gets a status that is not an unexpected exception,
none hangs or ends the server, and its memory stays bounded. `-m soak` sends 10,000 per method.
"""

import pathlib
import socket
import time

import grpc
import jax
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from semrl_jax import models
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.rollout.wire.codec import SERVICE_NAME
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import HiddenStateParams, SamplingParams
from tests.rollout.conftest import TOKEN, assert_complete, make_arrays, make_requests
from tests.rollout.engines.responses import make_requests as jax_requests
from tests.rollout.engines.test_jax import CONFIG
from tests.rollout.fake_engine import FAKE_SPECS
from tests.rollout.server.test_service import generate_message, update_messages

TIMEOUT_S = 20.0  # a call that is not answered by then counts as hung
OVERSIZED = codec.MAX_REQUEST_BYTES + 1
# Growth of the process that is allowed. Measured: 2 MiB for the few calls, 14 MiB for the many, of
# gRPC's and the allocator's own. The messages of the many have 500 MiB together.
MAX_GROWTH = 48 << 20
CODES = grpc.StatusCode
EXPECTED = {
    CODES.INVALID_ARGUMENT, CODES.RESOURCE_EXHAUSTED, CODES.FAILED_PRECONDITION,
    CODES.PERMISSION_DENIED, CODES.DATA_LOSS, CODES.OUT_OF_RANGE, CODES.NOT_FOUND,
    CODES.UNIMPLEMENTED,  # asks for what the replica does not offer, see `codec.NotOffered`
}  # fmt: skip


def methods(version):
    """The valid messages of a call of each method, by its path."""
    ours = f"/{SERVICE_NAME}/"
    memory = pb.SharedMemory(process=1, file=3, name="0" * 32)
    generate = generate_message(version, sampling=SamplingParams(8), states=HiddenStateParams((0,)))
    service = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    query = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
    messages = {
        ours + "Describe": [pb.DescribeRequest(memory=memory)],
        ours + "Generate": [generate],
        ours + "UpdateWeights": update_messages(step=1),
        ours + "Abort": [pb.AbortRequest()],
        ours + "Resume": [pb.ResumeRequest()],
        ours + "Pause": [pb.PauseRequest()],
        "/grpc.health.v1.Health/Check": [service],
        "/grpc.health.v1.Health/Watch": [service],
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [query] * 2,
    }
    return {path: [m.SerializeToString() for m in each] for path, each in messages.items()}


class Hostile:
    """Spoils messages; what it does follows from the seed."""

    def __init__(self, seed, pool):
        self._random = np.random.default_rng(seed)
        self._pool = pool
        self._ways = (
            self._noise, self._truncate, self._flip, self._cut_out, self._insert, self._repeat,
            self._join, self._other, self._long_length, self._many_fields, self._nest,
        )  # fmt: skip

    def call(self, messages):
        """The messages of one call: spoiled, out of order, too few, too many."""
        messages, random = list(messages), self._random
        if len(messages) > 1:
            way = random.integers(6)
            if way == 0:
                random.shuffle(messages)
            elif way == 1:
                del messages[random.integers(len(messages)) :]
            elif way == 2:
                messages.insert(self._place(messages), messages[self._place(messages)])
            elif way == 3:
                del messages[self._place(messages)]
            elif way == 4:
                messages.insert(self._place(messages), self._other(b""))
            if way < 5:
                return messages
        place = self._place(messages)
        messages[place] = self._ways[random.integers(len(self._ways))](messages[place])
        return messages

    def _place(self, data):
        return int(self._random.integers(max(len(data), 1)))

    def _bytes(self, most):
        return self._random.bytes(self._random.integers(most))

    def _noise(self, data):
        return self._bytes(300)

    def _truncate(self, data):
        return data[: self._place(data)]

    def _flip(self, data):
        changed = bytearray(data)
        for _ in range(self._random.integers(1, 9) if data else 0):
            changed[self._place(data)] ^= 1 << self._random.integers(8)
        return bytes(changed)

    def _cut_out(self, data):
        place = self._place(data)
        return data[:place] + data[place + self._random.integers(1, 9) :]

    def _insert(self, data):
        place = self._place(data)
        return data[:place] + self._bytes(9) + data[place:]

    def _repeat(self, data):
        return data * int(self._random.integers(2, 40))

    def _join(self, data):
        return data + self._other(data)

    def _other(self, data):
        return self._pool[self._place(self._pool)]

    def _long_length(self, data):
        field = bytes([self._random.integers(1, 16) << 3 | 2])
        return data + field + b"\xff" * int(self._random.integers(1, 12)) + b"\x7f"

    def _many_fields(self, data):
        field = bytes([self._random.integers(1, 16) << 3 | self._random.choice([0, 2]), 0])
        return data + field * int(self._random.choice([10, 3000, 100_000]))

    def _nest(self, data):
        for _ in range(self._random.integers(1, 200)):
            if len(data) > 10_000:
                break
            length = bytes([len(data) & 127 | 128, len(data) >> 7])
            data = bytes([self._random.integers(1, 8) << 3 | 2]) + length + data
        return data


def send(channel, path, messages):
    """The status of a call; the stream of a watch is ended after its first reply."""
    method = path.rpartition("/")[2]
    options = {"timeout": TIMEOUT_S, "metadata": token_metadata(TOKEN)}
    try:
        if method == "UpdateWeights":
            channel.stream_unary(path)(iter(messages), **options)
        elif method == "ServerReflectionInfo":
            list(channel.stream_stream(path)(iter(messages), **options))
        elif method in ("Generate", "Watch"):
            call = channel.unary_stream(path)(messages[0], **options)
            if method == "Generate":
                list(call)
            else:
                next(call)
                call.cancel()
        else:
            channel.unary_unary(path)(messages[0], **options)
    except grpc.RpcError as error:
        assert "\n" not in error.details()
        return error.code(), error.details()
    return CODES.OK, ""


def resident(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def throw_bytes(address, seed, num_connections):
    """What is not gRPC at all: noise, HTTP/1.1, frames after a correct preface, silence."""
    random = np.random.default_rng(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    host, _, port = address.rpartition(":")
    for index in range(num_connections):
        data = random.bytes(random.integers(1, 400))
        start = (b"", b"GET / HTTP/1.1\r\n\r\n", preface, preface[:10], b"\x16\x03\x01\x02\x00")
        with socket.create_connection((host, int(port)), 5.0) as connection:
            connection.sendall(start[index % len(start)] + data)


def attack(world, start_process, num_calls, num_connections):
    """Returns how often each status came, and the growth of the server's memory."""
    process, address = start_process()
    client = world.client(address)
    version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
    valid = methods(version)
    hostile = Hostile(0, [message for each in valid.values() for message in each])
    codes: dict = {}
    options = (("grpc.max_send_message_length", 2 * OVERSIZED),)
    before, slowest = resident(process), 0.0
    with grpc.insecure_channel(address, options) as channel:
        for path, messages in valid.items():
            assert send(channel, path, messages) == (CODES.OK, "")  # unchanged, they are right
            assert send(channel, path, [bytes(OVERSIZED)])[0] == CODES.RESOURCE_EXHAUSTED
            if path.endswith("UpdateWeights"):  # as before, so that calls of Generate are valid
                client.sync_weights(FAKE_SPECS, make_arrays, step=0)
            for _ in range(num_calls):
                began = time.monotonic()
                code, details = send(channel, path, spoiled := hostile.call(messages))
                slowest = max(slowest, time.monotonic() - began)
                known = code == CODES.OK or code in EXPECTED
                assert known, (path, code, details, [m[:200] for m in spoiled])
                codes.setdefault(path.rpartition("/")[2], set()).add(code)
        send(channel, f"/{SERVICE_NAME}/Resume", [b""])
    throw_bytes(address, 1, num_connections)
    assert process.poll() is None
    growth = resident(process) - before
    assert growth < MAX_GROWTH
    version = client.sync_weights(FAKE_SPECS, make_arrays, step=2)
    requests, sampling = make_requests(), SamplingParams(16)
    rollouts = list(client.generate(requests, sampling, version=version))
    assert_complete(rollouts, requests, sampling, version=version)
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")  # no traceback was printed
    print(f"{num_calls} calls per method: {growth / 2**20:+.1f} MiB, slowest {slowest:.2f} s")
    return codes


@pytest.mark.slow
def test_a_server_survives_hostile_messages(world, start_process):
    codes = attack(world, start_process, num_calls=40, num_connections=20)
    # The generator is no use if it makes only valid messages, or only nonsense.
    for name in ("Describe", "Generate", "Check"):
        assert {CODES.OK, CODES.INVALID_ARGUMENT} <= codes[name], (name, codes)
    assert {CODES.OK, CODES.INVALID_ARGUMENT, CODES.DATA_LOSS} & codes["UpdateWeights"]


@pytest.mark.soak
def test_a_server_survives_ten_thousand_per_method(world, start_process):
    codes = attack(world, start_process, num_calls=10_000, num_connections=1_000)
    assert {CODES.OK, CODES.DATA_LOSS, CODES.INVALID_ARGUMENT} <= codes["UpdateWeights"]
    assert CODES.FAILED_PRECONDITION in codes["Generate"]


@pytest.mark.soak
def test_the_jax_engine_survives_hostile_calls(world, start_process):
    """Changed requests that are still valid reach the engine, with options of their own."""
    params = models.Policy(CONFIG).init(jax.random.key(0))
    arrays = [array for _, array in models.iterate_hf_tensors(params, CONFIG, "float32")]
    # In a process of its own: in this one, the checks of types would parse prompts too early.
    process, address = start_process(engine="jax")
    client = world.client(address, connect=False, stall_timeout_s=60.0)
    client.connect(model_hash=CONFIG.hash, tokenizer_hash="", vocab_size=CONFIG.vocab_size)
    specs = models.tensor_specs(CONFIG, "float32")
    version = client.sync_weights(specs, lambda: arrays, step=0)
    sampling = SamplingParams(8, temperature=0.8, top_k=5, top_p=0.9, eos_token_ids=(1,))
    requests, states = jax_requests()[:4], HiddenStateParams((-1,), "float32")
    message = generate_message(version, requests, sampling, states).SerializeToString()
    hostile = Hostile(2, [message])
    num_ok = 0
    with grpc.insecure_channel(address) as channel:
        for _ in range(5_000):
            spoiled = hostile.call([message])
            code, details = send(channel, f"/{SERVICE_NAME}/Generate", spoiled)
            assert code == CODES.OK or code in EXPECTED, (code, details, spoiled)
            num_ok += code == CODES.OK
    assert 100 < num_ok < 4_000
    rollouts = list(client.generate(requests, sampling, states, version=version))
    assert sorted(r.sample_id for r in rollouts) == sorted(r.sample_id for r in requests)
    assert process.poll() is None
