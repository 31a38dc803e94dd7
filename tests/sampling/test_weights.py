"""Weight sync with two processes: one deadline for all attempts, and signals during a wait."""

import concurrent.futures
import dataclasses
import itertools
import os
import signal
import threading
import time
import types

import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.cluster.agreement import Retry
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.sampling.weights import Weights, send_together
from semrl_jax.support.errors import Preempted
from semrl_jax.types import SampleRequest, WeightVersion
from tests.fixtures import random_params
from tests.sampling.parts import ARCHITECTURE, sampler_of
from tests.tiny import tiny_config

VERSION = WeightVersion("run", "attempt", 3, "digest")


def both(*calls):
    """Runs two calls in parallel; returns their results or exceptions."""

    def caught(call):
        try:
            return call()
        except (Exception, Preempted) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [future.result(timeout=60) for future in [pool.submit(caught, c) for c in calls]]


class Losing:
    """A client whose replicas always fail after the first tensor."""

    def sync_weights(self, specs, read, step, **_):
        for _ in itertools.count():
            next(iter(read()))


@pytest.fixture
def short():
    config = tiny_config()
    config.rollout.call_timeout_s = 0.5
    return config


def test_all_attempts_to_send_weights_share_one_deadline(pair, short):
    policy = models.Policy(ARCHITECTURE)
    params, lines = random_params(policy), []
    samplers = [
        sampler_of(
            peers=peers, client=client, architecture=policy.config, config=short,
            reporter=types.SimpleNamespace(line=lines.append),
        )
        for peers, client in zip(pair, (Losing(), None))
    ]  # fmt: skip
    found = both(*(lambda one=one: one.sync_weights(params, 3) for one in samplers))
    for error in found:
        assert isinstance(error, RuntimeError), error
        assert "no replica took the weights of step 3 within rollout.call_timeout_s=0.5" in str(
            error
        )
    assert lines  # there was another attempt


def test_all_attempts_to_sample_share_one_deadline(pair, short):
    def losing(*args, **options):
        time.sleep(0.05)
        raise Retry("a replica has lost them")

    synced = []
    samplers = [
        sampler_of(
            peers=peers, config=short, weights=Weights(3, lambda: iter(()), True, version=VERSION),
            reporter=types.SimpleNamespace(line=lambda line: None),
        )
        for peers in pair
    ]  # fmt: skip
    for sampler in samplers:
        sampler.sample_here = losing
        sampler.sync.send = lambda weights: synced.append(weights.step)
    requests = [
        SampleRequest(
            sample_id="0", group_id=0, sample_index=0, prompt_ids=np.ones(1, np.int32), seed=0
        )
    ]
    found = both(*(lambda one=one: one.sample(requests, {}) for one in samplers))
    for error in found:
        assert isinstance(error, RuntimeError), error
        assert "the responses of step 3 did not come within rollout.call_timeout_s=0.5" in str(
            error
        )
    assert len(synced) >= 4


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_process_ends_both_before_the_first_gather(pair, short, signalled):
    read, stops = [], [StopRequest(60.0, 75) for _ in pair]
    stops[signalled]._signal_name = "SIGTERM"

    def arrays():
        read.append(0)
        yield 0

    senders = [
        sampler_of(short, peers=peers, client=object(), stop=stop).sync
        for peers, stop in zip(pair, stops)
    ]
    found = both(*(lambda one=one: one.send(Weights(3, arrays, True)) for one in senders))
    assert [str(error) for error in found] == ["SIGTERM", "SIGTERM"] and not read


def test_no_tensor_is_read_before_every_sampling_process_has_a_replica(pair):
    """A process that never gets a replica leaves no other process in a collective."""
    read, reached = [], threading.Event()

    def arrays(index):
        for number in range(3):
            read.append((index, number, reached.is_set()))
            yield number

    def waiting(start):
        time.sleep(0.5)
        reached.set()
        assert list(start()) == [0, 1, 2]
        return VERSION

    def ready(start):
        list(start())
        return VERSION

    stops = StopRequest(60.0, 75), StopRequest(60.0, 75)
    found = both(
        lambda: send_together(pair[0], stops[0], ready, arrays(0)),
        lambda: send_together(pair[1], stops[1], waiting, arrays(1)),
    )
    assert found == [VERSION, VERSION]
    assert len(read) == 6 and all(late for _, _, late in read)
    read.clear()

    def failing(start):
        raise KeyError("no replica")

    found = both(
        lambda: send_together(pair[0], stops[0], ready, arrays(0)),
        lambda: send_together(pair[1], stops[1], failing, arrays(1)),
    )
    assert "process 1 failed in phase 'await_replicas'" in str(found[0]) and not read
    assert isinstance(found[1], KeyError)


def test_all_tensors_are_read_even_if_a_replica_fails(pair):
    read = []

    def arrays(index):
        for number in range(3):
            read.append((index, number))
            yield number

    def losing(start):
        next(iter(start()))
        start()

    stops = StopRequest(60.0, 75), StopRequest(60.0, 75)
    found = both(
        lambda: send_together(pair[0], stops[0], losing, arrays(0)),
        lambda: send_together(pair[1], stops[1], None, arrays(1)),
    )
    assert isinstance(found[0], Retry) and found[1] is None
    assert sorted(read) == [(index, number) for index in range(2) for number in range(3)]


def test_a_signal_ends_a_wait_for_a_replica_in_both_processes(pair):
    """The main thread waits; the signal goes to the other process."""
    others = []
    pair[1].on_stop = lambda: others.append("stop")
    stop, stopped = StopRequest(60.0, 75, forward=pair[0].stop_all), StopRequest(60.0, 75)
    pair[0].on_stop = stop.request
    with concurrent.futures.ThreadPoolExecutor(1) as pool, stop.installed():
        other = pool.submit(lambda: send_together(pair[1], stopped, None, iter([1])))
        threading.Timer(0.3, pair[1].stop_all).start()
        began = time.monotonic()
        with pytest.raises(Preempted):
            send_together(pair[0], stop, lambda start: time.sleep(30), iter([1]))
        assert time.monotonic() - began < 10
        assert isinstance(other.exception(timeout=10), Preempted)
    deadline = time.monotonic() + 5
    while not others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert others == ["stop"]  # forwarded by the process that got the signal


def test_a_signal_during_a_gather_takes_effect_after_it(pair):
    stop, read = StopRequest(60.0, 75), []

    def arrays():
        for number in range(3):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            read.append(number)
            yield number

    with concurrent.futures.ThreadPoolExecutor(1) as pool, stop.installed():
        other = pool.submit(
            lambda: send_together(pair[1], StopRequest(60.0, 75), None, iter(range(3)))
        )
        with pytest.raises(Preempted):
            send_together(pair[0], stop, lambda start: list(start()), arrays())
        assert other.result(timeout=10) is None
    assert read == [0, 1, 2]


class Holding:
    """A client of one replica; notes what it gets, and the base may be lost."""

    def __init__(self, limit=8):
        self.limit, self.has_base, self.got = limit, False, []

    def without_adapters(self, rank):
        return "" if rank <= self.limit else "replica x applies no adapters"

    def lacks_base(self):
        return not self.has_base

    def sync_weights(self, specs, read, *, step, adapter=None, read_adapter=None):
        alone = adapter is not None and self.has_base and read_adapter is not None
        arrays = list(read_adapter() if alone else read())
        expected = adapter.specs(specs) if alone else specs
        assert [array.shape for array in arrays] == [spec.shape for spec in expected]
        self.has_base = adapter is not None
        self.got.append("adapter" if alone else "base and adapter" if adapter else "merged")
        return dataclasses.replace(VERSION, step=step)


LORA = models.Lora(("query", "up"), 2, 4.0)


@pytest.fixture(scope="module")
def adapted():
    base = random_params(models.Policy(ARCHITECTURE))
    return models.adapted(LORA.init(base, 1), LORA.base(base))


def adapting(peers, client, lines):
    reporter = types.SimpleNamespace(line=lines.append)
    config = tiny_config()
    config.rollout.addresses = ("host:1",)
    return sampler_of(
        peers=peers, client=client, config=config, reporter=reporter, applied={}, base=[]
    )


def test_all_processes_read_the_base_if_one_replica_lost_it(pair, adapted):
    clients, lines = (Holding(), Holding()), []
    samplers = [adapting(peers, client, lines) for peers, client in zip(pair, clients)]
    for step, lost in enumerate((False, False, True, False)):
        clients[1].has_base &= not lost
        both(*(lambda one=one: one.sync_weights(adapted, step) for one in samplers))  # noqa: B023
    assert clients[0].got == ["base and adapter", "adapter", "base and adapter", "adapter"]
    assert clients[1].got == clients[0].got and lines == []
    clients[1].has_base = False  # after the agreement: one attempt more
    answers = iter((False, True))
    clients[1].lacks_base = lambda: next(answers)
    found = both(*(lambda one=one: one.sync_weights(adapted, 9) for one in samplers))
    assert [version.step for version in found] == [9, 9]
    assert clients[1].got[-1] == "base and adapter"
    assert "sent again: " in lines[0] and "has lost the base" in lines[0]


def test_one_replica_without_adapters_makes_all_take_merged_weights(pair, adapted):
    clients, lines = (Holding(), Holding(limit=0)), []
    samplers = [adapting(peers, client, lines) for peers, client in zip(pair, clients)]
    for step in range(2):
        both(*(lambda one=one: one.sync_weights(adapted, step) for one in samplers))  # noqa: B023
    assert clients[0].got == clients[1].got == ["merged", "merged"]
    (line,) = lines
    assert line.startswith("replica x applies no adapters, so all replicas get it merged")


def test_copies_for_another_thread_share_the_base(adapted):
    client = Holding()
    sampler = adapting(Peers(), client, [])
    first, second = (sampler.sync.copied(adapted, step) for step in range(2))
    specs = sampler.sync.specs(first.adapter)
    own = len(first.adapter.specs(specs))
    for one, other in zip(list(first.read())[:-own], second.read()):
        assert one is other
    sampler.send(first)
    sampler.send(second)
    assert client.got == ["base and adapter", "adapter"]
