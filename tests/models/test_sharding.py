"""The sharding table: complete, checked, and without effect on the numbers."""

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.errors import UserError

MESHES = (
    {"replica": 8, "fsdp": 1, "sequence": 1, "tensor": 1},
    {"replica": 1, "fsdp": 8, "sequence": 1, "tensor": 1},
    {"replica": 2, "fsdp": 2, "sequence": 1, "tensor": 2},
)


@pytest.fixture
def policy():
    return models.Policy(
        models.DecoderConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
        )
    )


@pytest.mark.parametrize("shape", MESHES)
def test_mesh_changes_no_number_beyond_rounding(policy, shape):
    mesh = models.make_mesh(shape)
    params = policy.init(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 48, (8, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)
    arguments = (ids, positions, np.ones_like(ids))
    expected = jax.jit(policy.final_states)(params, *arguments)
    sharded = jax.device_put(params, models.parameter_shardings(params, mesh))
    actual = jax.jit(policy.final_states)(
        sharded, *jax.device_put(arguments, models.batch_sharding(mesh))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)  # float32 sums, reordered


def test_parameters_are_split_not_replicated(policy):
    mesh = models.make_mesh({"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 2})
    params = policy.init(jax.random.key(0))
    sharded = jax.device_put(params, models.parameter_shardings(params, mesh))
    kernel = sharded["layers"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def test_one_axis_takes_the_devices_left_over():
    mesh = models.make_mesh({"replica": 2, "fsdp": -1, "sequence": 1, "tensor": 1})
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 4, "sequence": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1, 1, 1), "needs 3 devices, but 8 are there"),
        ((3, -1, 1, 1), "needs 6 devices, but 8 are there"),
        ((-1, -1, 1, 1), "one at most is -1"),
        ((0, 1, 1, 1), "sizes are at least 1"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        models.make_mesh(dict(zip(models.AXES, sizes)))


def test_axis_that_does_not_divide_is_refused(policy):
    mesh = models.make_mesh({"replica": 1, "fsdp": 1, "sequence": 1, "tensor": 8})
    params = {"embed": {"embedding": np.zeros((50, 32), np.float32)}}
    with pytest.raises(UserError, match=r"mesh\.tensor=8 must divide the 50 rows"):
        models.parameter_shardings(params, mesh)
