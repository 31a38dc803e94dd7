"""A client behind connections that are cut, slow or corrupt: nothing lost, nothing twice.

Bytes pass a proxy. On plain TCP, a changed byte of a response would not be noticed: other addresses
than loopback need TLS, whose checks end the connection.
"""

import concurrent.futures
import dataclasses
import resource
import signal
import threading
import time

import numpy as np
import pytest

from semrl_jax.rollout.engines.vllm import _Staging
from semrl_jax.types import HiddenStateParams, SamplingParams, TensorSpec
from tests.cases import raised, refused
from tests.rollout.conftest import (
    TOKEN,
    assert_complete,
    assert_sampled,
    make_arrays,
    make_requests,
)
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine, FakeScript
from tests.rollout.proxy import Proxy
from tests.rollout.server.test_server import make_certificate

LARGE = (TensorSpec("first", (3, 1 << 18), "float32"), TensorSpec("second", (1 << 18,), "float32"))
NUM_BYTES = sum(spec.num_bytes for spec in LARGE)
SLOW = pytest.mark.slow
STATES = HiddenStateParams((-1,), "float32")
SAMPLING = SamplingParams(400)


def large_arrays(value):
    return [np.full(spec.shape, value, np.float32) for spec in LARGE]


def sync(client, value=1.0, step=0, specs=LARGE):
    arrays = large_arrays if specs is LARGE else make_arrays
    return client.sync_weights(specs, lambda: arrays(value), step=step)


def long_requests(num):
    """Responses of 400 tokens; with states of width 3584, each has 5.7 MB in six chunks."""
    return [dataclasses.replace(r, seed=399) for r in make_requests(num, 1)]


@pytest.fixture
def behind(world):
    """Starts a replica and a proxy before it."""

    def start(**settings):
        replica = world.replica(**settings)
        proxy = world.stack.enter_context(Proxy(replica.address))
        return replica, proxy

    return start


@pytest.mark.parametrize("fault", ["cut_after", "flip_at"])
@pytest.mark.parametrize(
    "position", [pytest.param(0.1, marks=SLOW), 0.5, pytest.param(0.99, marks=SLOW)]
)
def test_update_that_is_cut_or_corrupted_leaves_the_old_weights(world, behind, fault, position):
    """The client repeats it, within the deadline. Until then, the old weights are served."""
    replica, proxy = behind(specs=LARGE)
    client = world.client(proxy, share_memory=False)
    old = sync(client)
    served = []

    def read():
        if not served:
            proxy.up.num_bytes = 0
            setattr(proxy.up, fault, int(position * NUM_BYTES))
        served.append((replica.engine.weights["second"][0], replica._server._service._version))
        return large_arrays(2.0)

    new = client.sync_weights(LARGE, read, step=1)
    assert proxy.up.num_faults == 1
    assert served == [(1.0, old)] * 2  # before the first attempt and after it failed
    assert client.counters["replica_failures"] == 1
    assert any(f"{proxy.address} is set aside until the next sync" in x for x in client.lines)
    for spec in LARGE:
        assert (replica.engine.weights[spec.name] == 2.0).all()
    assert not replica.engine.is_staging
    assert world.caller(replica).describe().version == new


@pytest.mark.slow
def test_lost_reply_to_a_commit_is_asked_for_again(world, behind):
    """The replica has the new weights, the client does not know it, and sends them again."""
    replica, proxy = behind(specs=LARGE, script=FakeScript(commit_delay_s=0.3))
    client = world.client(proxy)
    threading.Timer(0.15, proxy.cut).start()  # during the commit
    version = sync(client)
    assert replica.engine.num_staged == 2
    assert world.caller(replica).describe().version == version


@pytest.mark.parametrize(
    "position",
    [pytest.param(0.3, marks=SLOW), 1.5, *(pytest.param(x, marks=SLOW) for x in (2.7, 3.9))],
)
def test_states_that_are_cut_off_arrive_in_another_call(world, behind, position):
    """The connection ends inside a chunk; the position counts responses of six chunks."""
    _, proxy = behind(hidden_size=3584)
    client = world.client(proxy)
    version = sync(client, specs=FAKE_SPECS)
    requests = long_requests(4)
    proxy.down.num_bytes, proxy.down.cut_after = 0, int(position * 400 * 3584 * 4)
    assert_sampled(client, requests, SAMPLING, STATES, version=version, hidden_size=3584)
    counters = client.counters
    assert (proxy.down.num_faults, counters["replica_failures"]) == (1, 1)
    assert counters["responses"] == 4
    # gRPC may drop what came before the end of the connection and was not read yet.
    assert 4 - int(position) <= counters["retries"] <= 4


@SLOW
def test_corrupt_bytes_of_a_response_end_a_connection_with_tls(world, tmp_path):
    tls = make_certificate(tmp_path)
    engine = FakeEngine(hidden_size=3584)
    with EmbeddedReplica(engine, token=TOKEN, **tls) as replica, Proxy(replica.address) as proxy:
        client = world.client(proxy, tls_ca=tls["tls_certificate"])
        version = sync(client, specs=FAKE_SPECS)
        requests = long_requests(2)
        proxy.down.num_bytes, proxy.down.flip_at = 0, 3_000_000
        assert_sampled(client, requests, SAMPLING, STATES, version=version, hidden_size=3584)
        assert (proxy.down.num_faults, client.counters["replica_failures"]) == (1, 1)


def test_a_distant_replica_is_reached_in_one_attempt(world, behind):
    """Bytes take 0.3 s each way, as from a machine that is far or busy."""
    _, proxy = behind()
    proxy.up.delay_s = proxy.down.delay_s = 0.3
    world.client(proxy)
    assert proxy.num_connections == 1


@SLOW
def test_a_slow_connection_is_no_failure(world, behind):
    """Delays and 8 MB/s: longer than the client's limit in sum, but never in one wait."""
    _, proxy = behind(hidden_size=3584)
    client = world.client(proxy, stall_timeout_s=0.8)
    version = sync(client, specs=FAKE_SPECS)
    proxy.down.bytes_per_s, proxy.down.delay_s = 8e6, 0.0005
    requests = long_requests(2)
    began = time.monotonic()
    rollouts = list(client.generate(requests, SAMPLING, STATES, version=version))
    assert time.monotonic() - began > 0.8
    assert_complete(rollouts, requests, SAMPLING, STATES, version=version, hidden_size=3584)
    assert client.counters["replica_failures"] == 0


@pytest.mark.slow
def test_replica_that_was_stopped_and_continues(world, start_process):
    """SIGSTOP in the middle of a stream, SIGCONT after its responses went elsewhere."""
    process, address = start_process(script={"delay_s": 0.02})
    client = world.client(address, world.replica(), stall_timeout_s=1.0)
    version = sync(client, specs=FAKE_SPECS)
    requests, sampling = make_requests(8, 4), SamplingParams(16)
    rollouts = []
    for rollout in client.generate(requests, sampling, version=version):
        rollouts.append(rollout)
        if len(rollouts) == 18:  # 16 of the other replica, and a few
            process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGCONT)
    assert_complete(rollouts, requests, sampling, version=version)
    counters = client.counters
    assert counters["responses"] == 32 and counters["replica_failures"] == 1
    assert any(f"{address} is set aside (no message for" in line for line in client.lines)
    new = sync(client, step=1, value=2.0, specs=FAKE_SPECS)
    assert world.caller(_at(address)).describe().version == new
    assert_sampled(client, requests, sampling, version=new)


def _at(address):
    return type("Replica", (), {"address": address})


@SLOW
@pytest.mark.parametrize("share_memory", [True, False])
def test_replica_that_is_stopped_during_an_update(world, start_process, share_memory):
    """The others commit. What it still holds when it continues is of no update that counts."""
    process, address = start_process()
    good = world.replica()
    waits = {"sync_timeout_s": 2.0, "stall_timeout_s": 0.5, "generate_timeout_s": 20.0}
    client = world.client(address, good, share_memory=share_memory, **waits)
    old = sync(client, specs=FAKE_SPECS)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    new = sync(client, value=2.0, step=1, specs=FAKE_SPECS)
    assert time.monotonic() - began < 2.0 + 5
    assert any(f"{address} is set aside until the next sync" in line for line in client.lines)
    process.send_signal(signal.SIGCONT)
    assert world.caller(good).describe().version == new
    assert world.caller(_at(address)).describe().version in (old, new)  # whole, in any case
    assert sync(client, value=3.0, step=2, specs=FAKE_SPECS).step == 2
    assert world.caller(_at(address)).describe().version.step == 2


def test_two_trainers_at_once(world):
    """The second one is refused in the middle of the first one's responses, which are not lost."""
    replica = world.replica(FakeScript(delay_s=0.02))
    first, second = world.client(replica), world.client(replica, run_id="second")
    version = sync(first, specs=FAKE_SPECS)
    requests, sampling = make_requests(), SamplingParams(16)
    rollouts = first.generate(requests, sampling, version=version)
    received = [next(rollouts)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        refused = pool.submit(sync, second, 2.0, 0, FAKE_SPECS).exception()
    assert "belongs to run 'run'; it refuses weights of run 'second'" in str(refused)
    received += rollouts
    assert_complete(received, requests, sampling, version=version)
    np.testing.assert_array_equal(replica.engine.weights["norm.weight"], make_arrays()[1])


def test_a_client_that_is_closed_hands_its_replicas_over(world):
    replica = world.replica()
    first, other = world.client(replica), world.client(replica, run_id="other")
    sync(first, specs=FAKE_SPECS)
    other.close()  # it never owned the replica
    second = world.client(replica, run_id="second")
    refused("belongs to run 'run'", sync, second, 2.0, 0, FAKE_SPECS)
    first.close()
    assert sync(second, 2.0, 0, FAKE_SPECS).run_id == "second"


def test_a_dead_replica_does_not_hold_up_the_end(world):
    replica = world.replica()
    client = world.client(replica)
    sync(client, specs=FAKE_SPECS)
    replica.close()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 5


@pytest.fixture
def small_files():
    """The system refuses files above 64 KiB to this process, anonymous ones included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_trainer_without_room_for_shared_weights_sends_them(world, small_files):
    replica = world.replica(specs=LARGE)
    client = world.client(replica)
    assert client._replicas[0].description.reads_memory
    version = sync(client)
    assert world.caller(replica).describe().version == version
    assert (replica.engine.weights["second"] == 1.0).all()


def test_replica_without_room_for_new_weights_says_so_and_keeps_the_old(world, small_files):
    """The trainer names replica and reason, and ends within its limit."""
    replica = world.replica(specs=LARGE)
    client = world.client(replica, share_memory=False, sync_timeout_s=1.0)
    old = sync(client)
    replica.engine.begin_weight_update = lambda specs, adapter: _Staging(specs).buffers
    expected = f"within 1 s .*{replica.address}: INTERNAL: OSError: .*File too large"
    raised(RuntimeError, expected, sync, client, 2.0, step=1)
    assert (replica.engine.weights["second"] == 1.0).all()
    assert world.caller(replica).describe().version == old
