"""References of single data sources, and those on replicas."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.cluster.peers import Peers
from semrl_jax.models import AXES, make_mesh
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.references import Remote
from tests.training.test_conversations import CONFIG
from tests.training.test_teacher_prompts import batch_of

TEMPERATURE = 0.7


def remote_of(policy, params, order=1):
    """A reference on replicas that compute its states exactly."""

    def final_states(sequences):
        for index in list(range(len(sequences)))[::order]:
            ids = sequences[index][None]
            places = np.arange(ids.shape[1], dtype=np.int32)[None]
            states = policy.final_states(params, ids, places, np.ones_like(ids))
            yield index, np.asarray(states[0])

    matrix = params["embed"]["embedding"] if policy.config.tie_embeddings else None
    matrix = np.asarray(params["head"]["kernel"].T if matrix is None else matrix)
    return Remote(policy, matrix, final_states)


@pytest.mark.parametrize("tied", [True, False])
def test_states_of_replicas_give_the_log_probabilities_of_the_pass(tied):
    """With context in a response, and another conversation."""
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    policy = models.Policy(config)
    params = policy.init(jax.random.key(0))
    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [3], [1, 2])]
    responses = [([1, 2, 3], [1, 1, 1]), ([4, 5, 6, 7], [1, 0, 1, 0]), ([2], [1])]
    batch = batch_of(prompts, responses)
    mesh = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    known = batch_logprobs(
        params, batch, policy=policy, temperature=TEMPERATURE, plan=RowPlan(mesh)
    ).logprobs
    options = {
        "temperature": TEMPERATURE,
        "peers": Peers(),
        "device_lock": contextlib.nullcontext(),
    }
    found = remote_of(policy, params).logprobs(batch, **options)
    assert found.dtype == np.float32 and (found != 0).tolist() == batch.response_mask.tolist()
    np.testing.assert_allclose(found, known, atol=2e-6)
