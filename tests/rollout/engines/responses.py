"""Requests for an engine, and the values expected of its responses."""

import jax
import numpy as np

from semrl_jax.types import SampleRequest


def make_requests(num_groups=5, group_size=4, seed=0, shortest=1):
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 31, random.integers(shortest, 14)) for _ in range(num_groups)]
    return [
        SampleRequest(
            f"{group}/{sample}", group, sample, prompts[group].astype(np.int32),
            int(random.integers(2**63)),
        )
        for group in range(num_groups)
        for sample in range(group_size)
    ]  # fmt: skip


def full_forward(policy, params, rollouts, temperature=1.0):
    """States and log-probabilities of all responses by one uncached, right-padded pass."""
    sequences = [np.concatenate([r.prompt_ids, r.response_ids]) for r in rollouts]
    columns = np.arange(-(-max(map(len, sequences)) // 64) * 64)
    ids = np.stack([np.resize(sequence, len(columns)) for sequence in sequences])
    segments = (columns[None] < np.array([[len(sequence)] for sequence in sequences])).astype("i4")
    positions = np.broadcast_to(columns.astype(np.int32), ids.shape)

    @jax.jit
    def forward(params, ids, positions, segments):
        states = policy.final_states(params, ids, positions, segments)[:, :-1]
        return states, policy.token_logprobs(params, states, ids[:, 1:], temperature=temperature)[0]

    states, logprobs = jax.device_get(forward(params, ids, positions, segments))
    for row, rollout in enumerate(rollouts):
        response = slice(len(rollout.prompt_ids) - 1, len(sequences[row]) - 1)
        yield rollout, states[row, response], logprobs[row, response]


def as_bytes(rollouts):
    return {
        r.sample_id: (
            r.response_ids.tobytes(), r.rollout_logprobs.tobytes(),
            None if r.hidden_states is None else r.hidden_states.tobytes(), r.finish_reason,
        )
        for r in rollouts
    }  # fmt: skip
