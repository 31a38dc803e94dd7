"""Weights through memory that client and replica share: values, refusals, ways back, and ends."""

import fcntl
import gc
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from semrl_jax.rollout.client import broadcast
from semrl_jax.rollout.server import service
from semrl_jax.rollout.wire import codec, shared_memory
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import SamplingParams
from tests.cases import raised
from tests.rollout.conftest import FAKE, TOKEN, make_arrays, make_requests
from tests.rollout.fake_engine import FAKE_SPECS
from tests.rollout.server.test_service import (
    CODES,
    generate_message,
    refusal,
    sync,
    update_messages,
)
from tests.running import wait_until

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def own():
    made = shared_memory.OwnMemory()
    yield made
    made.close()


@pytest.fixture
def chunks(monkeypatch):
    """The number of data bytes of every chunk that is sent."""
    sent = []
    original = codec.encode_chunk

    def encode(chunk, data):
        sent.append(len(data))
        return original(chunk, data)

    monkeypatch.setattr(codec, "encode_chunk", encode)
    return sent


def mapped_before():
    """`mapped` after garbage collection, so that failed calls of earlier tests hold no file."""
    gc.collect()
    return mapped()


def mapped():
    """How many of these files this process has mapped."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:semrl-weights")


def memory_messages(own, arrays, *, step=1):
    """A valid update through `own`; tests make a part of it invalid."""
    begin, *_, commit = update_messages(arrays, step=step)
    begin.begin.memory.CopyFrom(own.message())
    starts, num_bytes = shared_memory.layout(FAKE_SPECS)
    target = own.reserve(num_bytes)
    for start, array in zip(starts, arrays):
        target[start : start + array.nbytes] = codec.as_bytes(array)
    chunk = pb.UpdateWeightsRequest(chunk=pb.TensorChunk(tensor_index=len(FAKE_SPECS) - 1))
    return [begin, chunk, commit]


def test_both_ways_give_the_same_version_and_bits(world, chunks):
    bits = np.random.default_rng(0).integers(0, 2**31 - 2**23, (16, 8), np.uint32)  # all finite
    arrays = [bits.view(np.float32), make_arrays()[1]]
    versions, weights = [], []
    for share_memory in (True, False):
        replica = world.replica()
        client = world.client(replica, share_memory=share_memory)
        versions.append(client.sync_weights(FAKE_SPECS, lambda: arrays, step=3))
        weights.append({name: w.tobytes() for name, w in replica.engine.weights.items()})
        assert sum(chunks) == (0 if share_memory else sum(array.nbytes for array in arrays))
    assert versions[0] == versions[1]
    assert weights[0] == weights[1] == {s.name: a.tobytes() for s, a in zip(FAKE_SPECS, arrays)}


def test_memory_is_kept_for_the_next_sync_and_freed_at_the_end(world):
    before = mapped_before()
    client = world.client(world.replica(), world.replica())
    for step in range(3):
        client.sync_weights(FAKE_SPECS, make_arrays, step=step)
        wait_until(lambda: mapped() == before + 1)  # the client's own
    client.close()
    assert mapped() == before


def test_memory_that_a_failed_replica_may_still_read_is_not_written_again(world, monkeypatch):
    files = []

    def keep(message, num_bytes=1):
        files.append(shared_memory.open_memory(message, num_bytes))
        return shared_memory.open_memory(message, num_bytes)

    def first(file):
        return file[:4].view(np.float32)[0]

    good, bad = world.replica(), world.replica()
    client = world.client(good, bad)
    monkeypatch.setattr(service, "open_memory", keep)
    values = [make_arrays(value)[0].flat[0] for value in (5.0, 6.0, 7.0)]
    bad.engine.script.fail_commit = True
    client.sync_weights(FAKE_SPECS, lambda: make_arrays(5.0), step=0)
    bad.engine.script.fail_commit = False
    client.sync_weights(FAKE_SPECS, lambda: make_arrays(6.0), step=1)
    assert [first(files[0]), first(files[-1])] == values[:2]
    client.sync_weights(FAKE_SPECS, lambda: make_arrays(7.0), step=2)
    # After step 1 both had answered, so its file is used again.
    assert [first(files[0]), first(files[-3]), first(files[-1])] == [values[0], *2 * values[2:]]


def test_what_is_written_is_read(own):
    own.reserve(10)[:] = np.arange(10)
    found = shared_memory.open_memory(own.message(), 10)
    assert found.tolist() == list(range(10)) and not found.flags.writeable
    own.reserve(5000)[4999] = 7  # it grows and keeps what it had
    found = shared_memory.open_memory(own.message(), 5000)[9:]
    assert (found[0], found[-1], found[1:-1].any()) == (9, 7, False)
    with pytest.raises(PermissionError):
        os.ftruncate(own.message().file, 10)


BAD_ADDRESSES = {
    "another name": (lambda m: setattr(m, "name", "0" * 32), "another name"),
    "no name": (lambda m: setattr(m, "name", "../../etc/passwd"), "invalid"),
    "process": (lambda m: setattr(m, "process", 0), "invalid"),
    "file": (lambda m: setattr(m, "file", -1), "invalid"),
    "other file": (lambda m: setattr(m, "file", 0), "another name"),
    "no such file": (lambda m: setattr(m, "file", 2**20), "No such file"),
    "no such process": (lambda m: setattr(m, "process", 2**30), "No such file"),
}


@pytest.mark.parametrize("name", BAD_ADDRESSES)
def test_other_files_are_not_opened(own, name, monkeypatch):
    change, match = BAD_ADDRESSES[name]
    message = own.message()
    change(message)
    monkeypatch.setattr(shared_memory.os, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises((OSError, ValueError), match=match):
        shared_memory.open_memory(message)


def test_memory_that_could_shrink_is_refused(own):
    file = os.memfd_create(f"semrl-weights-{own.message().name}", os.MFD_ALLOW_SEALING)
    try:
        message = pb.SharedMemory(process=os.getpid(), file=file, name=own.message().name)
        raised(ValueError, "could shrink", shared_memory.open_memory, message)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        raised(ValueError, "0 of 1 bytes", shared_memory.open_memory, message)
    finally:
        os.close(file)


BAD_UPDATES = {
    "not finite": (
        lambda m, own: own.reserve(4).view(np.float32).__setitem__(0, np.nan),
        CODES.OUT_OF_RANGE,
        "not finite, in tensor",
    ),
    "checksum of another tensor": (
        lambda m, own: m[-1].commit.checksums.__setitem__(0, bytes(16)),
        CODES.DATA_LOSS,
        "the manifest's digest is",
    ),
    "too small": (
        lambda m, own: m[0].begin.memory.CopyFrom(SMALL.message()),
        CODES.INVALID_ARGUMENT,
        "the memory has 1 of 576 bytes",
    ),
    "ended client": (
        lambda m, own: setattr(m[0].begin.memory, "process", 2**30),
        CODES.UNAVAILABLE,
        "memory cannot be read",
    ),
    "data": (
        lambda m, own: setattr(m[1].chunk, "data", b"x"),
        CODES.INVALID_ARGUMENT,
        "a chunk of 1 bytes for tensor 1; tensor 0",
    ),
    "no such tensor": (
        lambda m, own: setattr(m[1].chunk, "tensor_index", 2), CODES.INVALID_ARGUMENT, "tensor 2",
    ),

    "twice": (
        lambda m, own: m.insert(2, m[1]), CODES.INVALID_ARGUMENT, "chunk came where a commit",
    ),
    "incomplete": (
        lambda m, own: setattr(m[1].chunk, "tensor_index", 0),
        CODES.INVALID_ARGUMENT,
        "commit came where a chunk tensor 'norm.weight'",
    ),
}  # fmt: skip
SMALL = shared_memory.OwnMemory()


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_bad_update_leaves_the_old_weights(world, own, name):
    spoil, code, fragment = BAD_UPDATES[name]
    replica = world.replica()
    stub, options = world.stub(replica)
    version, before = sync(stub, options), mapped()
    messages = memory_messages(own, make_arrays(9.0))
    spoil(messages, own)
    actual, details = refusal(stub.UpdateWeights, iter(messages), **options)
    assert (actual, fragment in details) == (code, True), details
    assert not replica.engine.is_staging
    assert len(list(stub.Generate(generate_message(version), **options))) == 8
    wait_until(lambda: mapped() == before + 1)
    messages = memory_messages(own, make_arrays(9.0))
    assert stub.UpdateWeights(iter(messages), **options).version.step == 1
    np.testing.assert_array_equal(replica.engine.weights["norm.weight"], make_arrays(9.0)[1])


@pytest.mark.parametrize("is_lost", [False, True])
def test_replica_that_cannot_read_the_memory_receives_a_stream(world, chunks, monkeypatch, is_lost):
    """Never, or no more after it has connected."""

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    replica = world.replica()
    with monkeypatch.context() as context:
        if not is_lost:
            context.setattr(service, "open_memory", refused)
        client = world.client(replica)
        if is_lost:
            context.setattr(service, "open_memory", refused)
        assert client.sync_weights(FAKE_SPECS, make_arrays, step=0).step == 0
    assert sum(chunks) == 512 + 32
    if is_lost:
        assert "memory cannot be read: Permission denied" in client.lines[0]
    else:
        assert client.lines == []  # no attempt failed


@pytest.mark.parametrize("is_there", [True, False])
def test_client_without_such_memory_streams(world, chunks, monkeypatch, is_there):
    if is_there:
        monkeypatch.setattr(broadcast, "available_bytes", lambda: 1000)  # of 2 x 576
    else:
        monkeypatch.delattr(shared_memory.os, "memfd_create")
    client = world.client(world.replica())
    assert client.sync_weights(FAKE_SPECS, make_arrays, step=0).step == 0
    assert sum(chunks) == 512 + 32


def test_client_killed_half_way_leaves_nothing(world):
    code = (
        "import time\n"
        "from semrl_jax.rollout.client import RolloutClient, broadcast\n"
        "from tests.rollout.conftest import FAKE, FAKE_SPECS, make_arrays\n"
        "broadcast._BATCH_BYTES = 1\n"
        "def half():\n"
        "    yield make_arrays(9.0)[0]\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
        f"with RolloutClient([{{address!r}}], {TOKEN!r}, run_id='run', attempt_id='a') as client:\n"
        "    client.connect(**FAKE)\n"
        "    client.sync_weights(FAKE_SPECS, half, step=1)\n"
    )
    replica = world.replica()
    client = world.client(replica)
    version, before = client.sync_weights(FAKE_SPECS, make_arrays, step=0), mapped_before()
    process = subprocess.Popen(
        [sys.executable, "-c", code.format(address=replica.address)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "half\n"
        wait_until(lambda: replica.engine.is_staging and mapped() == before + 1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_until(lambda: not replica.engine.is_staging and mapped() == before)
    assert not list(pathlib.Path("/dev/shm").glob("*semrl*"))
    rollouts = list(client.generate(make_requests(), SamplingParams(8), version=version))
    assert len(rollouts) == 8
    np.testing.assert_array_equal(replica.engine.weights["norm.weight"], make_arrays()[1])


def test_description_says_nothing_to_a_client_that_offers_none(world):
    stub, options = world.stub(world.replica())
    assert not stub.Describe(pb.DescribeRequest(), **options).reads_memory
    client = world.client(world.replica(), connect=False)
    (description,) = client.connect(**FAKE)
    assert description.reads_memory
