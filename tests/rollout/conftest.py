"""Replicas and clients of the rollout tests: real servers, real local channels, a fake engine."""

import contextlib
import json
import pathlib
import subprocess
import sys
import types

import grpc
import numpy as np
import pytest

from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.types import HiddenStateParams, SampleRequest, SamplingParams
from tests.rollout.caller import Caller, make_stub
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine, FakeScript, fake_rollout

ROOT = pathlib.Path(__file__).parents[2]
TOKEN = "a-token-for-tests"
FAKE = {"model_hash": "fake-model", "tokenizer_hash": "fake-tokenizer", "vocab_size": 101}


def make_requests(num_groups=4, group_size=2, *, first_seed=0):
    """Group g has the prompt [g + 1, 2]; seeds count up."""
    return [
        SampleRequest(
            sample_id=f"{group}/{index}",
            group_id=group,
            sample_index=index,
            prompt_ids=np.array([group + 1, 2], np.int32),
            seed=first_seed + group * group_size + index,
        )
        for group in range(num_groups)
        for index in range(group_size)
    ]


def make_arrays(value=1.0):
    return [np.full(spec.shape, value + i, np.float32) for i, spec in enumerate(FAKE_SPECS)]


def assert_complete(rollouts, requests, sampling, states=None, *, version, hidden_size=8):
    """Checks that every response came once, with the values of the fake engine's closed form."""
    assert sorted(r.sample_id for r in rollouts) == sorted(r.sample_id for r in requests)
    by_id = {r.sample_id: r for r in rollouts}
    for request in requests:
        actual = by_id[request.sample_id]
        expected = fake_rollout(
            request,
            sampling,
            states or HiddenStateParams(),
            version,
            vocab_size=101,
            hidden_size=hidden_size,
        )
        np.testing.assert_array_equal(actual.prompt_ids, request.prompt_ids)
        np.testing.assert_array_equal(actual.response_ids, expected.response_ids)
        np.testing.assert_array_equal(actual.rollout_logprobs, expected.rollout_logprobs)
        np.testing.assert_array_equal(actual.rollout_raw_logprobs, expected.rollout_raw_logprobs)
        assert actual.finish_reason == expected.finish_reason
        assert actual.versions == expected.versions
        assert actual.layers == expected.layers
        for field in ("hidden_states", "prompt_states"):
            found, known = getattr(actual, field), getattr(expected, field)
            if known is None:
                assert found is None
            else:
                assert found.dtype == known.dtype
                np.testing.assert_array_equal(found.astype(np.float32), known.astype(np.float32))


def assert_sampled(client, requests, sampling, states=None, *, version, hidden_size=8, **options):
    """Generates with the client; checks the responses as `assert_complete`, and returns them."""
    asked = [states] if states is not None else []
    rollouts = list(client.generate(requests, sampling, *asked, version=version, **options))
    assert_complete(rollouts, requests, sampling, states, version=version, hidden_size=hidden_size)
    return rollouts


def modules_of(code):
    """Names of all modules and packages that a process has loaded after running the code."""
    code = f"{code}; import sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.fixture
def start_process():
    """Starts fake replicas in separate processes; returns (process, address)."""
    processes = []

    def start(**settings):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rollout.replica_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        process.stdin.write(json.dumps({"token": TOKEN} | settings) + "\n")
        process.stdin.flush()
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def world():
    """Starts replicas and clients, and closes them all at the end."""
    with contextlib.ExitStack() as stack:

        def replica(script=None, stall_timeout_s=600.0, max_calls=64, port=0, **settings):
            engine = FakeEngine(script=script or FakeScript(), **settings)
            embedded = EmbeddedReplica(
                engine, token=TOKEN, stall_timeout_s=stall_timeout_s, max_calls=max_calls, port=port
            )
            stack.callback(embedded.close, 0.0)
            embedded.engine = engine
            return embedded

        def client(*replicas, connect=True, **settings):
            lines = []
            settings = {
                "run_id": "run",
                "attempt_id": "attempt",
                "connect_timeout_s": 10.0,
                "sync_timeout_s": 10.0,
                "generate_timeout_s": 20.0,
                "stall_timeout_s": 5.0,
                "progress": lines.append,
            } | settings
            addresses = [getattr(r, "address", r) for r in replicas]
            made = stack.enter_context(RolloutClient(addresses, TOKEN, **settings))
            made.lines = lines
            if connect:
                made.connect(**FAKE)
            return made

        def local(script=None, engine=None, **settings):
            """A client of a fake engine in this process."""
            engine = FakeEngine(script=script or FakeScript(), **engine or {})
            made = client(local=LocalReplica(engine), **settings)
            made.engine = engine
            return made

        def stub(replica, token=TOKEN):
            channel = stack.enter_context(grpc.insecure_channel(replica.address))
            return make_stub(channel), {"timeout": 10.0, "metadata": token_metadata(token)}

        def caller(replica):
            return stack.enter_context(Caller(replica.address, TOKEN))

        yield types.SimpleNamespace(
            replica=replica, client=client, local=local, stub=stub, caller=caller, stack=stack
        )


@pytest.fixture(params=["a server", "this process"])
def connected(request, world):
    """Makes a client of one fake engine, which the client has as `engine`."""

    def remote(script=None, **settings):
        replica = world.replica(script)
        made = world.client(replica, **settings)
        made.engine = replica.engine
        return made

    return remote if request.param == "a server" else world.local


@pytest.fixture
def sampling():
    return SamplingParams(max_tokens=16)
