"""Which replica gets which call; replicas that are slow, join, leave, or get weights again."""

import asyncio
import collections
import concurrent.futures
import dataclasses
import itertools
import re
import sys
import threading
import time
import types

import pytest

from semrl_jax.rollout.client.dispatch import split_into_calls
from semrl_jax.rollout.client.replica import Counters, Figures, Load
from semrl_jax.sampling.counters import ReplicaFigures
from semrl_jax.sampling.requests import groups_per_call
from semrl_jax.support.errors import UserError
from semrl_jax.types import SamplingParams
from tests.rollout.client.test_client import sync
from tests.rollout.conftest import assert_complete, assert_sampled, make_arrays, make_requests
from tests.rollout.fake_engine import FakeEngine, FakeScript
from tests.running import wait_until
from tests.sampling.parts import made
from tests.tiny import tiny_config

SAMPLING = SamplingParams(16)


def names(*groups, group_size=2):
    return tuple(f"{group}/{index}" for group in groups for index in range(group_size))


def test_calls_have_whole_groups_in_the_order_of_the_requests():
    requests = make_requests(5, 2)
    mixed = [requests[i] for i in (4, 0, 5, 1, 2, 3, 6, 7, 8, 9)]  # groups 2 0 2 0 1 1 3 3 4 4
    calls = split_into_calls(mixed, 2)
    assert [tuple(r.sample_id for r in call) for call in calls] == [
        names(2, 0), names(1, 3), names(4),
    ]  # fmt: skip


def test_an_evaluation_has_calls_of_as_many_responses_as_training():
    rollout = tiny_config().rollout  # groups of 4
    rollout.groups_per_call = 3
    assert groups_per_call(make_requests(5, 4), rollout) == 3
    assert groups_per_call(make_requests(5, 1), rollout) == 12
    assert groups_per_call(make_requests(1, 64), rollout) == 1
    rollout.groups_per_call = 0
    assert groups_per_call(make_requests(5, 4), rollout) == 0


def test_without_a_number_of_groups_each_replica_gets_one_equal_part(world):
    replicas = [world.replica(calls_at_once=4, is_deterministic=True) for _ in range(2)]
    client = world.client(*replicas)
    list(client.generate(make_requests(5, 2), SAMPLING, version=sync(client)))
    assert [r.engine.asked for r in replicas] == [[names(0, 2, 4)], [names(1, 3)]]


def test_a_free_replica_gets_the_next_call(world):
    fast, slow = world.replica(FakeScript(delay_s=0.005)), world.replica(FakeScript(delay_s=1.0))
    client = world.client(fast, slow)
    version, requests = sync(client), make_requests(12, 2)
    assert_sampled(client, requests, SAMPLING, version=version, groups_per_call=2)
    assert slow.engine.asked == [names(2, 3)]
    assert fast.engine.asked[:5] == [names(0, 1), *(names(g, g + 1) for g in (4, 6, 8, 10))]
    assert client.counters["replica_failures"] == client.counters["retries"] == 0


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_an_idle_replica_takes_over_a_slow_call(world, is_deterministic):
    fast = world.replica(is_deterministic=is_deterministic)
    slow = world.replica(FakeScript(hang_after=1), is_deterministic=is_deterministic)
    client = world.client(fast, slow, stall_timeout_s=60.0)
    version, requests = sync(client), make_requests(4, 4)
    began = time.monotonic()
    rollouts = list(client.generate(requests, SAMPLING, version=version, groups_per_call=1))
    assert time.monotonic() - began < 5.0  # without it, the stall timeout
    assert_complete(rollouts, requests, SAMPLING, version=version)
    assert slow.engine.asked == [names(1, group_size=4)]
    whole = names(1, group_size=4)
    assert fast.engine.asked[-1] == (whole if is_deterministic else whole[1:])
    wait_until(lambda: slow.engine.num_closed == 1)  # its call was cancelled
    counters = client.counters
    assert counters["taken_over"] == 3 and counters["retries"] == 0
    assert counters["duplicates"] == (1 if is_deterministic else 0)
    assert counters["replica_failures"] == 0
    assert any(f"{slow.address} is slow; " in line for line in client.lines)


def test_the_slow_replica_may_win(world):
    """The first response of each sample counts; the other call is cancelled."""
    slow = world.replica(FakeScript(delay_s=0.4), is_deterministic=True)
    other = world.replica(is_deterministic=True)
    client = world.client(slow, other)
    version, requests = sync(client), make_requests(3, 2)
    rollouts = client.generate(requests, SAMPLING, version=version, groups_per_call=1)
    received = [next(rollouts) for _ in range(4)]
    other.engine.script.hang_after = 0
    received += rollouts
    assert_complete(received, requests, SAMPLING, version=version)
    assert client.counters["taken_over"] == 2
    wait_until(lambda: other.engine.num_closed == len(other.engine.asked))


def test_a_call_whose_responses_are_all_there_is_not_taken_over(world):
    """Its end is read only once the consumer goes on."""
    slow = world.replica(FakeScript(delay_s=1.0))
    client = world.client(slow, *(world.replica() for _ in range(3)))
    version, requests = sync(client), make_requests(6, 1)
    rollouts = client.generate(requests, SAMPLING, version=version, groups_per_call=1)
    received = [next(rollouts) for _ in range(5)]
    time.sleep(0.2)  # more than the 1.5-fold time of a fast call
    assert_complete([*received, *rollouts], requests, SAMPLING, version=version)
    assert [line for line in client.lines if "takes over" in line] == [
        line for line in client.lines if line.endswith("takes over 1 responses")
    ]


def test_a_call_that_was_overtaken_ends_at_once(world):
    fast = world.replica()
    hung = [world.replica(FakeScript(hang_after=0)) for _ in range(2)]
    client = world.client(fast, *hung)
    version, requests = sync(client), make_requests(3, 2)
    rollouts = client.generate(requests, SAMPLING, version=version, groups_per_call=1)
    received = [next(rollouts) for _ in range(5)]  # the sixth is of the last call
    wait_until(lambda: hung[0].engine.num_closed == 1)
    assert hung[1].engine.num_closed == 0
    assert_complete([*received, *rollouts], requests, SAMPLING, version=version)


def one_after_the_other(monkeypatch):
    """Engines generate as the JAX engine does: a call waits until those before it have ended."""
    generate = FakeEngine.generate
    locks = collections.defaultdict(asyncio.Lock)

    async def generate_alone(self, call):
        async with locks[self]:
            async for rollout in generate(self, call):
                yield rollout

    monkeypatch.setattr(FakeEngine, "generate", generate_alone)


@pytest.mark.slow
def test_a_call_that_waits_for_another_of_this_client_does_not_stall(world, monkeypatch):
    """The parts of several batches are asked for at once."""
    one_after_the_other(monkeypatch)
    replica = world.replica(FakeScript(delay_s=0.2), calls_at_once=1)
    client = world.client(replica, stall_timeout_s=1.0)
    version, requests = sync(client), make_requests(5, 2)

    def generate():
        return list(client.generate(requests, SAMPLING, version=version))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(generate) for _ in range(2)]:
            assert_complete(call.result(), requests, SAMPLING, version=version)
    assert client.counters["replica_failures"] == client.counters["retries"] == 0
    # Then silence counts again.
    replica.engine.script.hang_after = 0
    calls = client.generate(requests[:1], SAMPLING, version=version)
    threading.Timer(1.5, replica.engine.script.__setattr__, ("hang_after", None)).start()
    assert len(list(calls)) == 1 and client.counters["replica_failures"] == 1


def test_a_replica_with_a_call_of_another_thread_takes_over_none(world, monkeypatch):
    one_after_the_other(monkeypatch)
    # The first replica is free first, so it gets the third call.
    replicas = [world.replica(FakeScript(delay_s=s), calls_at_once=1) for s in (0.1, 0.15)]
    client = world.client(*replicas)
    version, few, many = sync(client), make_requests(3, 2), make_requests(2, 15)

    def generate(requests, **options):
        assert_sampled(client, requests, SAMPLING, version=version, **options)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # The third call waits for a call of the other thread, which is longer on the other replica.
        first = pool.submit(generate, few, groups_per_call=1)
        wait_until(lambda: all(replica.engine.asked for replica in replicas))
        second = pool.submit(generate, many[:5] + many[15:])
        first.result()
        second.result()
    assert client.counters["taken_over"] == 0


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_call_that_failed_is_repeated_whole_if_that_gives_the_same(world, is_deterministic):
    replica = world.replica(FakeScript(fail_after=3), is_deterministic=is_deterministic)
    client = world.client(replica, progress=lambda line: repair())

    def repair():
        replica.engine.script.fail_after = None

    version, requests = sync(client), make_requests(2, 4)
    assert_sampled(client, requests, SAMPLING, version=version, groups_per_call=1)
    first = names(0, group_size=4)
    again = first if is_deterministic else first[3:]
    assert replica.engine.asked == [first, again, names(1, group_size=4)]
    counters = client.counters
    assert (counters["retries"], counters["duplicates"]) == (1, 3 if is_deterministic else 0)


def test_an_aborted_response_is_sampled_again_in_the_same_call(world):
    replica = world.replica(FakeScript(hang_after=2), is_deterministic=True)
    client = world.client(replica)
    version, requests = sync(client), make_requests(2, 2)
    rollouts = client.generate(requests, SAMPLING, version=version, groups_per_call=2)
    received = [next(rollouts), next(rollouts)]
    wait_until(lambda: replica.engine.num_hung == 1)
    replica.engine.script.hang_after = None
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(world.caller(replica).abort)
        received += rollouts
    assert_complete(received, requests, SAMPLING, version=version)
    assert replica.engine.asked == [names(0, 1)] * 2
    assert client.counters["aborted"] == client.counters["retries"] == 2


def test_a_replica_runs_as_many_calls_as_it_says(world):
    several = world.replica(FakeScript(delay_s=0.2), calls_at_once=3)
    one = world.replica(FakeScript(delay_s=0.2))
    client = world.client(one, several)
    version, requests = sync(client), make_requests(12, 2)
    assert_sampled(client, requests, SAMPLING, version=version, groups_per_call=1)
    assert (one.engine.most_at_once, several.engine.most_at_once) == (1, 3)
    assert len(several.engine.asked) > len(one.engine.asked)


def test_a_replica_that_claims_many_calls_gets_a_few(world):
    replica = world.replica(FakeScript(delay_s=0.5), calls_at_once=2**31 - 1)
    client = world.client(replica)
    rollouts = client.generate(
        make_requests(12, 1), SAMPLING, version=sync(client), groups_per_call=1
    )
    assert len(list(rollouts)) == 12
    assert replica.engine.most_at_once == 8


def test_calls_that_fail_together_are_one_failure(world):
    """The engine of a replica with many calls fails once, not as often as it has calls."""
    replica = world.replica(FakeScript(fail_after=0), calls_at_once=4)
    client = world.client(replica)
    version, requests = sync(client), make_requests(8, 1)
    repair = threading.Timer(0.25, setattr, (replica.engine.script, "fail_after", None))
    repair.start()  # before the first pause of 0.5 s is over
    assert_sampled(client, requests, SAMPLING, version=version, groups_per_call=1)
    assert client.counters["replica_failures"] == 1


def test_the_line_about_a_wait_shows_all_replicas(world):
    hung, failing = world.replica(FakeScript(hang_after=0)), world.replica(FakeScript(fail_after=0))
    client = world.client(hung, failing, world.replica(), progress_every_s=0.1)
    version = sync(client)
    rollouts = client.generate(make_requests(3, 1), SAMPLING, version=version, groups_per_call=3)
    threading.Timer(0.5, hung.close, (0.0,)).start()
    assert len(list(rollouts)) == 3
    assert any(" replicas 1/3 busy; a silent replica is given up" in line for line in client.lines)


# Weights.


@pytest.mark.slow
@pytest.mark.parametrize("num_fast", [0, 1])
def test_a_slow_commit_does_not_hold_up_the_others(world, num_fast):
    fast = [world.replica() for _ in range(num_fast)]
    slow = world.replica(FakeScript(commit_delay_s=1.2))
    client = world.client(*fast, slow, sync_wait_s=0.2)
    began = time.monotonic()
    version = sync(client)
    elapsed = time.monotonic() - began
    if not fast:  # nobody waits for it
        assert elapsed > 1.1 and client.lines == []
        return
    assert elapsed < 1.1  # 0.2 s and at most two polls of 0.2 s
    assert client.lines == [
        f"rollout replica {slow.address} is set aside until the next sync of weights: had not "
        "taken the weights 0.2 s after the first replica"
    ]
    slow.engine.script.commit_delay_s = 0.0
    wait_until(lambda: world.caller(slow).describe().version == version)  # the commit goes on
    assert sync(client, step=1).step == 1
    list(client.generate(make_requests(), SAMPLING, version=dataclasses.replace(version, step=1)))
    assert slow.engine.num_yielded == 4


def lose(world, replica):
    """Another attempt of the run gives the replica other weights."""
    return sync(world.client(replica, attempt_id="other"), value=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_a_replica_that_lost_its_weights_gets_them_while_others_sample(world, value):
    """With 3.0, the weights have changed: the call does not take them."""
    steady, restarted = (world.replica(FakeScript(delay_s=0.05)) for _ in range(2))
    client = world.client(steady, restarted)
    version, requests = sync(client), make_requests(40, 1)
    lose(world, restarted)
    options = {"groups_per_call": 1, "read": lambda: make_arrays(value)}
    assert_sampled(client, requests, SAMPLING, version=version, **options)
    assert steady.engine.num_staged == 1
    if value == 1.0:
        assert restarted.engine.num_yielded >= 3
        assert (
            client.lines[-1] == f"rollout replica {restarted.address} has weights {version} again"
        )
    else:
        assert restarted.engine.num_yielded == 0
        assert "the weights read again have version" in client._replicas[1].error


@pytest.mark.parametrize("all_lost", [False, True])
def test_two_calls_at_once_send_lost_weights_once(world, all_lost):
    """The second call would wait until the first has ended: a commit waits for running calls."""
    steady, restarted = (world.replica(FakeScript(delay_s=0.05)) for _ in range(2))
    client = world.client(*([restarted] if all_lost else [steady, restarted]))
    version, requests = sync(client), make_requests(40, 1)
    lose(world, restarted)

    def generate():
        found = client.generate(
            requests,
            SAMPLING,
            version=version,
            groups_per_call=4,
            read=lambda: make_arrays(1.0),
            resync=lambda: sync(client),
        )
        assert_complete(list(found), requests, SAMPLING, version=version)

    before = restarted.engine.num_staged
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(generate) for _ in range(2)]:
            call.result()
    assert restarted.engine.num_staged == before + 1


@pytest.mark.slow
def test_nothing_reads_the_weights_after_the_responses(world):
    """The trainer's next update overwrites them."""
    steady, restarted = world.replica(FakeScript(delay_s=0.05)), world.replica()
    client = world.client(steady, restarted)
    version = sync(client)
    lose(world, restarted)
    reads = []

    def read():
        for array in itertools.cycle(make_arrays()):
            reads.append(time.monotonic())
            time.sleep(0.1)
            yield array

    rollouts = client.generate(
        make_requests(200, 1), SAMPLING, version=version, groups_per_call=1, read=read
    )
    for _ in rollouts:
        if reads:
            break
    rollouts.close()
    closed = time.monotonic()
    time.sleep(0.3)
    assert reads and max(reads) < closed
    assert sync(client, step=1).step == 1
    assert len(list(client.generate(make_requests(), SAMPLING, version=sync(client)))) == 8


# Replicas that join and leave.


def test_replicas_join_and_leave_between_two_syncs(world):
    first, second = world.replica(), world.replica(is_deterministic=True)
    wrong, other_run = world.replica(vocab_size=7), world.replica()
    sync(world.client(other_run, run_id="another"))
    listed = [first.address]

    def check(description):
        if description.version and description.version.run_id != "run":
            raise UserError("it belongs to another run.")

    client = world.client(first, find_addresses=lambda: listed, check=check)
    requests = make_requests(4, 2)

    def sampled_by():
        version = sync(client)
        assert_sampled(client, requests, SAMPLING, version=version)
        return {r.engine.num_yielded for r in (first, second)}, client.lines[:]

    assert sampled_by() == ({8, 0}, [])
    listed += [wrong.address, other_run.address, "127.0.0.1:1", second.address]
    listed += [second.address.replace("127.0.0.1", "localhost"), "192.0.2.1:1"]
    yielded, lines = sampled_by()
    assert yielded == {12, 4}
    expected = [
        f"{second.address} joins",
        "192.0.2.1:1' is not loopback",
        f"{wrong.address} cannot be used: .*has vocab_size=7",
        f"{other_run.address} cannot be used: it belongs to another run",
        "127.0.0.1:1 cannot be used: UNAVAILABLE",
        "localhost:.* cannot be used: another address leads to the same replica",
    ]
    assert len(lines) == len(expected)
    for line in expected:
        assert any(re.search(line, found) for found in lines), line
    del client.lines[:], listed[0]
    yielded, lines = sampled_by()
    assert yielded == {12} and lines == [
        f"rollout replica {first.address} leaves; 1 are left"
    ]  # the wrong ones were reported once
    assert list(client.figures) == [1]


def test_a_list_that_cannot_be_used_changes_nothing(world):
    replica, listed = world.replica(), ["127.0.0.1:1"]

    def find():
        if not listed:
            raise UserError("rollout.addresses_file=x has no address.")
        return listed

    client = world.client(replica, find_addresses=find)
    sync(client)
    assert "127.0.0.1:1 cannot be used" in client.lines[0]
    sync(client)
    assert client.lines[1:] == ["none of the replicas named can be used; the present ones stay."]
    del client.lines[:], listed[:]
    sync(client)
    assert client.lines == ["rollout.addresses_file=x has no address. The present replicas stay."]
    assert sync(client).step == 0 and len(client.lines) == 1


def test_a_replica_that_comes_back_with_another_model_is_left_out(world, start_process):
    process, address = start_process()
    good = world.replica()
    client = world.client(good, address, find_addresses=lambda: [good.address, address])
    sync(client)
    process.kill()
    process.wait()
    assert len(list(client.generate(make_requests(), SAMPLING, version=sync(client)))) == 8
    assert "is set aside" in "".join(client.lines)


# Figures.


def test_figures_of_each_replica(world):
    fast, slow = world.replica(FakeScript(delay_s=0.01)), world.replica(FakeScript(delay_s=0.1))
    client = world.client(fast, slow)
    version, requests = sync(client), make_requests(8, 1)
    rollouts = list(client.generate(requests, SAMPLING, version=version))
    of_fast, of_slow = client.figures[0], client.figures[1]
    for replica, figures in ((fast, of_fast), (slow, of_slow)):
        own = [r for r in rollouts if r.replica_id == world.caller(replica).describe().replica_id]
        assert figures.responses == len(own) == 4
        assert figures.tokens == sum(len(r.response_ids) for r in own)
        assert figures.failures == 0
    assert 0.04 < of_fast.busy_s < of_slow.busy_s and of_slow.busy_s > 0.39


def test_several_calls_count_at_once():
    counters, interval = Counters(), sys.getswitchinterval()

    def count():
        for _ in range(20_000):
            counters.add(token_bytes=1, state_bytes=2)

    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                pool.submit(count)
    finally:
        sys.setswitchinterval(interval)
    assert (counters["token_bytes"], counters["state_bytes"]) == (60_000, 120_000)


def test_busy_time_counts_calls_at_once_only_once(monkeypatch):
    clock = iter([10.0, 11.0, 14.0, 15.0, 16.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    load = Load()
    load.begin()  # 10
    load.begin()
    assert load.figures.busy_s == 1.0  # 11
    load.end()
    load.end()  # 14
    load.begin()  # 15
    load.add(7)
    assert load.figures == Figures(responses=1, tokens=7, busy_s=5.0)  # 16


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_log_has_figures_of_several_replicas(monkeypatch, num_replicas):
    now, figures = [100.0], dict.fromkeys(range(num_replicas), Figures())
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    peers = types.SimpleNamespace(index=0, gather=lambda phase, own: [own])
    client = types.SimpleNamespace(figures=figures)
    count = made(ReplicaFigures, client=client, peers=peers, sampling=(0,))
    count()
    figures[0] = Figures(responses=3, tokens=40, busy_s=2.0)
    now[0] = 104.0
    found = count()
    if num_replicas == 1:
        assert found == {}
        return
    assert found == {
        "rollout/replica/0/tokens_per_s": 20.0,
        "time/replica/0/busy_fraction": 0.5,
        "time/replica/1/busy_fraction": 0.0,
    }
    now[0] = 105.0
    assert set(count().values()) == {0.0}
