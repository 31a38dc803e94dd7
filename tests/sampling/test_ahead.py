"""What a run that samples ahead needs."""

import concurrent.futures
import dataclasses
import itertools
import time

import pytest

from semrl_jax.models import Lora, tensor_specs
from semrl_jax.sampling import ahead, choosing_source, replicas
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.scoring import Scored
from semrl_jax.sampling.source import Sample
from semrl_jax.sampling.weights import WeightSync
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError
from semrl_jax.training.probes.staleness import staleness
from semrl_jax.types import VersionSpan, WeightVersion
from tests.cases import refused
from tests.fixtures import make_scored
from tests.rollout.fake_engine import FakeEngine
from tests.sampling.parts import ARCHITECTURE, made, sampler_of
from tests.tiny import tiny_config


@pytest.fixture
def config():
    config = tiny_config()
    config.rollout.max_staleness = 2
    return config


def test_memory_that_the_queue_needs_is_compared_with_what_is_free(config, monkeypatch):
    copy = sum(spec.num_bytes for spec in tensor_specs(ARCHITECTURE, config.model.compute_dtype))
    needed = 5 * copy + 2 * 16 * config.rollout.max_response_tokens * choosing_source.TOKEN_BYTES
    monkeypatch.setattr(choosing_source, "available_bytes", lambda: needed)
    choosing_source.check_memory(config, ARCHITECTURE)
    monkeypatch.setattr(choosing_source, "available_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match=r"max_staleness=2 keeps .* GiB .*5 copies .*2 batches"):
        choosing_source.check_memory(config, ARCHITECTURE)
    lora = Lora(("query",), 1, 1.0)  # 8 + 8 float32 numbers: the copies share the base
    monkeypatch.setattr(choosing_source, "available_bytes", lambda: needed - 4 * copy + 5 * 64)
    choosing_source.check_memory(config, ARCHITECTURE, lora)
    with pytest.raises(UserError):
        choosing_source.check_memory(config, ARCHITECTURE)
    monkeypatch.setattr(choosing_source, "available_bytes", lambda: needed - 4 * copy + 5 * 64 - 1)
    with pytest.raises(UserError):
        choosing_source.check_memory(config, ARCHITECTURE, lora)
    config.rollout.max_staleness = 0
    choosing_source.check_memory(config, ARCHITECTURE)


def test_a_correction_needs_the_log_probabilities_of_the_engine(config):
    replica = FakeEngine(max_prompts=64, max_response_tokens=64).describe()
    silent = dataclasses.replace(replica, logprob_kinds=())
    replicas._check_limits(dataclasses.replace(replica, logprob_kinds=("sampling",)), config)
    refused(r"no log-probabilities, .* corrects by 'token'", replicas._check_limits, silent, config)
    config.algorithms.importance.level_ahead = "none"
    replicas._check_limits(silent, config)


def test_staleness_is_that_of_the_oldest_token():
    def of_steps(*steps):
        item = make_scored()
        spans = tuple(
            VersionSpan(WeightVersion("run", "attempt", step, "digest"), i, i + 1)
            for i, step in enumerate(steps)
        )
        rollout = dataclasses.replace(item.rollout, versions=spans)
        return dataclasses.replace(item, rollout=rollout)

    found = staleness([of_steps(4, 5), of_steps(5), of_steps(3, 5)], 5)
    assert found == {"rollout/staleness": 1.0, "rollout/staleness/max": 2.0}
    of_tokens = staleness([of_steps(4, 5), of_steps(5), of_steps(3, 5)], 5, by_token=True)
    assert of_tokens == found | {"rollout/staleness/tokens": 3 / 5}


class Instant:
    """Samples for the other thread, and takes no time."""

    def send(self, weights):
        pass

    def next(self, step, position, clock):
        return Sample(Scored(()), (0, step + 1), {})


def ahead_of(**parts):
    """A source that samples one step ahead, and takes no time for it."""
    names = {"lag": 1, "ready": 1, "num_steps": 9, "count": dict}
    return made(ahead.Ahead, **names | {"thread_sampler": Instant(), "batches": Instant()} | parts)


def test_an_evaluation_is_no_idle_time_and_keeps_no_weights(monkeypatch):
    def evaluated(self, requests, references):
        time.sleep(0.1)
        return Scored(())

    def sent(self, weights):
        self.weights = weights

    monkeypatch.setattr(Sampler, "sample", evaluated)
    monkeypatch.setattr(Sampler, "send", sent)
    monkeypatch.setattr(WeightSync, "read", lambda self, params: iter(()))
    idle_s = []
    with ahead_of(sampler=sampler_of()) as source:
        for step in range(3):
            source.offer(({"layers": {}}, {"layers": {}}), step)
            for _ in range(2):  # two ways of sampling
                source.sample([], {})
                assert source.sampler.weights.step == step
            time.sleep(0.1)
            found = source.next(step, (0, 0), Clock())
            idle_s.append(found.scalars["time/replicas_idle_s"])
            assert source.sampler.weights is None  # the arrays of these weights are not kept
    # The batch of step 2 begins in step 1, 0.2 s and 0.1 s after the end of that of step 1.
    assert idle_s[0] < 0.05 and idle_s[1] < 0.05 and 0.1 <= idle_s[2] < 0.25


def test_a_row_has_the_events_of_its_batch_and_of_the_evaluations_before(monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, requests, references: Scored(()))
    monkeypatch.setattr(Sampler, "send", lambda self, weights: None)
    monkeypatch.setattr(WeightSync, "read", lambda self, params: iter(()))
    numbers, rows = itertools.count(), []
    with ahead_of(sampler=sampler_of(), count=lambda: {"events": 10.0 ** next(numbers)}) as source:
        for step in range(3):
            source.offer(({"layers": {}}, {"layers": {}}), step)
            if step == 1:
                source.sample([], {})  # after the batch of step 1, before that of step 2
            rows.append(source.next(step, (0, 0), Clock()).scalars["events"])
            while not all(future.done() for future in source._begun.values()):
                time.sleep(0.001)
    assert rows == [1, 110, 1000]


def awaiting(peers):
    """A source that can only wait."""
    return ahead_of(sampler=sampler_of(peers=peers))


def failed(error):
    future = concurrent.futures.Future()
    future.set_exception(error)
    return future


def test_an_error_of_one_process_alone_does_not_wait_for_the_others(pair):
    """Their threads wait for this one's; `Peers.fail` ends them."""
    with pytest.raises(MemoryError):
        awaiting(pair[0])._await([concurrent.futures.Future(), failed(MemoryError())], None)


def test_an_error_that_all_share_is_raised_where_the_batch_is_taken(pair):
    error = UserError("too few groups")
    error.agreed = True
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(awaiting(peers)._await, [failed(error)], None) for peers in pair]
        assert [wait.result(timeout=10) for wait in waits] == [None, None]
