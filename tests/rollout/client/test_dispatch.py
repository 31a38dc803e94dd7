"""The messages about a wait for responses."""

import dataclasses
import threading
import time
import types

import numpy as np
import pytest

from semrl_jax.rollout.client.dispatch import Dispatcher, _Unit
from semrl_jax.rollout.client.remote import RemoteReplica
from semrl_jax.rollout.client.replica import Counters, Waits
from semrl_jax.rollout.wire.codec import GenerateCall, encode_request
from semrl_jax.support import compilation
from semrl_jax.types import HiddenStateParams, SamplingParams, WeightVersion
from tests.rollout.conftest import make_requests
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FakeEngine


def compiles():
    """The state of `compilation` while a thread compiles a program since 7 seconds."""
    return {1: [compilation._Stage("decode_chunk", time.monotonic() - 7.0)]}


def test_a_replica_says_what_it_compiles(monkeypatch):
    with EmbeddedReplica(FakeEngine()) as server:
        replica = RemoteReplica(server.address, server.token, tls_ca=None)
        description = replica.describe(5.0)
        assert replica.compiling(5.0) == ""
        monkeypatch.setattr(compilation, "_running", compiles())
        assert replica.compiling(5.0) == "decode_chunk for 7 s"
        assert replica.description is description
    assert replica.compiling(5.0) == ""  # it does not answer
    replica.close()


@pytest.mark.parametrize(
    "compiling, answered, expected",
    [
        ("here", False, "compiling decode_chunk for 7 s; 8 response(s) to come"),
        ("there", True, "8 responses from rollout replica 127.0.0.1:1 (compiling prefill for 3 s)"),
        ("", False, "replica 127.0.0.1:1 (silent for 10 s; a first response may wait for "),
        ("", True, "8 responses from rollout replica 127.0.0.1:1 (silent for 10 s);"),
    ],
)
def test_report_of_a_wait_names_compilation(monkeypatch, compiling, answered, expected):
    monkeypatch.setattr(compilation, "_running", compiles() if compiling == "here" else {})
    if compiling == "there":
        monkeypatch.setattr(RemoteReplica, "compiling", lambda *_: "prefill for 3 s")
    lines = []
    call = GenerateCall(tuple(make_requests()), "sampling", "states", version=None)
    waits = Waits(generate_timeout_s=100.0, stall_timeout_s=60.0, progress=lines.append)
    replica = RemoteReplica("127.0.0.1:1", "token", tls_ca=None)
    replica.succeeded()  # took the weights
    replica.answered = {("sampling", "states" if answered else "none")}
    dispatcher = Dispatcher(
        call, lambda: [replica], Counters(), waits, threading.Event(), 0, None, None
    )
    stream = types.SimpleNamespace(replica=replica, silent_s=lambda now: 10.0)
    dispatcher._streams.append(stream)
    last_report = time.monotonic() - 11.0
    assert dispatcher._check_clocks(last_report) > last_report
    replica.close()
    assert len(lines) == 1 and expected in lines[0]


def test_a_response_does_not_look_at_all_requests_of_its_call():
    """A call of an evaluation may have 65,536 of them."""

    class Counted(set):
        num_asked = 0

        def __contains__(self, sample_id):
            self.num_asked += 1
            return super().__contains__(sample_id)

    call = GenerateCall(tuple(make_requests(250, 4)), "sampling", "states", version=None)
    dispatcher = Dispatcher(call, lambda: [], Counters(), Waits(), threading.Event(), 0, None, None)
    dispatcher._pending = pending = Counted(dispatcher._pending)
    stream = types.SimpleNamespace(unit=_Unit(call.requests), received=set(), call=call)
    stream.unit.streams.append(stream)
    dispatcher._cancel = lambda stream: pytest.fail("it has more to send")
    for request in call.requests[:-1]:
        stream.received.add(request.sample_id)
        pending.remove(request.sample_id)
        dispatcher._cancel_surplus(stream)
    assert pending.num_asked < 2 * len(call.requests)
    cancelled = []
    dispatcher._cancel = cancelled.append
    pending.clear()  # another call has sent the last one
    dispatcher._cancel_surplus(stream)
    assert cancelled == [stream]


@pytest.mark.parametrize("groups_per_call", [0, 16])
def test_calls_of_long_prompts_are_within_the_limit_of_a_message(monkeypatch, groups_per_call):
    """A later turn of 1024 episodes of 32,768 tokens would have 100 MB, and 64 are taken."""
    limit = 2**17
    monkeypatch.setattr(RemoteReplica, "max_call_bytes", limit)
    random = np.random.default_rng(0)
    requests = [
        dataclasses.replace(request, prompt_ids=random.integers(2**18, 2**21, 4000, np.int32))
        for request in make_requests(16, 2)
    ]
    # The responses of a last group share a prompt, which is sent once.
    requests += [dataclasses.replace(each, group_id=99) for each in make_requests(1, 50)]
    requests = [dataclasses.replace(each, sample_id=str(i)) for i, each in enumerate(requests)]
    version = WeightVersion("run", "attempt", 0, "digest")
    call = GenerateCall(tuple(requests), SamplingParams(8), HiddenStateParams(), version)
    replica = RemoteReplica("127.0.0.1:1", "token", tls_ca=None)
    replica.version = version
    dispatcher = Dispatcher(
        call, lambda: [replica], Counters(), Waits(), threading.Event(), groups_per_call, None, None
    )
    monkeypatch.setattr(
        Dispatcher, "_start", lambda self, replica, unit: dispatcher._queue.append(unit)
    )
    dispatcher._divide()
    replica.close()
    units = [unit.requests for unit in dispatcher._queue]
    assert [each for unit in units for each in unit] == requests
    sizes = [encode_request(call._replace(requests=tuple(each))).ByteSize() for each in units]
    assert max(sizes) < limit + 2**10 and len(units) == 5
