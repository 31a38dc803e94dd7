"""Requests for an engine, and the values expected of its responses."""

import jax
import numpy as np
import scipy.special

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


def processed_logprobs(logits, sampling, rollout=None):
    """Log-probabilities [T, V] that a token is sampled with, in float64; `rollout` for penalties.

    First ends that are too early and penalties, then temperature, min-p, top-k, top-p, as in vLLM.
    """
    logits = np.array(logits, np.float64)
    for t, row in enumerate(logits if rollout is not None else ()):
        used = rollout.response_ids[:t].tolist()
        for token in {*used, *rollout.prompt_ids.tolist()}:
            is_positive = row[token] > 0
            row[token] *= sampling.repetition_penalty ** (-1 if is_positive else 1)
        for token in set(used):
            row[token] -= sampling.frequency_penalty * used.count(token)
            row[token] -= sampling.presence_penalty
        if t < sampling.min_tokens:
            row[[*sampling.eos_token_ids, *sampling.stop_token_ids]] = -np.inf
    if sampling.temperature == 0:
        return scipy.special.log_softmax(logits, axis=-1)
    logits = logits / sampling.temperature
    order = np.argsort(-logits, axis=-1)
    ranked = np.take_along_axis(logits, order, -1)
    if sampling.min_p:
        ranked[ranked < ranked[:, :1] + np.log(sampling.min_p)] = -np.inf
    if sampling.top_k:
        ranked[:, sampling.top_k :] = -np.inf
    p = np.exp(ranked - scipy.special.logsumexp(ranked, axis=-1, keepdims=True))
    ranked[np.cumsum(p, -1) - p >= sampling.top_p] = -np.inf  # what is likelier suffices
    ranked -= scipy.special.logsumexp(ranked, axis=-1, keepdims=True)
    found = np.empty_like(ranked)
    np.put_along_axis(found, order, ranked, -1)
    return found


def as_bytes(rollouts):
    return {
        r.sample_id: (
            r.response_ids.tobytes(), r.rollout_logprobs.tobytes(),
            None if r.hidden_states is None else r.hidden_states.tobytes(), r.finish_reason,
        )
        for r in rollouts
    }  # fmt: skip
