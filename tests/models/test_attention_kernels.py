"""The fused kernels against the plain product, as JAX programs; and their compilation."""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from semrl_jax import models
from semrl_jax.models import decoder
from semrl_jax.models import policy as policy_module
from semrl_jax.models.attention import self_attention
from semrl_jax.models.attention_kernels import choose_kernel
from semrl_jax.models.policy import Policy
from semrl_jax.support.errors import UserError
from tests.models.test_attention import ASSERT_CLOSE, check_bfloat16, mesh_of, outcome, slow, soak

ROWS, COLUMNS, HEADS, KV_HEADS, WIDTH = 2, 200, 4, 2, 16  # two blocks of 128, padded
LONGEST = jnp.iinfo(jnp.int32).max


@pytest.fixture(scope="module")
def places():
    """One row of two packed segments, one with padding on both sides."""
    segments = np.ones((ROWS, COLUMNS), np.int32)
    segments[0, 90:] = 2
    segments[1, :5] = segments[1, 170:] = 0
    positions = np.concatenate([np.arange(90), np.arange(110)]), np.arange(COLUMNS) - 5
    return jnp.maximum(np.stack(positions), 0), jnp.asarray(segments)


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [jax.random.normal(key, (ROWS, COLUMNS, n, WIDTH)) for key, n in zip(keys, heads)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "window", "windows", "mesh"),
    [
        ("splash", 50, (50,), None),
        ("triton", None, (None,), None),
        slow("splash", None, (None,), None),
        slow("splash", 50, (None, 50), None),  # a layer with the window among others without
        soak("splash", LONGEST, (None, 50), None),
        slow("splash", 150, (150,), (1, 2, 1, 2)),  # its first block is not in the last one's
        slow("splash", None, (None,), (1, 2, 1, 4)),  # too few kv heads to split
        soak("splash", None, (None,), (2, 2, 1, 2)),  # too few rows to split
        soak("triton", None, (None,), (1, 2, 1, 2)),
    ],
)
def test_kernels_give_the_plain_attention_and_its_gradient(
    places, arrays, kernel, window, windows, mesh
):
    expected = outcome(places, arrays, window)
    options = {"kernel": kernel, "windows": windows, "mesh": mesh and mesh_of(*mesh)}
    for got, want in zip(outcome(places, arrays, window, interpret=True, **options), expected):
        ASSERT_CLOSE(got, want)


@pytest.mark.parametrize("kernel", [slow("splash"), soak("triton")])
def test_bfloat16_kernels_keep_float32_sums(places, arrays, kernel):
    check_bfloat16(places, arrays, kernel=kernel, interpret=True)


@pytest.mark.parametrize("full", [soak((), id="windows"), slow((1,), id="mixed layers")])
def test_a_model_with_the_kernel_has_the_same_states_and_gradients(places, monkeypatch, full):
    config = models.DecoderConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, sliding_window=40, full_attention_layers=full,
    )  # fmt: skip
    positions, segments = places
    token_ids = jax.random.randint(jax.random.key(1), segments.shape, 0, 32)
    policy = Policy(config, remat="full", mesh=mesh_of(1, 2, 1, 2))
    params = policy.init(jax.random.key(0))

    def outcome():
        def loss(params):
            states = policy.final_states(params, token_ids, positions, segments)
            counted = jnp.where((segments != 0)[:, :, None], states, 0.0)
            return jnp.sum(counted[:, :, 0]), counted

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    plain = outcome()
    calls = []

    def interpreted(*args, **options):
        calls.append(options["kernel"])
        return self_attention(*args, **options, interpret=True)

    monkeypatch.setattr(Policy, "kernel", "splash")
    monkeypatch.setattr(decoder, "self_attention", interpreted)
    policy_module._graph.cache_clear()  # which has the kernel of the first use
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, outcome(), plain)
    assert set(calls) == {"splash"}


CONFIG = models.DecoderConfig(
    vocab_size=8, hidden_size=32, intermediate_size=8, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
GEMMA2 = {"model_type": "gemma2", "attention_logit_softcap": 50.0}


@pytest.mark.parametrize(
    ("wanted", "changes", "mesh", "platform", "expected"),
    [
        ("auto", {}, None, "tpu", "splash"),
        ("auto", {"sliding_window": 4}, (1, 2, 1, 2), "tpu", "splash"),
        ("auto", {"head_dim": 512}, None, "tpu", "xla"),
        ("auto", {}, (1, 1, 2, 1), "tpu", "xla"),
        ("auto", {}, None, "gpu", "xla"),
        ("auto", {}, None, "cpu", "xla"),
        ("xla", {}, None, "tpu", "xla"),
        ("triton", {}, None, "gpu", "triton"),
        ("splash", {}, None, "cpu", "needs a TPU, and the program runs on a CPU"),
        ("triton", {}, None, "tpu", "needs a GPU, and the program runs on a TPU"),
        ("splash", {"head_dim": 512}, None, "tpu", "has head_dim=512"),
        ("triton", {"sliding_window": 4}, None, "gpu", "has sliding_window=4"),
        ("splash", {}, (1, 1, 2, 1), "tpu", "mesh.sequence=2 splits them"),
        ("splash", GEMMA2, None, "tpu", "has attention_logit_softcap=50"),
        ("auto", GEMMA2, None, "tpu", "xla"),
    ],
)
def test_a_kernel_is_chosen_or_refused(wanted, changes, mesh, platform, expected):
    config = dataclasses.replace(CONFIG, **changes)
    mesh = mesh and mesh_of(*mesh)
    if " " not in expected and "=" not in expected:
        assert choose_kernel(wanted, config, mesh, platform) == expected
        return
    with pytest.raises(UserError, match=f"model.attention='{wanted}' .*{expected}; choose auto"):
        choose_kernel(wanted, config, mesh, platform)


def test_the_program_for_gpus_has_the_kernel():
    """Lowered to the code of the kernel, not compiled: that needs a GPU."""
    places = [jax.ShapeDtypeStruct((1, 256), jnp.int32)] * 2
    arrays = [jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (4, 2, 2)]

    def loss(positions, segments, *arrays):
        attended = self_attention(positions, segments, kernel="triton")(*arrays, None)
        return jnp.sum(attended.astype(jnp.float32) ** 2)

    # From JAX 0.11 on, the kernel depends on the card.
    card = jax.sharding.AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("fsdp",), abstract_device=card)):
        traced = jax.jit(jax.grad(loss, argnums=(2, 3, 4))).trace(*places, *arrays)
        assert "xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dtype", "width", "size"), [("bfloat16", 128, 128), ("float32", 64, 128), ("float32", 80, 64)]
)
def test_blocks_of_wide_heads_fit_into_the_memory_of_a_gpu(monkeypatch, dtype, width, size):
    """The compiler for an H100 refuses blocks of 128 float32 heads of 80 to 128 values."""
    from jax.experimental.pallas.ops.gpu import attention as triton

    found = []

    def mha(query, *_, block_sizes, **__):
        found.append((block_sizes.block_q, block_sizes.block_k))
        return query

    monkeypatch.setattr(triton, "mha", mha)
    segments, heads = jnp.ones((1, 256), jnp.int32), jnp.ones((1, 256, 2, width), dtype)
    self_attention(segments, segments, kernel="triton")(heads, heads, heads, None)
    assert found == [(size, size)]


# In a process of its own: it loads libtpu, which reads the environment.
COMPILED = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from semrl_jax import models

config = models.DecoderConfig(
    vocab_size=256, hidden_size=256, intermediate_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, sliding_window=256, full_attention_layers=(0,),
)
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = models.make_mesh({"replica": 1, "fsdp": 2, "sequence": 1, "tensor": 2}, devices)
policy = models.Policy(config, "bfloat16", "full", mesh)
shapes = policy.shapes()
params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes, models.parameter_shardings(shapes, mesh),
)
rows = NamedSharding(mesh, PartitionSpec("fsdp", None))
tokens = [jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=rows)] * 3

def loss(params, *tokens):
    return jnp.sum(policy.final_states(params, *tokens).astype(jnp.float32) ** 2)

program = jax.jit(jax.grad(loss)).lower(params, *tokens).compile()
print(policy.kernel, program.as_text().count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the compiler for TPUs, but no TPU: pip install -e '.[tpu]'",
)
def test_the_program_for_tpus_has_the_kernel():
    """A model with mixed layers, split over rows and heads, is compiled for four chips of v5e."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it has no device that processes could share
    }
    result = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    # For each window: forward, forward again, and two programs of the backward pass.
    assert result.stdout.splitlines()[-1] == "splash 8"
