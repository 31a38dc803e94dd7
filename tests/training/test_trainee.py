"""Trained models: several in one loop, each with its own loss; the arrays of a batch by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from semrl_jax import models
from semrl_jax.shaping import init_shaping_state
from semrl_jax.support import programs
from semrl_jax.training import trainee as trainee_module
from semrl_jax.training.micro_batches import split_rows
from semrl_jax.training.optimizer import Optimizer
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.train_state import init_state, init_trained
from semrl_jax.training.trainee import Inputs, MiniBatch, NonFiniteUpdates, Trainee, update_all
from tests.training.test_packing import batch_of

DESCENT = Optimizer(*optax.sgd(0.5))  # half of the gradient


@dataclasses.dataclass(frozen=True)
class Distance:
    """Half of the squared distance to the targets of a field, as a mean over the rows."""

    name: str
    field: str

    def inputs(self, batch, plan):
        targets = np.asarray(getattr(batch, self.field))
        return Inputs(split_rows(targets, 2), len(targets) // 2, {f"{self.name}/rows": 4.0})

    def __call__(self, params, frozen, targets):
        loss = jnp.sum((params["final_norm"]["scale"][None] - targets) ** 2) / 8
        return loss, ({f"{self.name}/loss": loss}, ())


def mesh_of_one():
    return models.make_mesh({}, jax.devices()[:1])


def setup():
    """Two trainees at 0, which learn advantages and returns, and a mini-batch of four rows."""
    mesh, zeros = mesh_of_one(), {"final_norm": {"scale": np.zeros(2, np.float32)}}
    trainees = (
        Trainee("policy", DESCENT, Distance("policy", "advantages")),
        Trainee("critic", DESCENT, Distance("critic", "returns"), in_parts=False),
    )
    state = init_state(zeros, DESCENT, init_shaping_state(), mesh)
    state = state.with_trained("critic", init_trained(zeros, DESCENT, mesh))
    targets = np.arange(8, dtype=np.float32).reshape(4, 2)
    batch = MiniBatch(batch_of([(1, 2)] * 4), advantages=targets, returns=-targets)
    return trainees, state, batch, RowPlan(mesh)


def scales(state):
    return [np.asarray(each["final_norm"]["scale"]) for each in (state.params, state.critic.params)]


def test_each_trainee_takes_a_step_on_its_own_loss():
    trainees, state, batch, plan = setup()
    state, scalars, outputs = update_all(trainees, state, batch, plan, 2)
    # The gradient is w - mean(targets), of which w goes half.
    np.testing.assert_allclose(scales(state), [[1.5, 2.0], [-1.5, -2.0]])
    assert scalars["policy/loss"] == scalars["critic/loss"] == 140 / 8
    assert scalars["critic/grad_norm"] == 5.0 and scalars["policy/rows"] == 4.0
    assert outputs == {"policy": None, "critic": None} and int(state.skipped_in_row) == 0


def test_a_trainee_that_is_left_out_stays_as_it_is():
    trainees, state, batch, plan = setup()
    state, scalars, _ = update_all(trainees[1:], state, batch, plan, 2)
    np.testing.assert_allclose(scales(state), [[0, 0], [-1.5, -2.0]])
    assert not any(name.startswith("policy") for name in scalars)


def test_the_one_that_is_not_finite_is_named():
    trainees, state, batch, plan = setup()
    broken = batch._replace(returns=np.full_like(batch.returns, np.inf))
    state, scalars, _ = update_all(trainees, state, broken, plan, 2)
    assert (scalars["policy/update_skipped"], scalars["critic/update_skipped"]) == (0, 1)
    np.testing.assert_allclose(scales(state), [[1.5, 2.0], [0, 0]])
    with pytest.raises(NonFiniteUpdates, match="2 updates in a row") as caught:
        update_all(trainees, state, broken, plan, 2)
    assert caught.value.models == ("critic",)
    assert np.isinf(caught.value.minibatch.named()["returns"]).any()


def test_a_good_update_forgets_the_skipped_ones():
    trainees, state, batch, plan = setup()
    broken = batch._replace(returns=batch.returns * np.nan)
    state, _, _ = update_all(trainees, state, broken, plan, 2)
    assert int(state.skipped_in_row) == 1
    state, _, _ = update_all(trainees, state, batch, plan, 2)
    assert int(state.skipped_in_row) == 0


@pytest.mark.parametrize("in_parts", [True, False])
def test_programs_run_side_by_side_only_where_they_may(in_parts, monkeypatch):
    trainees, state, batch, plan = setup()
    called = []
    real = trainee_module.row_gradients
    monkeypatch.setattr(programs, "num_side_by_side", lambda mesh: 2)
    monkeypatch.setattr(
        trainee_module, "row_gradients", lambda *a, **k: called.append(0) or real(*a, **k)
    )
    trainee = dataclasses.replace(trainees[0], in_parts=in_parts)
    state, _, _ = update_all([trainee], state, batch, plan, 2)
    assert len(called) == (2 if in_parts else 0)
    np.testing.assert_allclose(scales(state)[0], [1.5, 2.0])


def test_arrays_of_a_batch_have_names():
    _, _, batch, _ = setup()
    named = batch.named()
    assert named.keys() == {
        "token_ids", "positions", "segment_ids", "response_mask", "rollout_logprobs", "advantages",
        "returns",
    }  # fmt: skip
    np.testing.assert_array_equal(named["response_mask"], batch.rows.response_mask)
