"""References of single data sources, and those on replicas."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.cluster.peers import Peers
from semrl_jax.training import references
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.references import References, Remote
from tests.training.test_conversations import CONFIG
from tests.training.test_packing import mesh_of
from tests.training.test_teacher_prompts import batch_of


def remote_of(policy, params, order=1):
    """A reference on replicas that compute its states exactly."""

    def final_states(sequences):
        for index in list(range(len(sequences)))[::order]:
            ids = sequences[index][None]
            places = np.arange(ids.shape[1], dtype=np.int32)[None]
            arrays = map(jnp.asarray, (ids, places, np.ones_like(ids)))
            states = policy.final_states(params, *arrays)
            yield index, np.asarray(states[0])

    matrix = params["embed"]["embedding"] if policy.config.tie_embeddings else None
    matrix = np.asarray(params["head"]["kernel"].T if matrix is None else matrix)
    return Remote(policy, matrix, final_states)


PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2], [3], [1, 2])]
RESPONSES = [([1, 2, 3], [1, 1, 1]), ([4, 5, 6, 7], [1, 0, 1, 0]), ([2], [1])]


@pytest.mark.parametrize(
    ("tied", "dtype", "order"), [(True, "float32", -1), (False, "bfloat16", 1)]
)
def test_states_of_replicas_give_the_log_probabilities_of_the_pass(tied, dtype, order):
    """With context in a response, and in any order. A bfloat16 state has 8 bits."""
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    policy = models.Policy(config, dtype)
    params = policy.init(jax.random.key(0))
    batch, plan = batch_of(PROMPTS, RESPONSES), RowPlan(mesh_of(1))
    known = batch_logprobs(params, batch, policy=policy, temperature=0.7, plan=plan).logprobs
    options = {"peers": Peers(), "device_lock": contextlib.nullcontext()}
    found = remote_of(policy, params, order).logprobs(batch, temperature=0.7, **options)
    assert found.dtype == np.float32 and (found != 0).tolist() == batch.response_mask.tolist()
    np.testing.assert_allclose(found, known, atol=2e-6 if dtype == "float32" else 0.05)


def test_a_process_sends_the_log_probabilities_of_its_own_sequences(monkeypatch):
    """Hundreds of processes that each sent values for all tokens would fill every memory."""
    policy = models.Policy(CONFIG)
    batch = batch_of(PROMPTS, RESPONSES)
    remote = remote_of(policy, policy.init(jax.random.key(0)))
    options = {"temperature": 0.7, "device_lock": contextlib.nullcontext()}
    sent = []

    def gather(peers, phase, data):
        sent.append(data)
        return sent if len(sent) == peers.count else sent + [b""] * (peers.count - len(sent))

    monkeypatch.setattr(references, "gather_bytes", gather)
    for index in (0, 1):
        peers = types.SimpleNamespace(
            index=index,
            count=2,
            phase=lambda phase: contextlib.nullcontext(),
            gather=lambda phase, value: [value] * 2,
        )
        with contextlib.suppress(ValueError) if index == 0 else contextlib.nullcontext():
            found = remote.logprobs(batch, peers=peers, **options)
    monkeypatch.undo()
    np.testing.assert_array_equal(found, remote.logprobs(batch, peers=Peers(), **options))
    assert [len(data) // 4 for data in sent] == [4, 2]  # tokens of the policy


def test_a_prompt_has_the_reference_of_its_source():
    batch, first, second = batch_of(PROMPTS, RESPONSES), object(), object()
    numbers = {data.prompt_key(PROMPTS[0]): 2}
    parts = References((None, first, second), numbers).parts(batch)
    assert [(model, rows.tolist()) for model, rows in parts] == [(None, [1]), (second, [0, 2])]
