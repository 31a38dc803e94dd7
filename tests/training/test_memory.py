"""The estimate of an update's memory is the formula of docs/memory.md."""

import dataclasses

import pytest

from semrl_jax.models import DecoderConfig, Experts, tensor_specs
from semrl_jax.training.update_memory import update_parts

# The model of the page's table. One sequence per row: 224 response tokens in 256 columns.
MODEL = DecoderConfig(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_layers=8, num_heads=4,
    num_kv_heads=2, head_dim=32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("remat", "num_rows", "mib"),
    [
        ("none", 1, 75.8), ("none", 4, 205.6), ("full", 1, 40.5), ("full", 4, 64.3),
        ("dots", 1, 50.5), ("dots", 4, 104.3),
    ],
)  # fmt: skip
def test_the_estimate_is_the_column_of_the_page(remat, num_rows, mib):
    num_params = sum(spec.num_bytes for spec in tensor_specs(MODEL, "float32")) // 4
    parts = update_parts(
        MODEL, remat, num_rows=num_rows, num_columns=256, num_slots=224 * num_rows, platform="cpu"
    )
    found = 20 * num_params + sum(parts.values())
    assert found / 2**20 == pytest.approx(mib, abs=0.05)  # the page has one decimal


def test_the_gathered_kernels_of_a_mixture_are_those_of_all_its_experts():
    """Two layers of Qwen3-235B take 9.7 GB in bfloat16, and 0.6 GB without the experts."""
    experts = Experts(16, 2, 96, normalize_weights=True)
    model = dataclasses.replace(MODEL, model_type="qwen3_moe", experts=experts)
    sizes = {"num_rows": 1, "num_columns": 256, "num_slots": 224, "platform": "gpu"}
    mesh = {"fsdp": 2, "tensor": 2, "expert": 4}
    parts = update_parts(model, "full", dtype="bfloat16", **sizes, **mesh)
    layer = 128 * 16  # the router; the other kernels are split
    for spec in tensor_specs(model, "bfloat16"):
        if "layers.0." in spec.name and len(spec.shape) == 2 and "mlp.gate." not in spec.name:
            layer += spec.num_bytes / 2 / 2 / (4 if "experts" in spec.name else 1)
    output = (2 + 4) * 512 / 2 * 128  # the matrix, and its gradient
    assert parts["gathered"] == pytest.approx(2 * 2 * layer + output)
