"""Samples `rollouts.npz` from a tiny random Qwen2 by transformers; run once.

    python -m tests.parity.record

The end token's logit is raised, which only sets the lengths: training scores the tokens anew.
Seeds are tried in order until the 16 responses hold every edge the comparison needs.
"""

import pathlib

import numpy as np
import torch

from tests.parity.models import EOS, VOCAB_SIZE, random_model

FILE = pathlib.Path(__file__).parent / "rollouts.npz"
GROUPS, GROUP_SIZE, MAX_TOKENS, STRIDE = 4, 4, 40, 4
END_BIAS = 1.2  # on the end token's logit: lengths near 15, so that 40 truncates few
# The second group is all equal; no two groups share their rewards.
REWARDS = np.float32([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, -0.5, 0.5, -1]])


def sample_rollouts(seed: int) -> dict[str, np.ndarray]:
    """Ragged prompts and responses as flat arrays with lengths."""
    model = random_model(tied=False)
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    prompts, responses, logprobs = [], [], []
    for length in random.choice(np.arange(3, 12), GROUPS, replace=False):
        prompt = random.integers(2, VOCAB_SIZE, length)
        for _ in range(GROUP_SIZE):
            response, chosen = sample_response(model, prompt)
            prompts.append(prompt)
            responses.append(response)
            logprobs.append(chosen)
    return {
        "prompt_ids": np.concatenate(prompts).astype(np.int32),
        "prompt_lengths": np.array([len(ids) for ids in prompts], np.int32),
        "response_ids": np.concatenate(responses).astype(np.int32),
        "response_lengths": np.array([len(ids) for ids in responses], np.int32),
        "rollout_logprobs": np.concatenate(logprobs).astype(np.float32),
        "rewards": REWARDS.reshape(-1),
    }


@torch.no_grad()
def sample_response(model, prompt: np.ndarray) -> tuple[list[int], list[float]]:
    """Ancestral sampling of the biased distribution up to the end token or the limit."""
    ids, response, chosen = list(map(int, prompt)), [], []
    while len(response) < MAX_TOKENS and EOS not in response:
        logits = model(torch.tensor([ids])).logits[0, -1]
        logits[EOS] += END_BIAS
        log_p = torch.log_softmax(logits, -1)
        token = int(torch.multinomial(log_p.exp(), 1))
        ids.append(token)
        response.append(token)
        chosen.append(float(log_p[token]))
    return response, chosen


def has_every_edge(rollouts: dict[str, np.ndarray]) -> bool:
    """One token; one and two whole strides; truncated; and a long one in every group."""
    lengths = rollouts["response_lengths"].reshape(GROUPS, GROUP_SIZE)
    ends = rollouts["response_ids"][np.cumsum(rollouts["response_lengths"]) - 1]
    truncated = ends != EOS
    return bool(
        (lengths == 1).sum() == 1
        and not (lengths[1] == 1).any()
        and 1 <= truncated.sum() <= 3
        and len(np.unique(lengths)) >= 10
        and ((lengths >= STRIDE) & (lengths < 2 * STRIDE)).any()
        and ((lengths >= 2 * STRIDE) & (lengths < 3 * STRIDE)).any()
        and ((lengths >= 3 * STRIDE).sum(1) >= 1).all()
    )


def main():
    seed = 0
    while not has_every_edge(rollouts := sample_rollouts(seed)):
        seed += 1
    np.savez_compressed(FILE, seed=seed, **rollouts)
    lengths = rollouts["response_lengths"].reshape(GROUPS, GROUP_SIZE).tolist()
    print(f"seed {seed}: response lengths {lengths}")


if __name__ == "__main__":
    main()
