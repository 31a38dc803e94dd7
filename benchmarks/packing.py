"""Packing compared with padding, on responses whose lengths differ as in GSM8K.

    python -m benchmarks.packing

Lengths of responses are log-normal with mean 180, truncated at 512. Prompts have 32 to 96 tokens.
Both sides train the same 4.0 M Qwen2 in float32 on the same batches: the learner's passes and one
update, as in a training step without KL. Both have the same limit of tokens per micro-batch,
padding included. `padding` has one sequence per row, and `packing` several
(`training.pack_sequences`). Sides alternate in order, and rates count only tokens of prompts and
responses.

Then 50 steps of a tiny model on new batches count the programs that are compiled. A program of the
learner depends on the shapes of its rows. These are rounded to few sizes, so the shapes that occur
are few, and nothing may be compiled twice for one shape.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import collections
import contextlib
import dataclasses
import statistics
import threading
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
from semrl_jax.algorithms.credit import Credit
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs.setup import optimizer_of
from semrl_jax.support import compilation
from semrl_jax.support.clock import Clock
from semrl_jax.training.learner import Learner
from semrl_jax.training.packing import lay_out, row_plan
from semrl_jax.training.passes import PassPlan
from semrl_jax.training.train_state import TrainState
from semrl_jax.types import Rollout

PROMPT_LIMIT, RESPONSE_LIMIT = 96, 512
MEAN_TOKENS, SIGMA = 180, 0.6
LONGEST = PROMPT_LIMIT + RESPONSE_LIMIT
PADDING, PACKING = SIDES = ("padding", "packing")
MODEL = models.DecoderConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=704, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=64,
)  # fmt: skip
TINY = models.DecoderConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8,
)  # fmt: skip


def rollouts(count: int, vocab_size: int, seed: int) -> list[Rollout]:
    """Random responses of ragged lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, count)
    found = []
    for index, length in enumerate(lengths.astype(int).clip(1, RESPONSE_LIMIT)):
        prompt = rng.integers(0, vocab_size, rng.integers(32, PROMPT_LIMIT + 1), np.int32)
        found.append(
            Rollout(
                sample_id=str(index), group_id=0, sample_index=index, prompt_ids=prompt,
                response_ids=rng.integers(0, vocab_size, length, np.int32),
                rollout_logprobs=np.full(length, -np.log(vocab_size), np.float32),
                rollout_raw_logprobs=None, finish_reason="eos", versions=(),
            )
        )  # fmt: skip
    return found


def learners(
    architecture: models.DecoderConfig, num_responses: int, micro_batch_tokens: int
) -> dict[str, Learner]:
    """The learner with padding and with packing."""
    config = default.get_config()
    config.data.prompts_per_step = num_responses // config.rollout.group_size
    config.rollout.max_prompt_tokens = PROMPT_LIMIT
    config.rollout.max_response_tokens = RESPONSE_LIMIT
    config.algorithms.loss.kl_coefficient = 0.0
    config.algorithms.loss.entropy_coefficient = 0.0
    config.training.prompts_per_minibatch = config.data.prompts_per_step  # one update per step
    config.training.micro_batch_tokens = micro_batch_tokens
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    algorithm = load_algorithm(config.algorithms.to_dict())
    learner = Learner(
        config=config,
        algorithm=algorithm,
        plan=PassPlan.of(algorithm, config),
        policy=models.Policy(architecture, mesh=mesh),
        mesh=mesh,
        reference=None,
        optimizer=optimizer_of(config, "training"),
        pad_token_id=0,
        peers=Peers(),
        device_lock=threading.Lock(),
    )
    packed = config.copy_and_resolve_references()
    packed.training.pack_sequences = True
    return {PADDING: learner, PACKING: dataclasses.replace(learner, config=packed)}


def train(
    learner: Learner, state: TrainState, batch_of: list[Rollout]
) -> tuple[TrainState, dict[str, float]]:
    """One step of the learner; the state is donated."""
    batch = learner.batch(batch_of)
    passes = learner.passes(state, batch, Clock())
    gains = np.random.default_rng(0).normal(size=(len(batch_of), 1)).astype(np.float32)
    advantages = jnp.asarray(gains * batch.response_mask)
    return learner.update(state, batch, passes, Credit(advantages))[:2]


def shapes_of(learner: Learner, batch_of: list[Rollout]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the rows that the learner makes of a batch, on which its programs depend."""
    plan = row_plan(learner.mesh, learner.config.training)
    rows = lay_out(learner.batch(batch_of), plan).rows
    return rows.token_ids.shape, rows.sources.shape


def first_state(learner: Learner) -> TrainState:
    return learner.first_state(learner.policy.init(jax.random.key(0)))


def speed(num_responses: int, micro_batch_tokens: int, num_pairs: int, max_s: float) -> str:
    """Rates of both sides as Markdown."""
    sides = learners(MODEL, num_responses, micro_batch_tokens)
    states = {name: first_state(learner) for name, learner in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    padding: dict[str, list[float]] = {name: [] for name in sides}
    compiled: dict[str, set] = {name: set() for name in sides}
    lengths = []
    began = time.monotonic()
    for index in range(num_pairs):
        batch = rollouts(num_responses, MODEL.vocab_size, index)
        lengths.append(sum(len(r.prompt_ids) + len(r.response_ids) for r in batch))
        for name in SIDES:
            if (shapes := shapes_of(sides[name], batch)) not in compiled[name]:
                compiled[name].add(shapes)
                states[name], _ = train(sides[name], states[name], batch)
        for name in SIDES[:: 1 if index % 2 else -1]:
            started = time.perf_counter()
            states[name], scalars = train(sides[name], states[name], batch)
            seconds[name].append(time.perf_counter() - started)
            padding[name].append(scalars["policy/padding_fraction"])
        if max_s and time.monotonic() - began > max_s:
            break
    rows = [
        [
            name,
            f"{statistics.median(n / s for n, s in zip(lengths, seconds[name])):.0f}",
            f"{statistics.median(seconds[name]):.2f}",
            f"{100 * statistics.mean(padding[name]):.0f} %",
        ]
        for name in SIDES
    ]
    ratios = [a / b for a, b in zip(seconds[PADDING], seconds[PACKING])]
    low, high, level = median_interval(ratios)
    return (
        f"Packing trains {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}] times as many "
        f"tokens per second ({100 * level:.0f} % interval of the median of {len(ratios)} pairs). "
        f"Batches have {num_responses} responses and {statistics.mean(lengths):.0f} tokens, "
        f"micro-batches {micro_batch_tokens} tokens.\n\n"
        + table(("Side", "tokens/s", "s per step", "padding"), rows)
    )


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Counts the programs that are compiled in the block, by name."""
    programs: collections.Counter[str] = collections.Counter()

    def begins(event: str, value: float | int, fun_name: str = "", **_: object) -> None:
        if event == compilation.COMPILES:
            programs[fun_name.removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_scalar_listener(begins)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_scalar_listener(begins)


def compilations(num_responses: int, num_steps: int) -> str:
    """Counts of shapes and programs as Markdown."""
    rows = []
    for name, learner in learners(TINY, num_responses, LONGEST).items():
        state, shapes = first_state(learner), set()
        with counted() as programs:
            for step in range(num_steps):
                batch = rollouts(num_responses, TINY.vocab_size, 1000 + step)
                shapes.add(shapes_of(learner, batch))
                state, _ = train(learner, state, batch)
        most = max(programs.values())
        rows.append([name, f"{len(shapes)}", f"{most}", f"{programs.total()}"])
    header = ("Side", "shapes of rows", "compilations of one program", "of all programs")
    return f"Over {num_steps} steps with new lengths:\n\n" + table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--responses", type=int, default=32, help="of a batch, a multiple of 8")
    parser.add_argument(
        "--tokens",
        type=int,
        default=LONGEST,
        help="of a micro-batch; default: the longest sequence",
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50, help="for compilations; 0: not counted")
    parser.add_argument("--max_s", type=float, default=0, help="begin no pair after this time")
    results.add_option(parser)
    arguments = parser.parse_args()
    parts = []
    if arguments.pairs:
        parts.append(speed(arguments.responses, arguments.tokens, arguments.pairs, arguments.max_s))
    if arguments.steps:
        parts.append(compilations(arguments.responses, arguments.steps))
    results.show("Packing and padding", "\n\n".join(parts), arguments.json)


if __name__ == "__main__":
    main()
