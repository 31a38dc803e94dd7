"""What a program executes, counted by hand and on programs compiled here."""

import jax
import jax.numpy as jnp
import pytest

from semrl_jax.planning import hlo
from tests.cases import raised

# The text of a TPU program: products are convolutions, loops have no known trip count, arrays with
# S(1) are on the chip, and replica groups follow a mesh.
TPU = """
%cond (p: (s32[], bf16[64,32])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (p: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %p = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%p), index=0
  %x = bf16[64,32]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %w = bf16[32,32]{1,0:T(8,128)(2,1)S(1)} all-gather(%x), channel_id=1, \
replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
  %y = bf16[64,32]{1,0:T(8,128)(2,1)} convolution(%x, %w), dim_labels=bf_io->bf
  %one = s32[]{:T(128)S(6)} constant(1)
  %next = s32[]{:T(128)S(6)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}) tuple(%next, %y)
}

ENTRY %main (a: bf16[64,32]) -> bf16[64,32] {
  %a = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}) while(%start), \
condition=%cond, body=%body
  ROOT %out = bf16[64,32]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""
MESH = {"replica": 2, "fsdp": 4, "sequence": 1, "tensor": 1}


@pytest.mark.parametrize(("counter", "step", "times"), [("s32", 1, 7), ("u32", 2, 4)])
def test_a_loop_of_a_tpu_counts_by_its_condition(counter, step, times):
    """A product in parts, each during the gather of the next, counts in u32 and by two."""
    program = hlo.read(
        TPU.replace("s32[]", f"{counter}[]").replace("constant(1)", f"constant({step})")
    )
    assert program.dot_flops == times * 2 * 64 * 32 * 32
    # Both arrays of 64 x 32 are outside the chip; the gathered one is not.
    assert program.hbm_bytes == times * 2 * 64 * 32 * 2
    (gather,) = program.collectives
    assert (gather.times, gather.num_bytes) == (times, 32 * 32 * 2)
    assert gather.members == (0, 1, 2, 3) and gather.axes(MESH) == ("fsdp",)
    assert hlo.by_kind_and_axis(program.collectives, MESH) == [
        {"kind": "all-gather", "axes": "fsdp", "times": times,
         "sent_bytes": times * 32 * 32 * 2 * 3 / 4, "overlapped": 0}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", (0, 2, 4, 6)),
        ("mesh['x'=8] {'x':(2)2}", (0, 2)),
        ("mesh['x'=8] {'x':(1)2}", (0, 4)),
    ],
)
def test_members_of_a_group(groups, members):
    assert hlo._members(f"%x), replica_groups={groups}, to_apply=%add") == members


FUSED_SUM = """
%scattering (in: bf16[8,32]) -> bf16[ROWS,32] {
  %in = bf16[8,32]{1,0} parameter(0)
  %sum = bf16[8,32]{1,0} all-reduce(%in), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT LAST
}

ENTRY %main (x: bf16[8,32]) -> bf16[ROWS,32] {
  %x = bf16[8,32]{1,0} parameter(0)
  ROOT %y = bf16[ROWS,32]{1,0} fusion(%x), kind=kCustom, calls=%scattering
}
"""
SLICE = "%own = bf16[2,32]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={2,32}"


@pytest.mark.parametrize(
    ("rows", "last", "kind", "sent"),
    [
        (2, SLICE, "reduce-scatter", 3 / 4),
        (8, "%twice = bf16[8,32]{1,0} add(%sum, %sum)", "all-reduce", 2 * 3 / 4),
    ],
    ids=["a slice", "all"],
)
def test_a_fused_sum_of_which_a_slice_is_kept_is_scattered(rows, last, kind, sent):
    """A TPU's reduce-scatter may have this form."""
    text = FUSED_SUM.replace("ROWS", str(rows)).replace("LAST", last)
    (found,) = hlo.by_kind_and_axis(hlo.read(text).collectives, MESH)
    assert (found["kind"], found["axes"], found["times"]) == (kind, "fsdp", 1)
    assert found["sent_bytes"] == sent * 8 * 32 * 2


def test_a_batch_of_products_written_as_a_convolution():
    # f32[4,...] einsum over a batch of 4: one term per output in the dilated dimension.
    text = """
ENTRY %main (x: bf16[4,7,256,128], y: bf16[4,7,256,128]) -> f32[4,7,256,256] {
  %x = bf16[4,7,256,128]{3,2,1,0} parameter(0)
  %y = bf16[4,7,256,128]{3,2,1,0} parameter(1)
  ROOT %z = f32[4,7,256,256]{3,2,1,0} convolution(%x, %y), \
window={size=4x7 stride=3x6 lhs_dilate=4x7}, dim_labels=01bf_01oi->01bf
}
"""
    assert hlo.read(text).dot_flops == 2 * 4 * 7 * 256 * 256 * 128


@pytest.mark.parametrize("layers", [1, 3])
def test_scanned_layers_with_gradients_and_micro_batches(layers):
    """Forward and backward of a scanned product: 6 N T, a loop counted as often as it runs."""
    tokens, width, micro = 16, 8, 5

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    def update(w, xs, count):
        def add(i, total):
            return total + jax.grad(loss)(w, xs[i])

        return jax.lax.fori_loop(0, count, add, jnp.zeros_like(w))

    shapes = [(layers, width, width), (micro, tokens, width)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(update).lower(*arguments, jnp.int32(0)).compile().as_text()
    raised(ValueError, "unknown length", hlo.read, text)
    # Without the gradient of the first layer's input, where there is only one layer.
    found = hlo.read(text, passes=micro).dot_flops
    assert found in (k * micro * layers * 2 * tokens * width**2 for k in (2, 3))


def test_kernels_of_tpus_count_as_products():
    """What the compiler writes for two rows and two heads of 256 columns, and for 8 experts."""
    mask, states = "s8[1,2,2]{2,1,0}", "bf16[2,2,256,128]{3,2,1,0}"
    kernel = 'custom_call_target="tpu_custom_call", operand_layout_constraints='
    text = f"""
ENTRY %main.1 (p: bf16[4,4]) -> bf16[2,2,256,128] {{
  %p = {states} parameter(0)
  %splash_mha_fwd_segmented_residuals.3 = {states} custom-call(%p, %p), {kernel}{{{mask}, {mask}, {states}, {states}, {states}, s32[256,128]{{1,0}}}}, frontend_attributes={{}}
  %splash_mha_dq_segmented_no_residuals.1 = {states} custom-call(%p, %p), {kernel}{{{mask}, {mask}, {states}, {states}, {states}}}, frontend_attributes={{}}
  %splash_mha_dkv_segmented_no_residuals.1 = {states} custom-call(%p, %p), {kernel}{{{mask}, {mask}, {states}, {states}, {states}}}, frontend_attributes={{}}
  %ragged-dot-metadata = (s32[9]{{0}}) custom-call(%p), {kernel}{{s32[8]{{0}}}}, metadata={{}}
  %ragged-dot-none.1 = bf16[1024,128]{{1,0}} custom-call(%p, %p), {kernel}{{s32[1]{{0}}, bf16[1024,256]{{1,0}}, bf16[8,256,128]{{2,1,0}}}}, frontend_attributes={{}}
}}
"""  # noqa: E501
    attention = 9 * 2 * (4 * 3 * 128 * 128) * 128  # three of four blocks
    assert hlo.read(text).dot_flops == attention + 2 * 1024 * 256 * 128
