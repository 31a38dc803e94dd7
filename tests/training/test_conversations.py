"""Episodes of several conversations: each is computed as if it were a sequence of its own."""

import dataclasses

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.training.packing import RowPlan, lay_out
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.rollout_batch import pad_batch
from tests.fixtures import make_scored
from tests.training.test_packing import mesh_of

CONFIG = models.DecoderConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=16, tie_embeddings=True,
)  # fmt: skip
PLANS = {
    "rows": {},
    "shared prompts": {"micro_batch_size": 4},
    "packed": {"micro_batch_tokens": 128, "pack_sequences": True},
}


def rollout_of(prompt, parts):
    """A rollout of parts: a conversation, token ids, and whether the policy wrote them."""
    ids = np.concatenate([part for _, part, _ in parts])
    numbers = np.concatenate([np.full(len(part), number) for number, part, _ in parts])
    mask = np.concatenate([np.full(len(part), own) for _, part, own in parts])
    scored = make_scored(response_ids=ids.astype(np.int32), response_mask=mask)
    return dataclasses.replace(
        scored.rollout, prompt_ids=prompt, conversations=numbers.astype(np.int32)
    )


def alone(rollout, number):
    """One conversation of an episode, as a rollout."""
    own = rollout.conversations == number
    prompt, ids, mask = rollout.prompt_ids, rollout.response_ids[own], rollout.response_mask[own]
    if number:  # its first context is its prompt
        first = int(np.argmax(mask))
        prompt, ids, mask = ids[:first], ids[first:], mask[first:]
    scored = make_scored(response_ids=ids, response_mask=mask)
    return dataclasses.replace(scored.rollout, prompt_ids=prompt)


def logprobs_of(rollouts, options, params, policy):
    plan = RowPlan(mesh_of(1), **options)
    batch = pad_batch(rollouts, pad_token_id=0, max_prompt_tokens=16, max_response_tokens=64)
    found = batch_logprobs(params, batch, policy=policy, plan=plan, temperature=1.0)
    return [np.asarray(row)[mask] for row, mask in zip(found.logprobs, batch.response_mask)]


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_token_attends_to_its_conversation_alone(options):
    random = np.random.default_rng(0)

    def words(count):
        return random.integers(1, 61, count).astype(np.int32)

    prompt = words(5)
    rollouts = [
        rollout_of(
            prompt,
            [
                (0, words(3), True), (1, words(6), False), (1, words(4), True),
                (0, words(2), False), (0, words(3), True), (2, words(4), False),
                (2, words(1), True), (1, words(2), False), (1, words(3), True),
            ],
        ),
        rollout_of(prompt, [(0, words(9), True)]),
        rollout_of(prompt, [(0, words(2), True), (1, words(3), False), (1, words(5), True)]),
    ]  # fmt: skip
    policy = models.Policy(CONFIG)
    params = policy.init(jax.random.key(0))
    found = logprobs_of(rollouts, options, params, policy)
    for rollout, values in zip(rollouts, found):
        numbers = rollout.conversations[rollout.response_mask]
        for number in np.unique(numbers):
            (expected,) = logprobs_of([alone(rollout, number)], {}, params, policy)
            # 2e-5: float32 sums in another order.
            np.testing.assert_allclose(values[numbers == number], expected, atol=2e-5)


def test_segments_and_positions_by_hand():
    """Conversations that alternate are one after the other in a row: kernels count columns."""
    prompt = np.array([1, 2], np.int32)
    parts = [(0, np.array([3]), True), (1, np.array([4, 5]), False), (1, np.array([6]), True),
             (0, np.array([7]), False), (0, np.array([8]), True)]  # fmt: skip
    batch = pad_batch(
        [rollout_of(prompt, parts)] * 2, pad_token_id=0, max_prompt_tokens=2, max_response_tokens=6
    )
    rows = lay_out(batch, RowPlan(mesh_of(1), micro_batch_size=2)).rows
    np.testing.assert_array_equal(rows.token_ids[0, 0, :8], [1, 2, 3, 7, 8, 4, 5, 6])
    np.testing.assert_array_equal(rows.segment_ids[0, 0, :8], [1, 1, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(rows.positions[0, 0, :8], [0, 1, 2, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(rows.response_ids[0, 0, :3], [3, 6, 8])
    np.testing.assert_array_equal(rows.sources[0, 0, :3], [1, 6, 3])
