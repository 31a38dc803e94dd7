"""What is read from HLO text, on programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from benchmarks import collectives
from semrl_jax import models
from semrl_jax.planning import hlo

MESH_SIZES = {"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 2}


def program(body, in_specs, out_specs, *shapes):
    """The compiled program of a body on each device."""
    mapped = jax.shard_map(
        body, mesh=models.make_mesh(MESH_SIZES), in_specs=in_specs, out_specs=out_specs
    )
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo.read(jax.jit(mapped).lower(*arguments).compile().as_text())


def test_a_collective_in_a_loop_counts_as_often_as_the_loop_runs():
    def body(x):
        def step(x, _):
            x = jax.lax.ppermute(jnp.sin(x), "fsdp", [(i, (i + 1) % 4) for i in range(4)])
            return x, None

        return jax.lax.scan(step, x, length=5)[0]

    (found,) = program(body, PartitionSpec("fsdp"), PartitionSpec("fsdp"), (8, 16)).collectives
    assert (found.kind, found.times) == ("collective-permute", 5)
    assert found.arrays == (("f32", (2, 16)),)
    assert found.sent_bytes == 5 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}", 2),
    ],
)
def test_groups_in_every_way_they_are_written(groups, size):
    text = (
        "ENTRY %main (x: f32[8,2]) -> f32[8,2] {\n"
        "  %x = f32[8,2]{1,0} parameter(0)\n"
        f"  ROOT %sum = f32[8,2]{{1,0}} all-reduce(%x), replica_groups={groups}, to_apply=%add\n"
        "}\n%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
    )
    (found,) = hlo.read(text).collectives
    assert (found.group, found.num_bytes) == (size, 64)


def test_bytes_of_each_kind():
    def body(x):
        whole = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)  # [8, 16]
        total = jax.lax.psum(jnp.sin(whole), "tensor")
        return jax.lax.psum_scatter(total, "fsdp", scatter_dimension=0, tiled=True)

    found = program(
        body, PartitionSpec("fsdp", "tensor"), PartitionSpec("fsdp", None), (8, 32)
    ).collectives
    whole = 8 * 16 * 4
    assert {(c.kind, c.group, c.num_bytes, c.sent_bytes) for c in found} == {
        ("all-gather", 4, whole, whole * 3 / 4),
        ("all-reduce", 2, whole, whole),
        ("reduce-scatter", 4, whole, whole * 3 / 4),
    }


def test_operations_of_products_are_counted_in_loops_and_in_the_larger_branch():
    def body(x, y):
        def step(carry, _):
            product = jax.lax.cond(
                jnp.sum(carry) > 0, lambda c: jnp.tanh(jnp.sin(c @ y)), lambda c: c, carry
            )
            return product, None

        return jax.lax.scan(step, x, length=3)[0]

    shapes = (8, 16), (16, 16)
    specs = (PartitionSpec("fsdp"), PartitionSpec())
    assert program(body, specs, PartitionSpec("fsdp"), *shapes).dot_flops == 3 * 2 * 2 * 16 * 16


def test_a_loop_of_unknown_length_is_refused():
    def body(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) < 9.0, lambda x: jax.lax.psum(jnp.sin(x), "fsdp"), x
        )

    with pytest.raises(ValueError, match="loop of unknown length"):
        program(body, PartitionSpec(), PartitionSpec(), (4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replica", "fsdp", "sequence", "tensor"])
def test_the_formulas_are_what_small_programs_send(axis):
    """All but norms, biases and token ids, which the formulas leave out."""
    config = models.DecoderConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=8,
        num_kv_heads=4, head_dim=32,
    )  # fmt: skip
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1) | {axis: 4}, jax.devices()[:4])
    compiled = collectives.compiled_update(config, mesh, 4, 64)
    sent = dict.fromkeys(hlo.COLLECTIVES, 0.0)
    for found in hlo.read(compiled.as_text()).collectives:
        sent[found.kind] += found.sent_bytes
    for kind, want in collectives.expected(axis, 4, config, 4, 64).items():
        assert sent[kind] == pytest.approx(want, rel=0.03), kind
