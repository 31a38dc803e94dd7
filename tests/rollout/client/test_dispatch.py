"""The messages about a wait for responses."""

import threading
import time
import types

import pytest

from semrl_jax import compilation
from semrl_jax.rollout.client.dispatch import _Dispatcher
from semrl_jax.rollout.client.replica import Counters, Replica, Waits
from semrl_jax.rollout.wire.codec import GenerateCall
from tests.rollout.conftest import make_requests


@pytest.mark.parametrize(
    "compiling, answered, expected",
    [
        (True, False, "compiling decode_chunk; 8 response(s) to come"),
        (False, False, "replica 127.0.0.1:1 (silent for 10 s; a first response may wait for "),
        (False, True, "8 responses from rollout replica 127.0.0.1:1 (silent for 10 s);"),
    ],
)
def test_report_of_a_wait_names_compilation(monkeypatch, compiling, answered, expected):
    monkeypatch.setattr(compilation, "_running", {1: "decode_chunk"} if compiling else {})
    lines = []
    call = GenerateCall(tuple(make_requests()), "sampling", "states", version=None)
    waits = Waits(generate_timeout_s=100.0, stall_timeout_s=60.0, progress=lines.append)
    replica = Replica("127.0.0.1:1", "token", tls_ca=None)
    replica.succeeded()  # took the weights
    replica.answered = {("sampling", "states" if answered else "none")}
    dispatcher = _Dispatcher(
        call, lambda: [replica], Counters(), waits, threading.Event(), 0, None, None
    )
    stream = types.SimpleNamespace(replica=replica, silent_s=lambda now: 10.0)
    dispatcher._streams.append(stream)
    last_report = time.monotonic() - 11.0
    assert dispatcher._check_clocks(last_report) > last_report
    replica.close()
    assert len(lines) == 1 and expected in lines[0]
