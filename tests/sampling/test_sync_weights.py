"""Weight sync with two processes: both gather every tensor, or neither begins."""

import concurrent.futures

import jax
import pytest

from semrl_jax import models
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.support.errors import Preempted
from semrl_jax.types import WeightVersion
from tests.sampling.parts import ARCHITECTURE, sampler_of
from tests.tiny import tiny_config


class Client:
    """Reads all arrays and counts them."""

    def __init__(self):
        self.read = []

    def sync_weights(self, specs, read, step):
        self.read.append(len(list(read())))
        return WeightVersion("run", "attempt", step, "digest")


@pytest.fixture(scope="module")
def policy():
    policy = models.Policy(ARCHITECTURE)
    return policy, policy.init(jax.random.key(0))


def sync(peers, client, policy, *, signalled):
    """Calls `Sampler.sync_weights` in one process; returns the version or the exception."""
    stop = StopRequest(60.0, 75)
    policy, params = policy
    sampler = sampler_of(
        peers=peers, client=client, architecture=policy.config, stop=stop, config=tiny_config()
    )
    if signalled:
        stop._signal_name = "SIGTERM"
    try:
        return sampler.sync_weights(params, 3)
    except Preempted as preempted:
        return preempted


def sync_pair(pair, clients, policy, signalled):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(sync, peers, client, policy, signalled=index == signalled)
            for index, (peers, client) in enumerate(zip(pair, clients))
        ]
        return [call.result(timeout=60) for call in calls]


def test_all_tensors_are_read_by_both(pair, policy):
    clients = Client(), None
    assert sync_pair(pair, clients, policy, signalled=None) == [
        WeightVersion("run", "attempt", 3, "digest"),
        None,
    ]
    assert clients[0].read == [len(models.tensor_specs(policy[0].config, "float32"))]


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_process_ends_both_before_the_first_gather(pair, policy, signalled):
    clients = Client(), Client()
    found = sync_pair(pair, clients, policy, signalled)
    assert [str(error) for error in found] == ["SIGTERM", "SIGTERM"]
    assert [client.read for client in clients] == [[], []]
