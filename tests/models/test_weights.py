"""Tensors for replicas and back, over meshes and dtypes, bit by bit."""

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.models.hf_weights import LAYER_NAMES
from tests.cases import slow_after

CONFIG = models.DecoderConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=4,
)  # fmt: skip
AWKWARD = np.array(
    [0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 3.3895e38, -3.3895e38, 1e-38, 1.1754944e-38],
    np.float32,
)  # ties to even in bfloat16, the largest numbers, the smallest normal ones


def random_params(policy):
    """Normal numbers, and those that are awkward to round."""
    rng = np.random.default_rng(0)

    def leaf(shape):
        values = rng.standard_normal(shape.shape, np.float32)
        values.flat[: len(AWKWARD)] = AWKWARD[: values.size]
        return values

    return jax.tree.map(leaf, policy.shapes())


def expected_tensors(params, dtype):
    """Every tensor of the layers, cast and transposed by NumPy."""
    for spec in models.tensor_specs(CONFIG, dtype):
        if spec.name == "model.embed_tokens.weight":
            array = params["embed"]["embedding"]
        elif spec.name == "model.norm.weight":
            array = params["final_norm"]["scale"]
        elif spec.name == "lm_head.weight":
            array = params["head"]["kernel"].T
        else:
            _, _, layer, *rest = spec.name.split(".")
            rest = ".".join(rest)
            (path,) = (p for p, name in LAYER_NAMES.items() if name == rest)
            array = params["layers"][path[0]][path[1]][int(layer)]
            array = array.T if path[1] == "kernel" else array
        yield spec, np.ascontiguousarray(array).astype(np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "devices"),
    slow_after(1, [("bfloat16", 4), ("bfloat16", 1), ("float32", 1), ("float32", 4)]),
)
def test_tensors_are_those_of_numpy_bit_by_bit(dtype, devices):
    policy = models.Policy(CONFIG)
    params = random_params(policy)
    shape = {"replica": 1, "fsdp": devices // 2 or 1, "sequence": 1, "tensor": min(devices, 2)}
    mesh = models.make_mesh(shape, jax.devices()[:devices])
    shardings = models.parameter_shardings(policy.shapes(), mesh)
    found = list(models.iterate_hf_tensors(jax.device_put(params, shardings), CONFIG, dtype))
    expected = list(expected_tensors(params, dtype))
    assert [spec for spec, _ in found] == [spec for spec, _ in expected]
    for (spec, actual), (_, known) in zip(found, expected):
        assert actual.dtype.name == dtype and actual.flags.c_contiguous
        assert actual.tobytes() == known.tobytes(), spec.name
    # And back: the values that were sent, on any mesh.
    unstacked = jax.eval_shape(lambda p: models.unstacked(p, CONFIG), policy.shapes())
    engine = models.UnstackedParams(CONFIG, models.parameter_shardings(unstacked, mesh), dtype)
    for spec, array in found:
        memory = np.empty(array.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64  # aligned: a CPU could take it without a copy
        given = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        given[...] = array
        engine.put({spec.name: given})
        engine.wait()
        given[...] = 0  # its memory is used again
    known = models.unstacked(jax.tree.map(lambda x: x.astype(np.dtype(dtype)), params), CONFIG)

    def check(path, actual, leaf):
        kept = np.float32 if path[-1].key == "scale" else np.dtype(dtype)
        assert actual.dtype == kept
        assert np.asarray(actual).tobytes() == leaf.astype(kept).tobytes(), path

    jax.tree_util.tree_map_with_path(check, engine.finish(), known)
