"""Updates with a prompt computed once for several responses, or once for each response.

    python -m benchmarks.shared_prompts

Both sides take the same optimiser steps on the same batches: 8 prompts, 8 responses to each, GRPO
without KL, float32. The model has the sizes of SmolLM2-135M and random weights. Lengths of
responses are uniform between half of the longest and the longest. `alone` has a prompt in each row,
and `shared` is what a run does. Sides alternate in order.

The floor is the arithmetic of tokens without padding, each prompt once, at the measured rate of
this machine's products: 6 multiplications and additions per parameter of a layer and token, and 8
per parameter of the output matrix and token of a response, whose logits are computed twice.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from benchmarks.results import median_interval, table
from configs import default
from semrl_jax import models
from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.training.optimizer import make_optimizer
from semrl_jax.training.packing import RowPlan, lay_out
from semrl_jax.training.policy_update import PolicyLoss
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.training.train_state import init_trained
from semrl_jax.training.trainee import MiniBatch, Trainee
from semrl_jax.types import Rollout, RolloutBatch

ALONE, SHARED = SIDES = ("alone", "shared")
PROMPTS, GROUP = 8, 8
LENGTHS = ((45, 24), (130, 128))  # of a prompt, and of the longest response
MODEL = models.DecoderConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, tie_embeddings=True, model_type="llama", rope_theta=1e5,
)  # fmt: skip


def batch_of(prompt: int, longest: int, seed: int) -> RolloutBatch:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(PROMPTS * GROUP):
        if index % GROUP == 0:
            prompt_ids = rng.integers(0, MODEL.vocab_size, prompt, np.int32)
        length = rng.integers(longest // 2, longest + 1)
        found.append(
            Rollout(
                sample_id=str(index), group_id=index // GROUP, sample_index=index % GROUP,
                prompt_ids=prompt_ids, response_ids=rng.integers(0, 49_152, length, np.int32),
                rollout_logprobs=np.full(length, -1.0, np.float32), rollout_raw_logprobs=None,
                finish_reason="eos", versions=(),
            )
        )  # fmt: skip
    limits = {"max_prompt_tokens": prompt, "max_response_tokens": longest}
    return pad_batch(found, pad_token_id=0, **limits)


@contextlib.contextmanager
def side(name: str) -> Iterator[None]:
    """Runs the block as one of the sides."""
    shared = models.Policy.attention_columns
    if name == ALONE:
        models.Policy.attention_columns = 0.0
    try:
        yield
    finally:
        models.Policy.attention_columns = shared


def products_per_s() -> float:
    """Multiplications and additions per second of a large product."""
    a, product = jnp.ones((2048, 2048)), jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(product(a, a))
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


def speed(prompt: int, longest: int, num_pairs: int) -> str:
    """The times of both sides as Markdown."""
    config = default.get_config()
    config.algorithms.loss.kl_coefficient = 0.0
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    policy, plan = models.Policy(MODEL, mesh=mesh), RowPlan(mesh, micro_batch_size=8)
    optimizer = make_optimizer(
        learning_rate=1e-5, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.999,
        weight_decay=0.01, max_grad_norm=1.0,
    )  # fmt: skip
    algorithm = load_algorithm(config.algorithms.to_dict())
    trainee = Trainee("policy", optimizer, PolicyLoss(policy, 1.0, algorithm))
    trained = init_trained(policy.init(jax.random.key(0)), optimizer, mesh)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    batch = batch_of(prompt, longest, 0)
    advantages = np.random.default_rng(0).normal(size=batch.response_mask.shape).astype(np.float32)
    minibatch, layouts = MiniBatch(batch, advantages=advantages), {}
    for index in range(-1, num_pairs):  # the first pair compiles
        for name in SIDES[:: 1 if index % 2 else -1]:
            with side(name):
                layouts[name] = lay_out(batch, plan, policy.attention_columns)
                began = time.perf_counter()
                trained, _, _ = trainee.update(trained, minibatch, plan)
                jax.block_until_ready(trained)
                if index >= 0:
                    seconds[name].append(time.perf_counter() - began)
    slots = int(batch.response_mask.sum())
    arithmetic = (PROMPTS * prompt + slots) * 6 * MODEL.num_layers * MODEL.layer_products
    arithmetic += slots * 8 * MODEL.vocab_size * MODEL.hidden_size
    floor = arithmetic / products_per_s()
    ratios = [a / b for a, b in zip(seconds[ALONE], seconds[SHARED])]
    low, high, level = median_interval(ratios)
    rows = []
    for name, own in seconds.items():
        shape = layouts[name].rows.token_ids.shape
        median = statistics.median(own)
        padding = layouts[name].scalars()["policy/padding_fraction"]
        rows.append(
            [name, f"{median:.2f}", f"{median / floor:.2f}", f"{shape}", f"{100 * padding:.0f} %"]
        )
    return (
        f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}] times as fast with shared "
        f"prompts ({100 * level:.0f} % interval of the median of {len(ratios)} pairs): prompts "
        f"of {prompt} tokens, responses of {longest // 2} to {longest}. The floor takes "
        f"{floor:.2f} s.\n\n"
        + table(("Side", "s per update", "times the floor", "rows", "padding"), rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    results.add_option(parser)
    arguments = parser.parse_args()
    text = "\n\n".join(speed(*lengths, arguments.pairs) for lengths in LENGTHS)
    results.show("A prompt for several responses", text, arguments.json)


if __name__ == "__main__":
    main()
