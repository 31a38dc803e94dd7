"""The client with replicas that die, hang, restart, send wrong replies or belong to another run."""

import concurrent.futures
import dataclasses
import itertools
import logging
import queue
import signal
import socket
import threading
import time

import grpc
import ml_dtypes
import numpy as np
import pytest

from semrl_jax.rollout.client import RolloutClient, remote
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams, SamplingParams, TensorSpec, WeightVersion
from tests.cases import raised, refused
from tests.rollout.conftest import (
    FAKE,
    TOKEN,
    assert_complete,
    assert_sampled,
    make_arrays,
    make_requests,
    modules_of,
)
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine, FakeScript, _aborted
from tests.running import wait_until


def sync(client, value=1.0, step=0):
    return client.sync_weights(FAKE_SPECS, lambda: make_arrays(value), step=step)


def test_client_loads_neither_jax_nor_torch():
    code = (
        "from semrl_jax.rollout.client import RolloutClient, local; import semrl_jax.rollout.server"
    )
    assert not modules_of(code) & {"jax", "jaxlib", "torch", "flax"}


def test_connect_returns_descriptions(world):
    replicas = [world.replica(), world.replica()]
    client = world.client(*replicas, connect=False)
    first, second = client.connect(**FAKE)
    assert first.engine == second.engine == "fake"
    assert (first.protocol_major, first.protocol_minor) == (3, 2)
    assert first.replica_id != second.replica_id
    assert first.version is None
    assert client.lines == []


def test_an_engine_without_checksums_says_why(world):
    client = world.client(world.replica())
    sync(client)
    refused("this engine gives no checksums", client.tensor_sums)


@pytest.mark.parametrize(
    ("sampling", "states", "reason"),
    [
        ({}, HiddenStateParams((-1, 999)), r"hidden_states.layers has 999; the replica has \[-1, "),
        ({}, HiddenStateParams((-1,), kinds=("later",)), "hidden_states.kinds has 'later'"),
        ({"stop_strings": ("user",)}, HiddenStateParams(), "has 'stop_strings'"),
    ],
)
def test_what_a_replica_does_not_offer_is_a_mistake_of_the_user(world, sampling, states, reason):
    client = world.client(world.replica(), world.replica())
    version, requests = sync(client), make_requests()
    with pytest.raises(UserError, match=f"does not offer .*{reason}.*Leave it out") as caught:
        list(client.generate(requests, SamplingParams(16, **sampling), states, version=version))
    assert "\n" not in str(caught.value)
    assert_sampled(client, requests, SamplingParams(16), version=version)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_hash", "another"), ("tokenizer_hash", "another"), ("vocab_size", 102)],
)
def test_other_model_is_refused(world, field, value):
    replica = world.replica()
    client = world.client(replica, connect=False)
    with pytest.raises(UserError) as caught:
        client.connect(**FAKE | {field: value})
    message = str(caught.value)
    assert replica.address in message and "\n" not in message
    assert f"{field}={FAKE[field]!r}" in message and repr(value) in message


def load(replica, value):
    """Gives a replica weights without a client, as launch.rollout --policy does."""
    version = WeightVersion("model", "served", 0, "")
    arrays = zip(FAKE_SPECS, make_arrays(value), strict=True)
    return replica._run(replica._server.load(version, lambda dtype: arrays))


def test_weights_that_replicas_load_themselves(world, sampling):
    """One loads them later, is started again, and in the end has others."""
    first, second = world.replica(), world.replica()
    version = load(first, 1.0)
    client = world.client(first, second)
    assert client.await_weights() == version
    assert "serves no weights: it loads its weights, or" in client.lines[-1]
    assert load(second, 1.0) == version

    def serving():
        client.await_weights(version)
        return all(replica.version == version for replica in client._replicas)

    wait_until(serving)
    place = int(first.address.rpartition(":")[2])
    first.close(0.0)
    second.close(0.0)
    requests = make_requests()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.submit(
            lambda: assert_sampled(
                client,
                requests,
                sampling,
                version=version,
                resync=lambda: client.await_weights(version),
            )
        )
        load(world.replica(port=place), 1.0)
        found.result()
    client = world.client(world.replica(), sync_timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"no replica serves the weights .*--policy"):
        client.await_weights()
    others = world.replica(), world.replica()
    assert load(others[0], 1.0) != load(others[1], 2.0)
    client = world.client(*others)
    refused("serves weights .*start all replicas of a model alike", client.await_weights)


def test_other_protocol_is_refused(world, monkeypatch):
    client = world.client(world.replica(), connect=False)
    original = codec.encode_description
    monkeypatch.setattr(
        codec, "encode_description", lambda d: original(dataclasses.replace(d, protocol_major=1))
    )
    refused("protocol_major=1, the trainer 3", client.connect, **FAKE)


def test_missing_tokenizer_hash_is_not_compared(world):
    world.client(world.replica(tokenizer_hash=""), connect=False).connect(**FAKE)
    world.client(world.replica(), connect=False).connect(**FAKE | {"tokenizer_hash": ""})


def test_wrong_token(world):
    replica = world.replica()
    with RolloutClient([replica.address], "wrong", run_id="r", attempt_id="a") as client:
        refused(f"{replica.address} refuses the token", client.connect, **FAKE)


def test_unreachable_replica(world):
    client = world.client("127.0.0.1:1", connect=False, connect_timeout_s=0.6, progress_every_s=0.2)
    text = refused(r"127.0.0.1:1 cannot be reached within 0\.6 s", client.connect, **FAKE)
    assert "launch.rollout" in text
    assert "waiting for rollout replica 127.0.0.1:1 of rollout.addresses (" in client.lines[0]


def test_connect_waits_for_a_replica_that_starts_late(world, start_process):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = world.client(f"127.0.0.1:{port}", connect=False, progress_every_s=0.1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        descriptions = pool.submit(client.connect, **FAKE)
        wait_until(lambda: client.lines)
        start_process(port=port)
        assert descriptions.result()[0].engine == "fake"


@pytest.mark.parametrize("addresses", [[], ["127.0.0.1:1", "127.0.0.1:1"]])
def test_addresses_are_checked(addresses):
    with pytest.raises(UserError, match="at least one replica, each once"):
        RolloutClient(addresses, TOKEN, run_id="r", attempt_id="a")


def test_a_port_that_would_wrap_is_refused():
    """gRPC connects to port 65536 + n as to port n, and would send the token there."""
    with pytest.raises(UserError, match="must be host:port"):
        RolloutClient(["localhost:88993"], TOKEN, run_id="r", attempt_id="a")


def test_two_addresses_of_one_replica(world):
    replica = world.replica()
    alias = replica.address.replace("127.0.0.1", "localhost")
    client = world.client(replica, alias, connect=False)
    refused("lead to the same replica", client.connect, **FAKE)


def test_replica_that_others_keep_busy_is_waited_for(world):
    replica = world.replica(FakeScript(hang_after=1), max_calls=1)
    client = world.client(replica)
    rollouts = client.generate(make_requests(), SamplingParams(16), version=sync(client))
    next(rollouts)
    threading.Timer(0.3, rollouts.close).start()
    late = world.client(replica, progress_every_s=0.1)
    assert "RESOURCE_EXHAUSTED: Concurrent RPC limit exceeded!" in late.lines[0]


def test_weights_reach_all_replicas_in_one_pass(world):
    replicas = [world.replica() for _ in range(3)]
    client = world.client(*replicas)
    passes = []

    def read():
        passes.append(0)
        yield from make_arrays(5.0)

    version = client.sync_weights(FAKE_SPECS, read, step=4)
    assert len(passes) == 1
    assert (version.run_id, version.attempt_id, version.step) == ("run", "attempt", 4)
    for replica in replicas:
        for spec, array in zip(FAKE_SPECS, make_arrays(5.0)):
            np.testing.assert_array_equal(replica.engine.weights[spec.name], array)
    assert {world.caller(replica).describe().version for replica in replicas} == {version}
    assert client.counters["weight_bytes"] == 3 * sum(spec.num_bytes for spec in FAKE_SPECS)


def test_version_follows_from_the_weights(world):
    client = world.client(world.replica())
    assert sync(client) == sync(client)
    assert sync(client).digest != sync(client, 2.0).digest


def test_large_and_odd_tensors(world):
    specs = (
        TensorSpec("large", (3, 1 << 18), "float32"),  # exactly 3 chunks
        TensorSpec("odd", (7, 299_999), "bfloat16"),
        TensorSpec("scalar", (), "float16"),
        TensorSpec("empty", (0, 4), "float32"),
    )
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(3, 1 << 18)).astype(np.float32),
        rng.normal(size=(299_999, 7)).astype(ml_dtypes.bfloat16).T,  # not contiguous
        np.array(1.5, np.float16),
        np.zeros((0, 4), np.float32),
    ]
    replica = world.replica(specs=specs)
    world.client(replica).sync_weights(specs, lambda: iter(arrays), step=0)
    for spec, array in zip(specs, arrays):
        actual = replica.engine.weights[spec.name]
        assert actual.dtype == array.dtype
        assert actual.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        (make_arrays()[:1], "1 arrays for 2 specs"),
        ([*make_arrays(), np.zeros(1)], "more arrays than the 2 specs"),
        (make_arrays()[::-1], r"'embed.weight' is float32\[8\]; its spec says float32\[16, 8\]"),
        ([make_arrays()[0].astype(np.float64), make_arrays()[1]], r"is float64\[16, 8\]"),
    ],
)
def test_arrays_that_do_not_fit_their_specs(world, arrays, match):
    replica = world.replica()
    client = world.client(replica)
    version = sync(client)
    num_threads = threading.active_count()

    def read():
        for array in arrays:
            time.sleep(0.05)  # gRPC's reading thread waits for more meanwhile
            yield array
        time.sleep(0.05)

    for _ in range(3):
        raised(ValueError, match, client.sync_weights, FAKE_SPECS, read, step=1)
    assert len(list(client.generate(make_requests(), SamplingParams(4), version=version))) == 8
    assert sync(client, step=1).step == 1
    wait_until(lambda: threading.active_count() <= num_threads + 1)  # the channel may keep one


def test_weights_of_another_model_are_refused(world):
    client = world.client(world.replica())
    specs = (FAKE_SPECS[0], TensorSpec("other", (1,), "float32"))
    with pytest.raises(ValueError, match=r"missing: norm.weight; not of this model: other"):
        client.sync_weights(specs, lambda: [make_arrays()[0], np.zeros(1, np.float32)], step=0)


def test_second_run_is_refused_and_a_resumed_one_is_not(world):
    replica = world.replica()
    version = sync(world.client(replica), step=9)
    refused(r"belongs to run 'run'.*'intruder'", sync, world.client(replica, run_id="intruder"))
    resumed = world.client(replica, attempt_id="second")
    assert world.caller(replica).describe().version == version
    assert sync(resumed, step=3) == dataclasses.replace(version, attempt_id="second", step=3)


def test_replica_that_fails_an_update_is_set_aside_until_the_next(world):
    good, bad = world.replica(), world.replica(FakeScript(fail_commit=True))
    client = world.client(good, bad)
    version = sync(client)
    assert f"{bad.address} is set aside until the next sync" in client.lines[-1]
    requests, sampling = make_requests(), SamplingParams(16)
    assert_sampled(client, requests, sampling, version=version)
    assert (good.engine.num_yielded, bad.engine.num_yielded) == (8, 0)
    assert client.counters["replica_failures"] == 1
    bad.engine.script.fail_commit = False
    version = sync(client, step=1)
    list(client.generate(requests, sampling, version=version))
    assert bad.engine.num_yielded == 4


def test_a_commit_that_fails_is_tried_again(connected):
    client = connected(FakeScript(fail_commit=True))
    threading.Timer(0.2, setattr, (client.engine.script, "fail_commit", False)).start()
    version = sync(client)
    assert client.counters["replica_failures"] >= 1 and client.engine.num_staged >= 2
    assert "set aside until the next sync of weights: INTERNAL: RuntimeError" in client.lines[0]
    assert len(list(client.generate(make_requests(), SamplingParams(16), version=version))) == 8


def test_sync_gives_up_at_its_deadline(world):
    client = world.client(world.replica(FakeScript(fail_commit=True)), sync_timeout_s=0.9)
    started = time.monotonic()
    raised(RuntimeError, r"no replica took the weights of step 0 within 0\.9 s", sync, client)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"stall_timeout_s": 2.0}, "took no chunk for 2 s"),
        (
            {"stall_timeout_s": 60.0, "sync_wait_s": 0.4, "share_memory": False},
            "held up the others for 0.4 s",
        ),
    ],
    ids=["stalled", "slower"],
)
def test_a_replica_that_takes_no_bytes_does_not_hold_up_the_others(world, settings, reason):
    specs = (TensorSpec("large", (40, 1 << 18), "float32"),)
    released = threading.Event()

    def describe(request, context):
        description = dataclasses.replace(
            FakeEngine().describe(), protocol_major=codec.PROTOCOL_MAJOR, replica_id="deaf"
        )
        return codec.encode_description(description).SerializeToString()

    def update_without_reading(messages, context):
        released.wait(10)
        return b""

    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "UpdateWeights": grpc.stream_unary_rpc_method_handler(update_without_reading),
    }
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(codec.SERVICE_NAME, handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    good = world.replica(specs=specs)
    client = world.client(good, f"127.0.0.1:{port}", **settings)
    began = time.monotonic()
    arrays = [np.zeros((40, 1 << 18), np.float32)]
    version = client.sync_weights(specs, lambda: arrays, step=0)
    assert time.monotonic() - began < 5.0
    assert reason in client.lines[-1]
    assert world.caller(good).describe().version == version
    released.set()
    server.stop(0).wait()


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_response_once(world, num_replicas, backwards):
    replicas = [world.replica(FakeScript(backwards=backwards)) for _ in range(num_replicas)]
    client = world.client(*replicas)
    version = sync(client)
    requests = make_requests(10, 3)
    sampling = SamplingParams(16, eos_token_ids=(9,), stop_token_ids=(14,))
    states = HiddenStateParams((-1, 2), "bfloat16")
    rollouts = assert_sampled(client, requests, sampling, states, version=version)
    assert {r.finish_reason for r in rollouts} == {"eos", "stop", "length"}
    assert len({r.replica_id for r in rollouts}) == num_replicas
    counters = client.counters
    assert counters["responses"] == 30
    assert (counters["retries"], counters["duplicates"], counters["replica_failures"]) == (0, 0, 0)
    assert counters["state_bytes"] == sum(r.hidden_states.nbytes for r in rollouts)
    assert counters["token_bytes"] == sum(12 * len(r.response_ids) for r in rollouts)


def test_responses_arrive_as_they_finish(world):
    client = world.client(world.replica(FakeScript(delay_s=0.4)))
    version = sync(client)
    started = time.monotonic()
    rollouts = client.generate(make_requests(), SamplingParams(4), version=version)
    next(rollouts)
    assert time.monotonic() - started < 2.0  # all eight take longer
    rollouts.close()


def test_update_during_generation_waits_its_turn(connected):
    client = connected(FakeScript(delay_s=0.03))
    old = sync(client)
    requests, sampling = make_requests(), SamplingParams(16)
    rollouts = client.generate(requests, sampling, version=old)
    first = next(rollouts)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        new = pool.submit(sync, client, 2.0, 1)
        rest = list(rollouts)
        assert_complete([first, *rest], requests, sampling, version=old)
        assert new.result().step == 1
    assert len(list(client.generate(requests, sampling, version=new.result()))) == 8


def test_replica_killed_in_mid_stream(world, start_process):
    doomed, address = start_process(script={"delay_s": 0.02})
    survivor = world.replica(FakeScript(delay_s=0.01))
    client = world.client(address, survivor)
    version = sync(client)
    requests, sampling = make_requests(16, 4), SamplingParams(16)
    states = HiddenStateParams((0,), "float32")
    rollouts = []
    for rollout in client.generate(requests, sampling, states, version=version):
        rollouts.append(rollout)
        if len(rollouts) == 12:
            doomed.kill()
    assert_complete(rollouts, requests, sampling, states, version=version)
    counters = client.counters
    assert counters["responses"] == 64 and counters["replica_failures"] >= 1
    assert 0 < counters["retries"] < 64
    assert any(f"{address} is set aside (UNAVAILABLE" in line for line in client.lines)


def test_replica_that_exits_by_itself_and_never_returns(world, start_process):
    _, address = start_process(script={"exit_after": 3, "delay_s": 0.05})
    client = world.client(address, generate_timeout_s=2.0, progress_every_s=0.3)
    version = sync(client)
    rollouts = client.generate(make_requests(), SamplingParams(4), version=version)
    raised(RuntimeError, f"5 responses did not come within 2 s.*{address}", list, rollouts)
    assert any("waiting for 5 responses" in line for line in client.lines)


@pytest.mark.parametrize("resyncs", [False, True])
def test_restarted_replica_is_refused_until_synced(world, start_process, resyncs):
    process, address = start_process(script={"exit_after": 3, "delay_s": 0.05})
    client = world.client(address)
    version = sync(client)
    requests, sampling = make_requests(), SamplingParams(16)
    resync = (lambda: sync(client)) if resyncs else None
    rollouts = client.generate(requests, sampling, version=version, resync=resync)
    received = [next(rollouts)]
    process.wait(10)
    start_process(port=int(address.split(":")[1]))
    if resyncs:
        received += rollouts
        assert_complete(received, requests, sampling, version=version)
    else:
        with pytest.raises(RuntimeError, match=r"serves weights None.*sync weights first"):
            received += rollouts
        assert sync(client) == version
        assert_sampled(client, requests, sampling, version=version)


def test_hung_replica_is_given_up(world):
    hung = world.replica(FakeScript(hang_after=2))
    client = world.client(hung, world.replica(), stall_timeout_s=1.0, progress_every_s=0.1)
    version = sync(client)
    requests, sampling = make_requests(), SamplingParams(16)
    assert_sampled(client, requests, sampling, version=version)
    assert client.counters["retries"] == 2
    assert any(f"{hung.address} is set aside (no message for 1" in line for line in client.lines)
    assert any("waiting for 2 responses from" in line for line in client.lines)
    assert not any("may wait for compilation" in line for line in client.lines)
    assert hung.engine.num_closed == 1  # the call was cancelled there


def test_a_response_that_takes_longer_than_the_limit_comes_at_the_next_attempt(world):
    """32,768 tokens at 40 ms take 22 minutes. Every attempt was given up after 10."""
    replica = world.replica(FakeScript(delay_s=1.4))
    client = world.client(replica, stall_timeout_s=1.0, generate_timeout_s=6.0)
    requests, sampling = make_requests(1, 1), SamplingParams(16)
    assert_sampled(client, requests, sampling, version=sync(client))
    assert client.counters["replica_failures"] == 1
    assert any("see rollout.stall_timeout_s" in line for line in client.lines)


def test_a_trainer_that_was_stopped_does_not_blame_its_replica(world, monkeypatch):
    client = world.client(world.replica(FakeScript(delay_s=2.6)), stall_timeout_s=1.5)
    version = sync(client)
    get, stopped = queue.Queue.get, []

    def get_and_stop(self, block=True, timeout=None):
        try:
            return get(self, block, timeout)
        except queue.Empty:
            if not stopped:  # as SIGSTOP for 2 s, while the response is not there yet
                stopped.append(time.sleep(2.0))
            raise

    monkeypatch.setattr(queue.Queue, "get", get_and_stop)
    requests, sampling = make_requests(1, 1), SamplingParams(16)
    assert_sampled(client, requests, sampling, version=version)
    assert stopped and client.counters["replica_failures"] == 0


def test_only_replica_recovers(connected):
    client = connected(FakeScript(hang_after=2), stall_timeout_s=1.0)
    version = sync(client)
    requests, sampling = make_requests(), SamplingParams(16)
    rollouts = []
    for rollout in client.generate(requests, sampling, version=version):
        rollouts.append(rollout)
        client.engine.script.hang_after = None if client.lines else 2
        if len(rollouts) == 2:
            threading.Timer(0.2, lambda: setattr(client.engine.script, "hang_after", None)).start()
    assert_complete(rollouts, requests, sampling, version=version)
    assert client.counters["replica_failures"] == 1
    assert "set aside (no message for" in " ".join(client.lines)
    wait_until(lambda: client.engine.num_closed == len(client.engine.asked))


def test_slow_consumer_is_no_stall(world):
    client = world.client(world.replica(hidden_size=4096), stall_timeout_s=1.0)
    version = sync(client)
    requests = [dataclasses.replace(r, seed=255) for r in make_requests(60, 1)]
    sampling, states = SamplingParams(256), HiddenStateParams((-1,))
    rollouts = []
    for rollout in client.generate(requests, sampling, states, version=version):
        rollouts.append(rollout)
        if len(rollouts) == 1:
            time.sleep(2.0)
    assert_complete(rollouts, requests, sampling, states, version=version, hidden_size=4096)
    assert client.counters["replica_failures"] == 0


def test_an_engine_that_fails_is_asked_again_but_not_for_ever(connected):
    client = connected(FakeScript(fail_after=2))
    version, sampling = sync(client), SamplingParams(16)
    rollouts = []
    for rollout in client.generate(make_requests(), sampling, version=version):
        rollouts.append(rollout)
        if len(rollouts) == 2:
            threading.Timer(0.2, lambda: setattr(client.engine.script, "fail_after", None)).start()
    assert_complete(rollouts, make_requests(), sampling, version=version)
    assert (client.counters["replica_failures"], client.counters["retries"]) == (1, 6)
    client.engine.script.fail_after = 0
    with pytest.raises(RuntimeError, match="fails again and again: INTERNAL: RuntimeError: the sc"):
        list(client.generate(make_requests(), sampling, version=version))


def test_request_beyond_the_limits_is_not_retried(world):
    replica = world.replica()
    client = world.client(replica)
    version = sync(client)
    with pytest.raises(ValueError, match=f"{replica.address} refuses the call: .*max_tokens=5000"):
        list(client.generate(make_requests(), SamplingParams(5000), version=version))


def test_long_prompts_and_responses_fit_into_messages(world):  # gRPC's default limit is 4 MiB
    replica = world.replica(max_prompt_tokens=5_000_000, max_response_tokens=700_000)
    client = world.client(replica)
    prompt = np.zeros(5_000_000, np.int32)
    request = dataclasses.replace(make_requests(1, 1)[0], prompt_ids=prompt, seed=699_999)
    sampling = SamplingParams(700_000)
    version = sync(client)
    (rollout,) = client.generate([request], sampling, version=version)
    assert_complete([rollout], [request], sampling, version=version)


def test_repeated_sample_id_is_refused(world):
    client = world.client(world.replica())
    version = sync(client)
    with pytest.raises(ValueError, match="unique"):
        list(client.generate(make_requests(1, 1) * 2, SamplingParams(4), version=version))


def test_version_nobody_serves(world):
    client = world.client(world.replica())
    ghost = WeightVersion("run", "attempt", 0, "0" * 64)
    with pytest.raises(RuntimeError, match=r"no replica serves weights run/attempt/0/0000"):
        list(client.generate(make_requests(), SamplingParams(4), version=ghost))


def test_no_requests(world):
    client = world.client(world.replica())
    assert list(client.generate([], SamplingParams(4), version=sync(client))) == []


def test_inconsistent_reply_names_the_replica(world, monkeypatch):
    original = codec.encode_rollout

    def lying(rollout):
        for message in original(rollout):
            message = pb.GenerateResponse.FromString(message.SerializeToString())
            if message.response.sample_id == "3/1":
                message.response.token_ids[0] = 101
            yield message

    replica = world.replica()
    client = world.client(replica)
    version = sync(client)
    monkeypatch.setattr(codec, "encode_rollout", lying)
    rollouts = client.generate(
        make_requests(), SamplingParams(16), HiddenStateParams((0,)), version=version
    )
    raised(RuntimeError, f"{replica.address} sent an inconsistent reply", list, rollouts)


def test_memory_error_while_a_reply_is_read_reaches_the_caller_at_once(world, monkeypatch):
    """Any exception of the reading thread reaches the caller at once."""
    client = world.client(world.replica(), stall_timeout_s=60.0)
    version = sync(client)

    def feed(decoder, message):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(codec.RolloutDecoder, "feed", feed)
    began = time.monotonic()
    with pytest.raises(MemoryError, match=r"1\.00 TiB"):
        list(client.generate(make_requests(), SamplingParams(16), version=version))
    assert time.monotonic() - began < 10


def test_stream_that_ends_early_names_the_missing(world, monkeypatch):
    replica = world.replica()
    client = world.client(replica)
    version = sync(client)
    generate = replica.engine.generate
    replica.engine.generate = lambda call: generate(call._replace(requests=call.requests[:-2]))
    with pytest.raises(RuntimeError, match="without 2 of 8 responses, the first '3/0'"):
        list(client.generate(make_requests(), SamplingParams(16), version=version))


def test_early_close_ends_the_work_and_the_threads(connected):
    client = connected(FakeScript(delay_s=0.02))
    version = sync(client)
    rollouts = client.generate(make_requests(50, 2), SamplingParams(16), version=version)
    next(rollouts)
    assert [t for t in threading.enumerate() if t.name.startswith("generate")]
    rollouts.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("generate")]
    wait_until(lambda: client.engine.num_closed == 1)
    assert client.engine.num_yielded < 20
    assert len(list(client.generate(make_requests(), SamplingParams(16), version=version))) == 8


def test_a_paused_replica_is_tried_again_until_it_is_resumed(world):
    replica = world.replica()
    client, caller = world.client(replica), world.caller(replica)
    version, requests, sampling = sync(client), make_requests(), SamplingParams(16)
    caller.pause()
    threading.Timer(0.3, caller.resume).start()
    assert_sampled(client, requests, sampling, version=version)
    assert any("paused" in line for line in client.lines)


def test_aborted_responses_are_sampled_again(world):
    replica = world.replica(FakeScript(hang_after=2))
    client = world.client(replica, stall_timeout_s=30.0)
    abort = replica.engine.abort

    async def abort_and_hang_no_more():
        replica.engine.script.hang_after = None
        await abort()

    replica.engine.abort = abort_and_hang_no_more
    version, requests, sampling = sync(client), make_requests(), SamplingParams(16)
    rollouts = client.generate(requests, sampling, version=version)
    received = [next(rollouts), next(rollouts)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        aborted = pool.submit(world.caller(replica).abort)
        received += rollouts
        assert aborted.result() == 6
    assert_complete(received, requests, sampling, version=version)
    counters = client.counters
    assert (counters["aborted"], counters["retries"], counters["responses"]) == (6, 6, 8)
    assert counters["replica_failures"] == 0
    (line,) = client.lines
    assert f"{replica.address} aborted 6 responses" in line


def abort_first(engine, num_calls, fail=False):
    """Aborts the first response of the first calls; with `fail`, the call then fails."""
    generate, calls = engine.generate, itertools.count(1)

    async def aborting(call):
        aborts = next(calls) <= num_calls
        async for rollout in generate(call):
            if aborts and rollout.sample_id == call.requests[0].sample_id:
                rollout = _aborted(rollout)
            yield rollout
            if aborts and fail:
                raise RuntimeError("the test says so")

    engine.generate = aborting


def test_a_response_that_is_aborted_again_and_again_ends_the_call(world):
    replica = world.replica()
    client = world.client(replica)
    abort_first(replica.engine, 99)
    rollouts = client.generate(make_requests(), SamplingParams(16), version=sync(client))
    expected = f"'0/0' was aborted 3 times, last by .*{replica.address}; call no Abort"
    raised(RuntimeError, expected, list, rollouts)
    assert client.counters["aborted"] == 3


def test_an_aborted_response_of_a_call_that_fails_is_asked_for_once(world):
    replica = world.replica()
    client = world.client(replica)
    abort_first(replica.engine, 2, fail=True)
    requests, sampling, version = make_requests(), SamplingParams(16), sync(client)
    assert_sampled(client, requests, sampling, version=version)
    assert (client.counters["aborted"], client.counters["retries"]) == (2, 16)


def test_progress_is_logged_by_default(caplog):
    client = RolloutClient(
        ["127.0.0.1:1"], TOKEN, run_id="r", attempt_id="a", connect_timeout_s=1.5,
        progress_every_s=0.1,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING), client, pytest.raises(UserError):
        client.connect(**FAKE)
    assert "waiting for rollout replica 127.0.0.1:1" in caplog.text


class Torn(BaseException):
    """Raised by a signal handler."""


@pytest.mark.parametrize("start", ["sync_weights", "generate"])
def test_signal_while_a_call_is_begun_keeps_no_channel_open(world, monkeypatch, start):
    """The signal arrives after gRPC has counted the call and before it creates its thread."""
    client = RolloutClient([world.replica().address], TOKEN, run_id="r", attempt_id="a")
    client.connect(**FAKE)
    version = sync(client) if start == "generate" else None
    wait_until(lambda: not client._replicas[0]._channel._call_state.managed_calls)
    spin = grpc._channel._run_channel_spin_thread

    def interrupted(state):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.05)
        spin(state)

    def tear(*_):
        raise Torn

    monkeypatch.setattr(grpc._channel, "_run_channel_spin_thread", interrupted)
    previous = signal.signal(signal.SIGTERM, tear)
    try:
        with pytest.raises(Torn):
            if start == "generate":
                list(client.generate(make_requests(), SamplingParams(16), version=version))
            else:
                sync(client)
    finally:
        signal.signal(signal.SIGTERM, previous)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(2.0)
    assert not closing.is_alive()


@pytest.mark.parametrize("call", ["sync_weights", "generate"])
def test_close_ends_the_calls_of_another_thread(connected, call):
    """No replica is blamed. The memory is closed once: its number may be another file's by then."""
    client = connected(FakeScript(delay_s=0.2))
    version, begun, go_on = sync(client), threading.Event(), threading.Event()

    def read():
        begun.set()
        go_on.wait(5)
        yield from make_arrays(2.0)

    def work():
        if call == "sync_weights":
            return client.sync_weights(FAKE_SPECS, read, step=1)
        for _ in client.generate(make_requests(), SamplingParams(16), version=version):
            begun.set()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        assert begun.wait(5)
        closing = pool.submit(client.close)
        wait_until(client._closed.is_set)
        time.sleep(0.1)
        assert call == "generate" or client._memory is None or not closing.done()
        go_on.set()
        with pytest.raises((RuntimeError, ValueError), match="closed"):
            working.result()
        closing.result()
    assert client._memory is None and client.lines == []


def test_close_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(remote, "_CLOSE_S", 0.05)
    replica = remote.RemoteReplica("127.0.0.1:1", TOKEN, tls_ca=None)
    never = threading.Event()
    monkeypatch.setattr(replica._channel, "close", never.wait)
    replica.close()
    never.set()
