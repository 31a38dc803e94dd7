"""Correlations of ER with ERV and ERA on long responses, under each window.

    python -m benchmarks.window_growth

The rank of the responses grows by a known law, or a small random model samples them. They show the
effect of the window on long responses: the window "release" limits the velocity.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from semrl_jax import models
from semrl_jax.analysis.responses import RANKS, measure_response
from semrl_jax.analysis.study import EQUAL_LENGTH, correlation
from semrl_jax.metrics import WINDOWS
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.types import HiddenStateParams, SampleRequest, SamplingParams

# Law -> function of the token t to which the number of directions is proportional.
LAWS = {"linear": lambda t: t, "square root": np.sqrt, "logarithm": np.log1p}
WIDE, SAMPLED = "wide", "sampled"
WIDTH = 128
WIDE_WIDTH = 768  # more directions than the last 512 tokens can have
PROMPT_TOKENS = 8
TEMPERATURES = (0.05, 0.2, 0.5, 1.0)  # from repetition to noise


class Found(NamedTuple):
    """ER, ERV and ERA of the responses of a source that have all three, under one window."""

    source: str
    window: str
    table: dict[str, np.ndarray]  # columns by the names of RANKS, `length` and `group_id`

    def r(self, order: int, subset: str = "all") -> float:
        """Correlation of ER with its velocity (1) or acceleration (2)."""
        return correlation(self.table, RANKS[0], RANKS[order], subset).r


def correlate(source: str, responses: list[Float[np.ndarray, "_ D"]], stride: int) -> list[Found]:
    """Measures every response under each window."""
    found = []
    for window in WINDOWS:
        options = {"names": ("effective_rank",), "stride": stride, "window": window}
        measured = [measure_response(states, **options) for states in responses]
        table = {name: np.array([row[name] for row in measured], np.float32) for name in RANKS}
        table["length"] = np.array([len(states) for states in responses])
        valid = ~np.isnan([table[name] for name in RANKS]).any(axis=0)
        table = {name: column[valid] for name, column in table.items()}
        found.append(Found(source, window, table | {"group_id": np.arange(valid.sum())}))
    return found


def growth_study(
    *, num_responses: int = 32, max_tokens: int = 2048, stride: int = 128
) -> list[Found]:
    """Correlates ER with ERV and ERA on long responses of every law and of a random model.

    Lengths are uniform in max_tokens / 8 to max_tokens. The responses of one source also differ in
    another quantity. For a law, this is the number of directions at max_tokens, an eighth to three
    quarters of WIDTH; for "wide", the decay of `wide_states`; for "sampled", the temperature.
    """
    rng = np.random.default_rng(0)

    def lengths():
        return rng.integers(max_tokens // 8, max_tokens, size=num_responses, endpoint=True)

    found = []
    for law, growth in LAWS.items():
        responses = [
            growing_states(
                law,
                num_tokens=int(num_tokens),
                rate=rng.uniform(WIDTH / 8, 3 * WIDTH / 4) / float(growth(max_tokens)),
                width=WIDTH,
                rng=rng,
            )
            for num_tokens in lengths()
        ]
        found += correlate(law, responses, stride)
    responses = [
        wide_states(num_tokens=int(num_tokens), decay=rng.uniform(0.0, 0.5), rng=rng)
        for num_tokens in lengths()
    ]
    found += correlate(WIDE, responses, stride)
    sampled = sampled_states(num_responses=num_responses, num_tokens=max_tokens)
    # A prefix of a sampled response equals a response with a lower token limit.
    responses = [states[:num_tokens] for states, num_tokens in zip(sampled, lengths())]
    found += correlate(SAMPLED, responses, stride)
    return found


def growing_states(
    law: str, *, num_tokens: int, rate: float, width: int, rng: np.random.Generator
) -> Float[np.ndarray, "T D"]:
    """Normal rows in the first rate * law(t) directions, at least one and at most `width`.

    The effective rank of a prefix grows with its number of directions, but is smaller, because the
    latest directions have few rows.
    """
    directions = np.clip(rate * LAWS[law](np.arange(1.0, num_tokens + 1)), 1, width)
    rows = rng.normal(size=(num_tokens, width))
    return np.where(np.arange(width) < np.round(directions)[:, None], rows, 0.0).astype(np.float32)


def wide_states(
    *, num_tokens: int, decay: float, rng: np.random.Generator
) -> Float[np.ndarray, "T D"]:
    """Normal rows in WIDE_WIDTH directions, the k-th with a standard deviation of k^-decay."""
    deviations = np.arange(1.0, WIDE_WIDTH + 1) ** -decay
    return (rng.normal(size=(num_tokens, WIDE_WIDTH)) * deviations).astype(np.float32)


def sampled_states(*, num_responses: int, num_tokens: int) -> list[Float[np.ndarray, "_ D"]]:
    """Final states of responses of a random model, an equal share at each of TEMPERATURES."""
    config = models.DecoderConfig(
        vocab_size=512, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=WIDTH // 4, max_position_embeddings=PROMPT_TOKENS + num_tokens,
        tie_embeddings=False,
    )  # fmt: skip
    policy = models.Policy(config)
    params = policy.init(jax.random.key(0))
    prompts = np.random.default_rng(0).integers(
        config.vocab_size, size=(num_responses, PROMPT_TOKENS), dtype=np.int32
    )
    requests = [SampleRequest(str(i), i, 0, prompt, i) for i, prompt in enumerate(prompts)]
    states = []
    replica = LocalReplica(JaxEngine(policy, chunk=64, max_response_tokens=num_tokens))
    with RolloutClient(local=replica, run_id="growth", attempt_id="0") as client:
        client.connect(model_hash=config.hash, tokenizer_hash="", vocab_size=config.vocab_size)
        version = client.sync_weights(
            models.tensor_specs(config, "float32"),
            lambda: (array for _, array in models.iterate_hf_tensors(params, config, "float32")),
            step=0,
        )
        for i, temperature in enumerate(TEMPERATURES):
            rollouts = client.generate(
                requests[i :: len(TEMPERATURES)],
                SamplingParams(num_tokens, temperature=temperature),
                HiddenStateParams((-1,), "float32"),
                version=version,
            )
            states += [rollout.hidden_states[:, 0] for rollout in rollouts]
    return states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--responses", type=int, default=32, help="per source")
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest response")
    arguments = parser.parse_args()
    found = growth_study(num_responses=arguments.responses, max_tokens=arguments.tokens)
    print("source, window: r of ER with ERV, with ERV at equal length, with ERA")
    for each in found:
        values = each.r(1), each.r(1, EQUAL_LENGTH), each.r(2)
        print(f"{each.source}, {each.window}:", *(f"{value:.2f}" for value in values))


if __name__ == "__main__":
    main()
