"""The critic on every layout: a mesh and packed rows change nothing but rounding."""

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.algorithms import ppo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.training.critic_update import batch_values
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.train_state import abstract_trained, init_trained
from tests.training.test_mesh import OPTIMIZER, PLANS, Case, recorded
from tests.training.updates import update_critic

ALGORITHM = Algorithm(ppo, ppo.Options(value_clip=0.2))


def two_updates(case):
    """Values before each update, scalars of it, and the parameters after both."""
    mesh, (batch, returns, shift) = case.mesh(), recorded()
    model = models.ValueModel.of(case.policy())
    plan = RowPlan(mesh, **PLANS[case.plan])
    kernel = np.random.default_rng(1).normal(size=model.config.hidden_size)
    params = models.with_head(model.init(jax.random.key(0)), kernel, 0.5)
    critic = init_trained(params, OPTIMIZER, mesh)
    expected = abstract_trained(model.shapes(), OPTIMIZER, mesh)
    jax.tree.map(check_layout, critic, expected)
    found = []
    for _ in range(2):
        values = batch_values(critic.params, batch, model=model, plan=plan)
        critic, scalars = update_critic(
            critic, batch, values + shift, returns,
            model=model, optimizer=OPTIMIZER, plan=plan, algorithm=ALGORITHM,
        )  # fmt: skip
        found.append((np.asarray(values), jax.device_get(scalars)))
    return found, jax.device_get(critic)


def check_layout(leaf, like):
    assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
    assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


@pytest.mark.slow
def test_two_updates_are_those_of_whole_rows_on_one_device():
    """On packed rows over three axes; test_optimizer.py has another mesh."""
    steps, critic = two_updates(Case((2, 1, 2, 2), "packed"))
    wanted_steps, wanted = two_updates(Case(plan="whole"))
    mask = recorded()[0].response_mask
    for (values, scalars), (want, wanted_scalars) in zip(steps, wanted_steps, strict=True):
        # Float32 sums in another order, of values near 5; after an update, Adam divides a few
        # roundings by roundings, as in test_mesh.py.
        np.testing.assert_allclose(values, want, rtol=0, atol=5e-4)
        assert not values[~mask].any() and np.abs(values[mask]).max() > 1
        for name, value in wanted_scalars.items():
            np.testing.assert_allclose(scalars[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert 0.1 < wanted_steps[0][1]["critic/clip_fraction"] < 0.9
    assert wanted_steps[0][1]["critic/update_skipped"] == 0
    for own, want in zip(*(jax.tree.leaves(tree.params) for tree in (critic, wanted)), strict=True):
        np.testing.assert_allclose(own, want, rtol=0, atol=5e-4)
