"""Mixtures of experts: the dispatch against a loop, and the mesh axis against one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from semrl_jax import models
from semrl_jax.models import experts as module
from semrl_jax.models.experts import Kernels, mixture
from tests.cases import refused
from tests.models.test_sharding import mesh_of

EXPERTS = models.Experts(8, 3, 6, normalize_weights=True)
NO_EXPERT = 255
CONFIG = models.DecoderConfig(
    vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, model_type="qwen3_moe", experts=dataclasses.replace(EXPERTS, intermediate_size=24),
)  # fmt: skip


def every_expert(x, kernels, options, given=None):
    """All experts of all tokens; the weights of those that were not chosen are 0."""
    probabilities = jax.nn.softmax(x @ kernels.router)
    lowest = jnp.sort(probabilities, axis=-1)[..., -options.experts_per_token, None]
    is_chosen = probabilities >= lowest
    if given is not None:
        is_given = (given[..., None] == np.arange(options.num_experts)).any(axis=-2)
        is_chosen = jnp.where((given == NO_EXPERT).all(axis=-1)[..., None], is_chosen, is_given)
    weights = jnp.where(is_chosen, probabilities, 0.0)
    if options.normalize_weights:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    features = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, kernels.gate))
    features = features * jnp.einsum("bsd,edf->bsef", x, kernels.up)
    return jnp.einsum("bsef,efd,bse->bsd", features, kernels.down, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "normalized", "is_given"),
    [("blocks", True, False), ("ragged_dot", False, False), ("blocks", False, True)],
)
def test_dispatch_is_the_weighted_sum_over_experts(monkeypatch, path, normalized, is_given):
    """Some experts have no token, others nearly all; `ragged_dot` is what TPUs run.

    Given experts are in any order, and a third of the tokens have none.
    """
    if path == "ragged_dot":
        monkeypatch.setattr(module, "_block_size", lambda *_: 1)
    options = dataclasses.replace(EXPERTS, normalize_weights=normalized)
    random = np.random.default_rng(0)
    shapes = Kernels((10, 8), (8, 10, 6), (8, 10, 6), (8, 6, 10))
    kernels = Kernels(*(jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes))
    x = random.normal(size=(2, 35, 10)).astype(np.float32)
    x[..., 0] = 1.0  # of the same sign for all tokens
    router = kernels.router.at[0].set(np.linspace(15.0, -15.0, 8))  # the first are preferred
    kernels = kernels._replace(router=router)
    chosen = np.asarray(module.route(jnp.asarray(x[0]), router, options)[0])
    loads = np.bincount(chosen.reshape(-1), minlength=8)
    assert loads.max() > 30 and loads.min() == 0

    given = None
    if is_given:
        given = np.argsort(random.random((2, 35, 8)), axis=-1)[..., :3].astype(np.uint8)
        given[:, ::3] = NO_EXPERT

    towards = random.normal(size=x.shape).astype(np.float32)

    def both(of, x, kernels):
        found = of(x, kernels)
        return jnp.sum(found * towards), found

    def ours(x, kernels):
        asked = None if given is None else jnp.asarray(given)
        return mixture(x, kernels, options, jax.nn.silu, None, asked)[0]

    found, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(both, of), (0, 1), has_aux=True))(x, kernels)
        for of in (ours, functools.partial(every_expert, options=options, given=given))
    )

    def close(actual, expected):  # float32 sums in another order
        scale = max(np.abs(expected).max(), 1e-3)
        np.testing.assert_allclose(actual / scale, expected / scale, atol=2e-5)

    jax.tree.map(close, found, wanted)


def test_a_plan_for_one_chip_has_the_products_of_that_chip(monkeypatch):
    """A processor without the chip compiles it."""
    monkeypatch.setattr("semrl_jax.models.policy.platform_of", lambda mesh: "tpu")
    policy = models.Policy(dataclasses.replace(CONFIG, max_position_embeddings=99), attention="xla")
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    program = jax.make_jaxpr(policy.final_states)(policy.shapes(), tokens, tokens, tokens)
    assert "ragged_dot" in str(program)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        pytest.param((1, 2, 1, 2, 2), 8, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [
                ((1, 1, 1, 1, 8), 8), ((2, 1, 2, 1, 2), 8), ((1, 4, 1, 1, 2), 8),
                ((1, 2, 1, 1, 4), 3),  # too few rows: every device has all of them
            ]
        ),
    ],
)  # fmt: skip
def test_expert_axis_changes_results_only_by_rounding(sizes, rows):
    policy = models.Policy(CONFIG)
    params = policy.init(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 48, (rows, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)

    def of(policy):
        def loss(params, ids, positions):
            states = policy.final_states(params, ids, positions, jnp.ones_like(ids))
            logprobs, _ = policy.token_logprobs(params, states[:, :-1], ids[:, 1:])
            return jnp.sum(logprobs), states

        return jax.jit(jax.grad(loss, has_aux=True))

    gradient, states = of(policy)(params, ids, positions)
    mesh = mesh_of(*sizes)
    models.check_mesh(CONFIG, mesh)
    shardings = models.parameter_shardings(params, mesh)
    sharded = jax.device_put(params, shardings)
    kernel = sharded["layers"]["expert_up"]["kernel"]
    parts = np.prod([sizes[i] for i in (1, 3, 4)])  # fsdp, tensor, expert
    assert kernel.addressable_shards[0].data.size * parts == kernel.size
    split = NamedSharding(mesh, PartitionSpec(models.DATA_AXES if rows == 8 else None))
    arguments = jax.device_put((ids, positions), split)
    policy = dataclasses.replace(policy, mesh=mesh, remat="dots")
    split_gradient, split_states = of(policy)(sharded, *arguments)
    np.testing.assert_allclose(split_states, states, rtol=1e-4, atol=1e-5)  # reordered sums

    def close(actual, expected):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-4)

    jax.tree.map(close, split_gradient, gradient)


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ((1, 1, 1, 1, 8), {"num_experts": 12}, r"mesh\.expert=8 must divide num_experts=12; "),
        ((1, 1, 1, 2, 1), {"intermediate_size": 5}, r"mesh\.tensor=2 .* width of an expert=5"),
        ((1, 1, 1, 1, 2), None, r"mesh\.expert splits experts, and the model has none"),
    ],
)
def test_a_mesh_that_does_not_split_the_experts_is_refused(sizes, change, message):
    if change is None:
        config = dataclasses.replace(CONFIG, model_type="qwen3", experts=None)
    else:
        config = dataclasses.replace(CONFIG, experts=dataclasses.replace(EXPERTS, **change))
    refused(message, models.check_mesh, config, mesh_of(*sizes))


@pytest.mark.slow
def test_files_and_engines_hold_the_same_experts(tmp_path):
    """With a dense layer among the others: saved, read onto a mesh, and sent to an engine."""
    experts = dataclasses.replace(CONFIG.experts, dense_layers=(0,))
    config = dataclasses.replace(CONFIG, num_layers=3, experts=experts)
    policy = models.Policy(config)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(np.float32), policy.shapes()
    )
    assert params["layers"]["gate"]["kernel"].shape == (1, 32, 64)
    assert params["layers"]["expert_gate"]["kernel"].shape == (2, 8, 32, 24)
    models.save_directory(tmp_path / "model", params, config, None)
    assert models.load_config(tmp_path / "model") == config
    mesh = mesh_of(1, 2, 1, 2, 2)
    shardings = models.parameter_shardings(policy.shapes(), mesh)
    read = models.load_params(tmp_path / "model", config, shardings)
    jax.tree.map(np.testing.assert_array_equal, read, params)

    by_layer = models.unstacked(params, config)
    assert set(by_layer["layers"][0]) & {"gate", "expert_gate"} == {"gate"}
    assert set(by_layer["layers"][1]) & {"gate", "expert_gate"} == {"expert_gate"}
    own = mesh_of(1, 1, 1, 2, 1)
    engine = models.UnstackedParams(config, models.parameter_shardings(by_layer, own), "float32")
    for spec, array in models.iterate_hf_tensors(read, config, "float32"):
        engine.put({spec.name: array})
    jax.tree.map(np.testing.assert_array_equal, engine.finish(), by_layer)
    assert models.num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    count = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(read))
    # In addition, each device has the whole norms.
    assert 0 < count - models.num_parameters(config, mesh.shape) < 1000
