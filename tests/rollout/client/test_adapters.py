"""Which replicas get the base of an adapter, and which the adapter alone."""

import re

import numpy as np
import pytest

from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.support.errors import UserError
from semrl_jax.types import Adapter, SamplingParams, TensorSpec, manifest_digest
from tests.rollout.conftest import assert_sampled, make_requests
from tests.rollout.server.test_service import refusal, update_messages

SPECS = [
    TensorSpec("embed.weight", (16, 8), "float32"),
    TensorSpec("model.layers.0.mlp.up_proj.weight", (6, 8), "float32"),
    TensorSpec("model.layers.0.mlp.down_proj.weight", (8, 6), "float32"),
]
ADAPTER = Adapter(2, ("mlp.up_proj",))
OWN = ADAPTER.specs(SPECS)
ENGINE = {"specs": SPECS, "max_adapter_rank": 4}
SAMPLING = SamplingParams(16)
BASE_BYTES, OWN_BYTES = (sum(spec.num_bytes for spec in specs) for specs in (SPECS, OWN))


def arrays(specs, value):
    return [np.full(spec.shape, value + i, np.float32) for i, spec in enumerate(specs)]


class Run:
    """The weights that a run sends: a base, and in step s an adapter with values of s."""

    def __init__(self, client, base=1.0, adapter=ADAPTER):
        self.client, self.base, self.adapter = client, base, adapter
        self.read = []  # what was read, in order

    def weights(self, step):
        self.read.append("all")
        return [*arrays(SPECS, self.base), *arrays(self.adapter.specs(SPECS), step)]

    def adapter_alone(self, step):
        self.read.append("adapter")
        return arrays(self.adapter.specs(SPECS), step)

    def sync(self, step):
        return self.client.sync_weights(
            SPECS + self.adapter.specs(SPECS), lambda: self.weights(step), step=step,
            adapter=self.adapter, read_adapter=lambda: self.adapter_alone(step),
        )  # fmt: skip

    def sent(self, step):
        """The version of a step, and the bytes that were sent."""
        before = self.client.counters["weight_bytes"]
        return self.sync(step), self.client.counters["weight_bytes"] - before


def assert_serves(replica, step, base=1.0, adapter=ADAPTER):
    specs = SPECS + adapter.specs(SPECS)
    expected = [*arrays(SPECS, base), *arrays(adapter.specs(SPECS), step)]
    assert replica.engine.weights.keys() == {spec.name for spec in specs}
    for spec, array in zip(specs, expected):
        np.testing.assert_array_equal(replica.engine.weights[spec.name], array)


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "chunks"])
def test_the_base_goes_once_and_again_to_a_replica_that_lost_it(world, shared):
    replicas = [world.replica(**ENGINE) for _ in range(2)]
    client = world.client(*replicas, share_memory=shared)
    run = Run(client)
    first, num_bytes = run.sent(0)
    assert num_bytes == 2 * (BASE_BYTES + OWN_BYTES)
    version, num_bytes = run.sent(1)
    assert num_bytes == 2 * OWN_BYTES and run.read == ["all", "adapter"]
    assert version.digest != first.digest and run.sent(0)[0] == first  # whichever way it comes
    replicas[0].close(0.0)
    port = int(replicas[0].address.rpartition(":")[2])
    again = world.replica(**ENGINE, port=port)
    version, num_bytes = run.sent(3)
    assert num_bytes == BASE_BYTES + 2 * OWN_BYTES and run.read[-1] == "all"
    for replica in (again, replicas[1]):
        assert_serves(replica, 3)
    assert_sampled(client, make_requests(), SAMPLING, version=version)
    assert client.counters["replica_failures"] == 0


def test_another_rank_other_modules_and_merged_weights(world):
    replica = world.replica(**ENGINE)
    run = Run(world.client(replica))
    run.sync(0)
    for step, adapter in enumerate((Adapter(3, ADAPTER.modules), Adapter(1, ("mlp.down_proj",)))):
        run.adapter = adapter
        _, num_bytes = run.sent(step)
        assert num_bytes == sum(spec.num_bytes for spec in adapter.specs(SPECS))
        assert_serves(replica, step, adapter=adapter)
    run.client.sync_weights(SPECS, lambda: arrays(SPECS, 9.0), step=5)
    assert replica.engine.weights.keys() == {spec.name for spec in SPECS}
    run.adapter = ADAPTER
    assert run.sent(6)[1] == BASE_BYTES + OWN_BYTES  # the merged weights were no base
    run.base = 4.0
    run.client.forget_base()
    run.sync(7)
    assert_serves(replica, 7, base=4.0)


def test_a_sleeping_replica_and_one_of_this_process_lose_the_base(world):
    replica = world.replica(**ENGINE)
    run = Run(world.client(replica, in_turns=True))
    run.sync(0)
    run.client.release(weights=True)
    assert run.sent(1)[1] == BASE_BYTES + OWN_BYTES
    local = world.local(engine=ENGINE)
    run = Run(local)
    assert [run.sent(step)[1] for step in range(2)] == [BASE_BYTES + OWN_BYTES, OWN_BYTES]
    local.release(weights=True)
    assert run.sent(2)[1] == BASE_BYTES + OWN_BYTES and run.read == ["all", "adapter", "all"]
    assert_serves(local, 2)
    # A pass over everything, although the replica holds the base.
    local.sync_weights(
        SPECS + OWN, lambda: run.weights(3), step=3, adapter=ADAPTER, read_adapter=None
    )
    assert_serves(local, 3)


def test_a_replica_that_started_again_gets_all_in_a_running_call(world):
    replicas = [world.replica(**ENGINE) for _ in range(2)]
    client = world.client(*replicas)
    run = Run(client)
    run.sync(0)
    version = run.sync(1)
    replicas[0].close(0.0)
    again = world.replica(**ENGINE, port=int(replicas[0].address.rpartition(":")[2]))
    replicas[1].engine.script.delay_s = 0.1  # the call lasts until the other one is back
    found = client.generate(
        make_requests(16), SAMPLING, version=version, groups_per_call=1,
        read=lambda: run.weights(1),
    )  # fmt: skip
    assert len(list(found)) == 32
    assert_serves(again, 1)
    assert any("has weights run/attempt/1" in line for line in client.lines)


def test_a_replica_without_adapters(world):
    old = world.replica(specs=SPECS)
    client = world.client(world.replica(**ENGINE), old)
    assert f"{old.address} (fake) applies no adapters" in client.without_adapters(2)
    with pytest.raises(UserError, match=r"applies no adapter of rank 2, .*; start"):
        Run(client).sync(0)
    few = world.client(world.replica(specs=SPECS, max_adapter_rank=1))
    assert few.without_adapters(1) == ""
    assert few.without_adapters(2).endswith("applies no adapters of a rank above 1")


def test_a_replica_without_adapters_cannot_join(world):
    first, old = world.replica(**ENGINE), world.replica(specs=SPECS)
    addresses = [first.address]
    client = world.client(first, find_addresses=lambda: addresses)
    run = Run(client)
    run.sync(0)
    addresses.append(old.address)
    run.sync(1)
    assert_serves(first, 1)
    (line,) = client.lines
    assert re.search(r"applies no adapter of rank 2, and the run sends one unmerged; start", line)


def test_what_a_replica_refuses(world):
    replica = world.replica(**ENGINE)
    stub, options = world.stub(replica)
    run = Run(world.client(replica))
    run.sync(0)
    served = dict(replica.engine.weights)
    base = manifest_digest(
        SPECS, [codec.checksum(codec.as_bytes(a)).digest() for a in arrays(SPECS, 1.0)]
    )

    def refused(change, specs=OWN):
        messages = update_messages(arrays(specs, 5.0), specs=specs, step=1)
        begin = messages[0].begin
        begin.adapter.CopyFrom(pb.Adapter(rank=2, modules=ADAPTER.modules))
        begin.base_digest = base
        change(begin)
        code, details = refusal(stub.UpdateWeights, iter(messages), **options)
        for name, array in served.items():
            np.testing.assert_array_equal(replica.engine.weights[name], array)
        return code.name, details

    code, details = refused(lambda begin: setattr(begin, "base_digest", "0" * 64))
    assert code == "FAILED_PRECONDITION" and "does not hold the base '000000000000'" in details
    code, details = refused(lambda begin: begin.ClearField("adapter"))
    assert code == "INVALID_ARGUMENT" and "not of this model" in details
    code, details = refused(lambda begin: setattr(begin.adapter, "rank", 5))
    assert code == "RESOURCE_EXHAUSTED" and "adapter.rank=5 must be 1 to 4" in details
    code, details = refused(lambda begin: begin.adapter.modules.append("mlp.gate_proj"))
    assert code == "INVALID_ARGUMENT" and "mlp.gate_proj cannot have adapters" in details
    code, details = refused(lambda begin: begin.adapter.ClearField("modules"))
    assert code == "INVALID_ARGUMENT" and "must name at least one module" in details
    code, details = refused(lambda begin: None, OWN[:1])
    assert code == "INVALID_ARGUMENT" and "missing: model.layers.0.mlp.up_proj.lora_B" in details
    # The digest is of the adapter alone: of another base than the one that the replica holds.
    code, details = refused(lambda begin: None)
    assert code == "DATA_LOSS" and "the manifest's digest is" in details
