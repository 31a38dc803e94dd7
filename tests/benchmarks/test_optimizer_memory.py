"""The bytes per parameter of the estimate are those of arrays and compiled programs."""

import jax
import pytest

from benchmarks.optimizer_memory import compiled_for, make
from semrl_jax import models
from semrl_jax.training.train_state import init_trained
from semrl_jax.training.update_memory import PerParameter

SMALL = models.DecoderConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "parameter", "state", "gradients"),
    [
        ("adamw", "float32", 4, 8, 8),
        ("adamw, bfloat16 mean", "float32", 4, 6, 8),
        ("adamw", "bfloat16", 2, 12, 6),
        ("adafactor", "float32", 4, 0, 8),
        ("adafactor, bfloat16 momentum", "bfloat16", 2, 6, 6),
    ],
)
def test_bytes_per_parameter_by_hand(name, dtype, parameter, state, gradients):
    shapes = models.Policy(SMALL).shapes()
    found = PerParameter.of(make(name, dtype), shapes)
    # The tolerance covers means of rows and columns, and the state of norms, which is not factored.
    assert found == (parameter, pytest.approx(state, abs=0.1), gradients)
    assert found.in_checkpoint == parameter + found.state
    assert found.in_update == parameter + found.state + gradients


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("adafactor, bfloat16 momentum", "bfloat16")])
def test_the_arrays_have_these_bytes(name, dtype):
    policy = models.Policy(SMALL)
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    trained = init_trained(policy.init(jax.random.key(0)), make(name, dtype), mesh)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
    found = PerParameter.of(make(name, dtype), policy.shapes())
    for tree, wanted in ((trained.params, found.parameter), (trained.optimizer, found.state)):
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / count == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", "bfloat16"), pytest.param("adamw", "float32", marks=pytest.mark.soak)],
)
def test_the_state_leaves_the_memory_of_a_tpu(name, dtype, monkeypatch):
    pytest.importorskip("libtpu", reason="needs libtpu: pip install -e '.[tpu]'")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    on_chip, on_host = (
        compiled_for("v5e:2x2", SMALL, make(name, dtype, is_offloaded))
        for is_offloaded in (False, True)
    )
    shapes = models.Policy(SMALL).shapes()
    state = PerParameter.of(make(name, dtype), shapes).state
    state *= sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert on_chip.host_argument_size_in_bytes == 0
    assert on_host.host_argument_size_in_bytes >= 0.99 * state
    assert on_host.host_output_size_in_bytes >= 0.99 * state
    gone = on_chip.argument_size_in_bytes - on_host.argument_size_in_bytes
    assert gone >= 0.99 * state
