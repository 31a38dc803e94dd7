"""The memory of an update, and the time that padding costs.

    python -m benchmarks.memory

Bytes are read from compiled programs; nothing is executed. An update holds, in float32 and without
the reference model (which adds 4 bytes per parameter, or 2 in bfloat16):

    bytes = 20 P + n k L + w n k + 16 l V

- P parameters: 4 bytes each for the parameter, two Adam moments (these three are updated in place),
  the sum of gradients and the gradient of one micro-batch.
- n tokens of a micro-batch on one device, padding included. L layers.
- k bytes kept per token and layer for the backward pass:

    k = 4 D                                              remat=full: the input of the layer
    k = 4 (D + 2 D + N H + 2 K H + 2 F)                  remat=dots: and the results of products
    k = 4 (7 D + 4 N H + 5 K H + 4 F + 2 N S)            remat=none: and all values between them

Here D is the width, N the heads, K the key-value heads, H the width of a head, F the feed-forward
width and S the columns. Attention keeps N S weights per token, and their masked scores. The last
two terms are what the backward pass works on. w n k is one layer (w = 1, k of remat=none) under
full and dots. 16 l V is for the logits of l slots over V entries, their probabilities and
gradients. Only the first term is exact. The others show which sizes matter, to within the factor
that the table shows.

Times are of whole updates, one after the other, with and without packing under the same number of
tokens. Lengths follow a log-normal distribution truncated at the limit. Pairs alternate in order.
The median of the ratio comes first.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.results import median_interval
from semrl_jax import models
from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.training.optimizer import make_optimizer
from semrl_jax.training.packing import Layout, RowPlan, lay_out, take_values
from semrl_jax.training.policy_update import PolicyLoss, SlotValues
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.training.train_state import Trained, abstract_trained
from semrl_jax.training.trainee import MiniBatch, Trainee, update_rows
from semrl_jax.training.update_memory import update_parts
from semrl_jax.types import Rollout, RolloutBatch

PROMPT_TOKENS, RESPONSE_TOKENS = 32, 224
LONGEST = PROMPT_TOKENS + RESPONSE_TOKENS
ALGORITHM = Algorithm(grpo, grpo.Options())


def architecture(num_layers: int) -> models.DecoderConfig:
    """A small decoder of the given depth."""
    return models.DecoderConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_layers=num_layers, num_heads=4,
        num_kv_heads=2, head_dim=32,
    )  # fmt: skip


def skewed_batch(num_responses: int, vocab_size: int, seed: int = 0) -> RolloutBatch:
    """Responses of which a few reach the limit and most are far below it."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(np.log(RESPONSE_TOKENS / 5), 0.8, num_responses)
    rollouts = []
    for index, length in enumerate(lengths.astype(int).clip(1, RESPONSE_TOKENS)):
        ids = random.integers(0, vocab_size, PROMPT_TOKENS + length, np.int32)
        rollouts.append(
            Rollout(
                sample_id=str(index), group_id=0, sample_index=index,
                prompt_ids=ids[:PROMPT_TOKENS], response_ids=ids[PROMPT_TOKENS:],
                rollout_logprobs=np.full(length, -np.log(vocab_size), np.float32),
                rollout_raw_logprobs=None, finish_reason="eos", versions=(),
            )
        )  # fmt: skip
    return pad_batch(
        rollouts,
        pad_token_id=0,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
    )


def predicted_bytes(policy: models.Policy, num_params: int, layout: Layout) -> float:
    """The bytes that the formula at the top predicts."""
    _, num_rows, num_columns = layout.rows.token_ids.shape
    parts = update_parts(
        policy.config,
        policy.remat,
        num_rows=num_rows,
        num_columns=num_columns,
        num_slots=num_rows * layout.rows.sources.shape[2],
        platform="cpu",
    )
    return 20 * num_params + sum(parts.values())


def measured_bytes(
    policy: models.Policy, optimizer, plan: RowPlan, batch: RolloutBatch
) -> tuple[Any, Layout, int]:
    """Memory analysis of the compiled update, its layout, and the number of parameters."""
    layout = lay_out(batch, plan)
    values = SlotValues(*[np.asarray(take_values(batch.rollout_logprobs, layout.tokens()))] * 5)
    params, state = abstract_trained(policy.shapes(), optimizer, plan.mesh)
    compiled = update_rows.lower(
        params, state, plan.put((layout.rows, values)), np.int32(layout.num_micro),
        loss=PolicyLoss(policy, 1.0, ALGORITHM), optimizer=optimizer, prefix="policy",
    ).compile()  # fmt: skip
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    return compiled.memory_analysis(), layout, num_params


def plans(mesh: jax.sharding.Mesh, num_rows: int) -> dict[str, RowPlan]:
    """Plans for the same number of tokens: one sequence per row, and packed."""
    budget = num_rows * LONGEST
    return {
        "rows": RowPlan(mesh, micro_batch_tokens=budget),
        "packed": RowPlan(mesh, micro_batch_tokens=budget, pack_sequences=True),
    }


def print_table(num_layers: int, sizes: Sequence[int], optimizer, mesh) -> None:
    """Prints predicted and measured bytes for every option."""
    print(
        "remat  layout  tokens  padding   params     args    alias     temp     peak  predicted"
        "  peak/param  temp/token"
    )
    for remat in models.REMAT_POLICIES:
        policy = models.Policy(architecture(num_layers), remat=remat)
        batch = skewed_batch(64, policy.config.vocab_size)
        for num_rows in sizes:
            for name, plan in plans(mesh, num_rows).items():
                memory, layout, num_params = measured_bytes(policy, optimizer, plan, batch)
                args, alias = memory.argument_size_in_bytes, memory.alias_size_in_bytes
                temp = memory.temp_size_in_bytes
                peak = args + memory.output_size_in_bytes - alias + temp
                num_tokens = np.prod(layout.rows.token_ids.shape[1:])
                mib = [f"{x / 2**20:9.2f}" for x in (args, alias, temp, peak)]
                expected = predicted_bytes(policy, num_params, layout)
                print(
                    f"{remat:5}  {name:6}  {num_tokens:6}  "
                    f"{layout.scalars()['policy/padding_fraction']:7.3f} {num_params:8}"
                    + "".join(mib)
                    + f"  {expected / 2**20:9.2f}  {peak / num_params:10.1f}"
                    + f"  {(temp - 8 * num_params) / num_tokens:10.0f}"
                )


def print_times(num_layers: int, num_pairs: int, optimizer, mesh) -> None:
    """Prints times of updates of 64 responses, packed divided by one sequence per row."""
    policy = models.Policy(architecture(num_layers))
    params = policy.init(jax.random.key(0))
    state = [Trained(params, optimizer.init(params))]
    trainee = Trainee("policy", optimizer, PolicyLoss(policy, 1.0, ALGORITHM))
    seconds: dict[str, list[float]] = {"rows": [], "packed": []}

    def take(name: str, plan: RowPlan, batch: RolloutBatch) -> float:
        started = time.perf_counter()
        trained = jax.block_until_ready(jax.tree.map(jnp.copy, state[0]))
        old, advantages = batch.rollout_logprobs, batch.response_mask.astype(np.float32)
        minibatch = MiniBatch(batch, old, old, advantages=advantages)
        after, scalars, _ = trainee.update(trained, minibatch, plan)
        jax.block_until_ready(after)
        padding[name].append(scalars["policy/padding_fraction"])
        return time.perf_counter() - started

    both = plans(mesh, 1)
    batches = [skewed_batch(64, policy.config.vocab_size, seed) for seed in range(num_pairs)]
    padding: dict[str, list[float]] = {name: [] for name in both}
    for batch in batches:  # compiles
        for name, plan in both.items():
            take(name, plan, batch)
    for index, batch in enumerate(batches):
        order = list(both.items())[:: 1 if index % 2 else -1]
        for name, plan in order:
            seconds[name].append(take(name, plan, batch))
    ratios = [a / b for a, b in zip(seconds["packed"], seconds["rows"])]
    low, high, level = median_interval(ratios)
    print(
        f"update time, packed / rows: {statistics.median(ratios):.3f}  [{low:.3f}, {high:.3f}]; "
        f"{100 * level:.1f} % interval of the median of {len(ratios)} pairs"
    )
    for name in both:
        print(
            f"{name:6}  {statistics.median(seconds[name]):.3f} s, "
            f"{100 * statistics.mean(padding[name]):.1f} % of the tokens computed are padding"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="rows per micro-batch")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    optimizer = make_optimizer(
        learning_rate=1e-6, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.999,
        weight_decay=0.01, max_grad_norm=1.0,
    )  # fmt: skip
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    print(machine.description())
    print_times(options.layers, options.pairs, optimizer, mesh)
    print("MiB; the last two columns are bytes")
    print_table(options.layers, options.sizes, optimizer, mesh)


if __name__ == "__main__":
    main()
