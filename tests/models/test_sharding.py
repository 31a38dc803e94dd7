"""The sharding tables: complete, checked, and without effect on the numbers."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from semrl_jax import models
from semrl_jax.models.sharding import activation_spec
from semrl_jax.planning import hlo
from tests.cases import refused
from tests.fixtures import random_params
from tests.models.caches import widened


@pytest.fixture
def policy():
    config = models.DecoderConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8,
    )  # fmt: skip
    return models.Policy(config)


def test_mesh_changes_results_only_by_rounding(policy):
    mesh = models.make_mesh({"replica": 2, "fsdp": 2, "sequence": 1, "tensor": 2})
    params = random_params(policy)
    ids = np.random.default_rng(0).integers(0, 48, (8, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)
    arguments = (ids, positions, np.ones_like(ids))
    expected = jax.jit(policy.final_states)(params, *arguments)
    sharded = jax.device_put(params, models.parameter_shardings(params, mesh))
    policy = dataclasses.replace(policy, mesh=mesh)
    rows = NamedSharding(mesh, PartitionSpec(models.DATA_AXES))
    actual = jax.jit(policy.final_states)(sharded, *jax.device_put(arguments, rows))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)  # float32 sums, reordered


def test_parameters_are_split_not_replicated(policy):
    mesh = models.make_mesh({"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 2})
    params = random_params(policy)
    sharded = jax.device_put(params, models.parameter_shardings(params, mesh))
    kernel = sharded["layers"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def test_one_axis_takes_the_remaining_devices():
    mesh = models.make_mesh({"replica": 2, "fsdp": -1, "sequence": 1, "tensor": 1})
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 4, "sequence": 1, "tensor": 1, "expert": 1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1, 1, 1), "needs 3 devices, but 8 are there"),
        ((3, -1, 1, 1), "needs 6 devices, but 8 are there"),
        ((-1, -1, 1, 1), "one at most is -1"),
        ((0, 1, 1, 1), "sizes are at least 1"),
        ((1, -1, 1, 16), "needs 16 devices, but 8 are there"),  # not 0: the axis needs one
    ],
)
def test_mesh_that_does_not_fit_is_refused(sizes, message):
    refused(message, models.make_mesh, dict(zip(models.AXES, sizes)))


def test_axis_that_does_not_divide_is_refused(policy):
    mesh = models.make_mesh({"replica": 1, "fsdp": 1, "sequence": 1, "tensor": 8})
    params = {"embed": {"embedding": np.zeros((50, 32), np.float32)}}
    refused(r"mesh\.tensor=8 must divide the 50 rows", models.parameter_shardings, params, mesh)


def mesh_of(*sizes):
    return models.make_mesh(dict(zip(models.AXES, sizes)), jax.devices()[: int(np.prod(sizes))])


def test_activation_is_not_split_over_axes_that_do_not_divide():
    mesh = mesh_of(2, 2, 1, 2)
    whole = PartitionSpec(models.DATA_AXES, "sequence", "tensor", None)
    assert activation_spec("heads", (8, 3, 4, 8), mesh) == whole
    few = PartitionSpec(None, "sequence", None, None)
    assert activation_spec("heads", (6, 3, 3, 8), mesh) == few


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ((1, 1, 1, 8), {}, r"mesh\.tensor=8 must divide num_heads=4; 1, 2, 4 fit\."),
        ((1, 1, 1, 4), {"intermediate_size": 66}, r"intermediate_size=66; 1, 2 fit\."),
        ((1, 1, 1, 2), {"vocab_size": 37}, r"vocab_size=37; 1 fit\."),
        ((1, 8, 1, 1), {"hidden_size": 36}, r"mesh\.fsdp=8 must divide hidden_size=36"),
    ],
)
def test_a_mesh_that_does_not_split_the_model_is_refused(policy, sizes, change, message):
    config = dataclasses.replace(policy.config, **change)
    refused(message, models.check_mesh, config, mesh_of(*sizes))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (2, 1, 2, 2), (1, 8, 1, 1), (1, 1, 8, 1)])
def test_every_accepted_mesh_can_be_used(policy, sizes):
    mesh = mesh_of(*sizes)
    models.check_mesh(policy.config, mesh)
    models.parameter_shardings(policy.shapes(), mesh)


def cached_tokens(policy, params):
    """Final states of the last prompt token and of the next, and the compiled decode."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 48, (4, 6)).astype(np.int32)
    segments = np.ones_like(ids)
    segments[1, :3] = 0
    positions = np.maximum(np.cumsum(segments, 1) - 1, 0).astype(np.int32)
    first, _, cache, *_ = jax.jit(policy.prefill)(params, ids, positions, segments)
    step = (params, ids[:, 0], positions[:, -1] + 1, np.int32(6), widened(cache, 2))
    decode = jax.jit(policy.decode).lower(*step).compile()
    second, _, cache, *_ = decode(*step)
    return np.stack([first, second]), cache, decode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "heads_of_a_device"),
    [(2, 1), (4, 2)],  # 2 kv heads: over 4 devices all of them are everywhere
)
def test_cached_decoding_on_a_tensor_axis(policy, tensor, heads_of_a_device):
    params = policy.init(jax.random.key(0))
    expected, *_ = cached_tokens(policy, params)
    mesh = mesh_of(1, 1, 1, tensor)
    sharded = jax.device_put(params, models.parameter_shardings(params, mesh))
    actual, cache, decode = cached_tokens(dataclasses.replace(policy, mesh=mesh), sharded)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)  # float32 sums, reordered
    for keys, values in zip(cache.keys, cache.values):
        for array in (keys, values):  # 8 columns, heads of width 8
            assert array.addressable_shards[0].data.shape == (4, heads_of_a_device, 8, 8)
    moved = [
        math.prod(shape)
        for found in hlo.read(decode.as_text()).collectives
        for _, shape in found.arrays
    ]
    assert max(moved) == 4 * 32  # states of one token, never the cache


def test_parts_in_the_memory_of_hosts_are_gathered_from_the_devices(monkeypatch):
    """Compiled for a TPU slice, a gather from host to host is a collective between slices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host")
    array = jax.device_put(np.arange(4.0), sharding)
    kinds = []

    def gathered(leaf, tiled):
        kinds.append(leaf.sharding.memory_kind)
        return np.zeros(leaf.shape)

    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    monkeypatch.setattr(type(array), "is_fully_addressable", False)
    models.to_host(array)
    assert kinds == ["device"]
