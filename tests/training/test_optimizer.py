"""Optimisers by name, rounded parameters with masters, and state in the memory of the host."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.default import get_config
from semrl_jax import models
from semrl_jax.algorithms import grpo, ppo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.runs import optimizers
from semrl_jax.runs.config_checks import validate
from semrl_jax.support.errors import UserError
from semrl_jax.training.offload import KIND, check_gives_back, check_offload
from semrl_jax.training.optimizer import (
    WithMasters,
    load_direction,
    make_optimizer,
    num_optimizer_updates,
)
from semrl_jax.training.optimizers import adafactor, adamw
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.train_state import abstract_trained, init_trained
from tests.cases import refused
from tests.training.test_critic import check_layout
from tests.training.test_mesh import PLANS, TEMPERATURE, Case, assert_near, recorded
from tests.training.updates import update_critic, update_policy

RATE = {"learning_rate": 1e-2, "learning_rate_warmup_steps": 2}
REST = {"weight_decay": 0.1, "max_grad_norm": 1.0}
ALGORITHM = Algorithm(grpo, grpo.Options(entropy_coefficient=0.01, kl_coefficient=0.0))
SPLIT = (1, 2, 2, 2)
# What a config sets, for the sections `optimizer` and others, by full name.
ADAFACTOR = {"optimizer.name": "adafactor"}
CHOICES = {
    "adamw": {},
    "adamw, bfloat16 mean": {"optimizer.first_moment_dtype": "bfloat16"},
    "adafactor": ADAFACTOR,
    "adafactor, momentum": ADAFACTOR
    | {"optimizer.momentum": 0.9, "optimizer.first_moment_dtype": "bfloat16"},
}


def config_with(**fields):
    config = get_config()
    config.update_from_flattened_dict(fields)
    return config


def direction_of(choice, name="training", **more):
    """The direction of a config; Adafactor factors the arrays of small models too."""
    config = config_with(**CHOICES[choice], **more)
    if config.optimizer.name == "adafactor":
        config.optimizer.options.min_size_to_factor = 8
    return load_direction(config, name)


def optimizer_of(choice, **settings):
    return make_optimizer(**RATE, **REST, direction=direction_of(choice), **settings)


def test_adamw_is_that_of_optax_to_the_bit():
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(3, 5)).astype(np.float32)}
    rates = {"learning_rate": 0.1, "learning_rate_warmup_steps": 0}
    optimizer = make_optimizer(**rates, adam_b1=0.8, adam_b2=0.95, **REST)
    assert optimizer is make_optimizer(**rates, adam_b1=0.8, adam_b2=0.95, **REST)
    adamw = optax.adamw(lambda _: 0.1, 0.8, 0.95, weight_decay=0.1)
    expected = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    state, wanted_state = optimizer.first_state(params), expected.init(params)
    wanted = params
    for _ in range(3):
        gradient = {"w": random.normal(size=(3, 5)).astype(np.float32)}
        params, state = optimizer.step(gradient, state, params)
        changes, wanted_state = expected.update(gradient, wanted_state, wanted)
        wanted = optax.apply_updates(wanted, changes)
    jax.tree.map(np.testing.assert_array_equal, (params, state), (wanted, wanted_state))


def test_adafactor_matches_float64():
    random = np.random.default_rng(0)
    first = random.normal(size=(2, 8, 12))
    options = adafactor.Options(0.7, momentum=0.9, min_size_to_factor=8)
    direction = adafactor.direction(options)
    state = direction.init({"w": first.astype(np.float32)})
    rows, columns, mean = np.zeros((2, 8)), np.zeros((2, 12)), np.zeros(first.shape)
    for step in range(3):
        gradient = random.normal(size=first.shape)
        found, state = direction.update(
            {"w": gradient.astype(np.float32)}, state, {"w": first.astype(np.float32)}
        )
        decay = 1 - (step + 1.0) ** -0.7
        square = gradient**2 + 1e-30
        rows = decay * rows + (1 - decay) * square.mean(axis=2)
        columns = decay * columns + (1 - decay) * square.mean(axis=1)
        second = rows[:, :, None] * columns[:, None] / rows.mean(axis=1)[:, None, None]
        own = gradient / np.sqrt(second)
        own /= max(1.0, np.sqrt(np.mean(own**2)))
        mean = 0.9 * mean + 0.1 * own
        np.testing.assert_allclose(found["w"], mean, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_bfloat16_mean_decays_like_a_float32_mean(name, decay):
    """The decay in bfloat16 made it a fifth too small with 0.99, and let it grow with 0.999."""

    def direction(dtype):
        if name == "adamw":
            return adamw.direction(adamw.Options(adam_b1=decay, first_moment_dtype=dtype))
        return adafactor.direction(adafactor.Options(momentum=decay, first_moment_dtype=dtype))

    gradients = jax.random.normal(jax.random.key(0), (2000, 64)) + 0.3
    params = jnp.zeros(64)

    @functools.partial(jax.jit, static_argnums=0)
    def last(dtype):
        own = direction(dtype)

        def step(state, gradient):
            found, state = own.update(gradient, state, params)
            return state, found

        state, found = jax.lax.scan(step, own.init(params), gradients)
        return state, found[-1]

    (exact_state, exact), (state, found) = last("float32"), last("bfloat16")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert jnp.dtype("bfloat16") in dtypes > {leaf.dtype for leaf in jax.tree.leaves(exact_state)}
    assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


@functools.cache
def three_updates(choice, sizes=(1, 1, 1, 1), **settings):
    """A policy's parameters and optimiser state after three updates, and the loss of each."""
    case = Case(sizes, dtype=settings.get("param_dtype", "float32"))
    policy, mesh = case.policy(), case.mesh()
    optimizer = optimizer_of(choice, **settings)
    trained = init_trained(policy.init(jax.random.key(0)), optimizer, mesh)
    like = abstract_trained(policy.shapes(), optimizer, mesh)
    batch, advantages, _ = recorded()
    losses = []
    for _ in range(3):
        jax.tree.map(check_place, trained, like)
        *trained, scalars, _ = update_policy(
            *trained, batch, None, None, advantages, policy=policy, optimizer=optimizer,
            temperature=TEMPERATURE, plan=RowPlan(mesh, **PLANS["rows"]), algorithm=ALGORITHM,
        )  # fmt: skip
        trained = type(like)(*trained)
        losses.append(float(scalars["policy/loss"]))
        assert not scalars["policy/update_skipped"]
    jax.tree.map(check_place, trained, like)
    assert num_optimizer_updates(trained.optimizer) == 3
    return jax.device_get(trained), losses


def check_place(leaf, like):
    check_layout(leaf, like)
    assert leaf.sharding.memory_kind == like.sharding.memory_kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        "adafactor, momentum",
        *(pytest.param(c, marks=pytest.mark.soak) for c in CHOICES if c != "adafactor, momentum"),
    ],
)
def test_state_on_the_host_changes_no_bit(choice):
    found = three_updates(choice, is_offloaded=True)
    jax.tree.map(np.testing.assert_array_equal, found, three_updates(choice))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("choice", "settings"),
    [
        ("adamw, bfloat16 mean", {}),
        ("adafactor", {}),
        ("adafactor, momentum", {"is_offloaded": True}),
    ],
)
def test_three_updates_on_a_mesh_are_those_of_one_device(choice, settings):
    (trained, losses), (wanted, wanted_losses) = (
        three_updates(choice, sizes, **settings) for sizes in (SPLIT, (1, 1, 1, 1))
    )
    np.testing.assert_allclose(losses, wanted_losses, atol=2e-4)
    # Three steps move a parameter by up to 1e-2 each. As in test_mesh.py, the steps of gradients
    # near 0 are roundings divided by roundings.
    assert_near(trained.params, wanted.params, 2e-3)
    parts = zip(*map(jax.tree.leaves, (trained.params, wanted.params)), strict=True)
    far = [np.mean(np.abs(a - b) > 2e-4) for a, b in parts]
    assert np.mean(far) < 0.01


def test_means_of_rows_and_columns_are_split_like_their_parameters():
    case = Case(SPLIT)
    like = abstract_trained(case.policy().shapes(), optimizer_of("adafactor"), case.mesh())
    found = like.optimizer[1][0][0]
    kernel = like.params["layers"]["gate"]["kernel"]  # [L, in, out] over fsdp and tensor
    assert tuple(kernel.sharding.spec) == (None, "fsdp", "tensor")
    means = [getattr(found, name)["layers"]["gate"]["kernel"] for name in ("v_row", "v_col")]
    assert {mean.shape: tuple(mean.sharding.spec) for mean in means} == {
        kernel.shape[:2]: (None, "fsdp"),
        (kernel.shape[0], kernel.shape[2]): (None, "tensor"),
    }


@pytest.mark.parametrize("name", ["training", "critic"])
@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1)])
def test_the_rate_of_a_run_falls_to_its_end(name, kind, middle):
    """4 steps of 2 mini-batches, twice: 16 updates, of which 4 rise."""
    config = get_config()
    config.data.prompts_per_step, config.training.prompts_per_minibatch = 8, 4
    config.training.num_steps, config.training.ppo_epochs = 4, 2
    section = config[name]
    section.learning_rate, section.learning_rate_warmup_steps = 1.0, 4
    section.learning_rate_schedule, section.learning_rate_final_fraction = kind, 0.1
    rate = optimizers.optimizer_of(config, name).rate
    end = 1.0 if kind == "constant" else 0.1
    np.testing.assert_allclose([rate(n) for n in (0, 3, 4, 10, 16)], [0.25, 1, 1, middle, end])
    config.critic.warmup_steps = 2  # not read under grpo
    assert optimizers.optimizer_of(config, name).rate(10) == rate(10)
    config.algorithms.name = "ppo"  # the policy has 8 updates
    at_8 = optimizers.optimizer_of(config, name).rate(8)
    np.testing.assert_allclose(at_8, end if name == "training" else rate(8))


def test_small_steps_are_not_lost():
    """Steps far below the spacing of bfloat16 add up in the masters, and at last move a weight."""
    optimizer = make_optimizer(
        learning_rate=1e-5, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.999,
        weight_decay=0.0, max_grad_norm=1.0, param_dtype="bfloat16",
    )  # fmt: skip
    mesh = models.make_mesh({}, jax.devices()[:1])
    first = np.full(8, 1.0, np.float32)  # the next smaller bfloat16 is 1 - 2^-8 = 0.99609
    params, state = init_trained({"final_norm": {"scale": first}}, optimizer, mesh)
    gradient = {"final_norm": {"scale": jnp.ones(8)}}
    step, moved = jax.jit(optimizer.step), []
    for count in range(1, 301):
        params, state = step(gradient, state, params)
        (scale,) = jax.tree.leaves(params)
        assert scale.dtype == jnp.bfloat16
        # Adam's step for a constant gradient is the rate.
        np.testing.assert_allclose(state.masters["final_norm"]["scale"], 1 - count * 1e-5, 5e-6)
        moved.append(float(scale[0]))
    assert moved[0] == moved[190] == 1.0 and moved[-1] == 1 - 2**-8


@pytest.mark.soak
@pytest.mark.parametrize("offloaded", [False, True])
def test_rounded_parameters_train_like_float32(offloaded):
    (trained, losses) = three_updates("adamw", param_dtype="bfloat16", is_offloaded=offloaded)
    _, wanted = three_updates("adamw")
    np.testing.assert_allclose(losses, wanted, atol=0.02)
    assert isinstance(trained.optimizer, WithMasters)
    for param, master in zip(*map(jax.tree.leaves, (trained.params, trained.optimizer.masters))):
        assert (param.dtype, master.dtype) == (jnp.bfloat16, np.float32)
        np.testing.assert_array_equal(param, master.astype(jnp.bfloat16))
        assert not np.array_equal(param, master)


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
def test_an_update_that_is_not_finite_changes_nothing(offloaded):
    case = Case(dtype="bfloat16")
    policy, mesh = case.policy(), case.mesh()
    optimizer = optimizer_of("adamw", param_dtype="bfloat16", is_offloaded=offloaded)
    trained = init_trained(policy.init(jax.random.key(0)), optimizer, mesh)
    before = jax.device_get(trained)
    batch, advantages, _ = recorded()
    *after, scalars, _ = update_policy(
        *trained, batch, None, None, advantages * np.inf, policy=policy, optimizer=optimizer,
        temperature=TEMPERATURE, plan=RowPlan(mesh, **PLANS["rows"]), algorithm=ALGORITHM,
    )  # fmt: skip
    assert scalars["policy/update_skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, type(trained)(*jax.device_get(after)), before)


@pytest.mark.slow
def test_a_critic_takes_every_option_on_a_mesh():
    batch, returns, shift = recorded()
    found = []
    for sizes in ((1, 1, 1, 1), SPLIT):
        case = Case(sizes)
        mesh, model = case.mesh(), models.ValueModel.of(case.policy())
        settings = {"param_dtype": "bfloat16", "is_offloaded": True}
        optimizer = optimizer_of("adafactor, momentum", **settings)
        kernel = np.random.default_rng(1).normal(size=model.config.hidden_size)
        first = models.with_head(model.init(jax.random.key(0)), kernel, 0.5)
        critic = init_trained(first, optimizer, mesh)
        like = abstract_trained(model.shapes(), optimizer, mesh)
        for _ in range(2):
            critic, scalars = update_critic(
                critic, batch, shift, returns, model=model, optimizer=optimizer,
                plan=RowPlan(mesh, **PLANS["rows"]), algorithm=Algorithm(ppo, ppo.Options()),
            )  # fmt: skip
            jax.tree.map(check_place, critic, like)
        found.append(jax.device_get((critic.optimizer.masters, scalars["critic/loss"])))
    (one, loss), (split, split_loss) = found
    np.testing.assert_allclose(split_loss, loss, rtol=2e-2)  # rounded parameters
    assert_near(split, one, 2e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer.name": "adamm"}, "optimizer.name='adamm' is unknown; did you mean 'adamw'?"),
        ({"optimizer.momentum": 0.9}, "optimizer.momentum=0.9 is no option of optimizer.name='ad"),
        (
            ADAFACTOR | {"training.adam_b1": 0.8},
            "training.adam_b1=0.8 is no option of optimizer.name='adafactor', which has decay_exp",
        ),
        (ADAFACTOR | {"critic.adam_b2": 0.5}, "critic.adam_b2=0.5 is no option of optimizer.name="),
        (ADAFACTOR | {"optimizer.momentum": 1.0}, "optimizer.momentum=1.0 must be in [0, 1)."),
        (ADAFACTOR | {"optimizer.decay_exponent": 0.0}, "decay_exponent=0.0 must be above 0."),
        (
            ADAFACTOR | {"optimizer.first_moment_dtype": "bfloat16"},
            "optimizer.first_moment_dtype='bfloat16' is of a mean that momentum=0 does not have",
        ),
        ({"optimizer.first_moment_dtype": "int8"}, "optimizer.first_moment_dtype='int8' must be"),
        ({"model.param_dtype": "float16"}, "model.param_dtype='float16' must be one of"),
        ({"training.offload": ("critic",)}, "training.offload='critic' must be one of"),
    ],
)  # fmt: skip
def test_mistakes_are_named(fields, message):
    refused(re.escape(message), validate, config_with(**fields))


def test_every_choice_is_valid():
    for choice in CHOICES:
        validate(config_with(**CHOICES[choice]))
        assert direction_of(choice) == direction_of(choice)  # static under jit


def test_devices_without_such_memory_are_refused():
    memories = [types.SimpleNamespace(kind="device")]
    device = types.SimpleNamespace(device_kind="toaster", addressable_memories=lambda: memories)
    check_offload((), device)
    with pytest.raises(UserError, match="devices of kind 'toaster' with the memories device have"):
        check_offload(("optimizer",), device)
    check_offload(("optimizer",), jax.devices()[0])
    assert KIND == "pinned_host"


def test_jax_must_give_memory_back_to_a_replica_on_the_same_gpu(monkeypatch):
    gpu, tpu = (types.SimpleNamespace(platform=platform) for platform in ("gpu", "tpu"))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    config = config_with(**{"rollout.in_turns": True, "rollout.engine": "vllm"})
    check_gives_back(config, tpu)
    with pytest.raises(UserError, match="start the trainer with XLA_PYTHON_CLIENT_ALLOCATOR=plat"):
        check_gives_back(config, gpu)
    check_gives_back(config_with(**{"rollout.in_turns": True}), gpu)  # one process has both
    check_gives_back(config_with(**{"rollout.engine": "vllm"}), gpu)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    check_gives_back(config, gpu)
