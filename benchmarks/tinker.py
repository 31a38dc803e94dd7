"""Passes of several adapters that wait together, compared with one adapter after the other.

    python -m benchmarks.tinker
    python -m benchmarks.tinker --model=runs/models/smollm2

A round does the same passes twice, forward and backward: those of all adapters in one program, and
each in a program of its own. The order alternates. The first round compiles and is not counted. The
model without --model is the random 4.0 M one of `benchmarks.packing`.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import pathlib
import statistics
import time

import jax
import numpy as np

from benchmarks import results
from benchmarks.packing import MODEL
from benchmarks.results import median_interval, table
from semrl_jax import models
from semrl_jax.models.of_config import starting_params
from semrl_jax.tinker.losses import LOSSES
from semrl_jax.tinker.messages import Example, Pass
from semrl_jax.tinker.requests import LoraConfig
from semrl_jax.tinker.serving import MICRO_BATCH_TOKENS
from semrl_jax.tinker.training import Trained, Trainer

LOSS = "importance_sampling"
Jobs = list[tuple[Trained, Pass]]


def make_trainer(directory: pathlib.Path | None) -> Trainer:
    config = MODEL if directory is None else models.load_config(directory)
    policy, mesh = models.Policy(config), models.make_mesh({"fsdp": 1}, jax.devices()[:1])
    if directory is None:
        base, directory = policy.init(jax.random.key(0)), pathlib.Path(".")  # nothing is saved
    else:
        base = starting_params(directory, policy, mesh)
    return Trainer(policy, base, directory, mesh, MICRO_BATCH_TOKENS)


def make_jobs(trainer: Trainer, arguments: argparse.Namespace) -> Jobs:
    """A pass for each adapter, with examples of different lengths."""
    random, lora = np.random.default_rng(0), trainer.lora(LoraConfig(rank=arguments.rank))

    def example(length: int) -> Example:
        ids = random.integers(0, trainer.policy.config.vocab_size, (2, length), np.int32)
        inputs = {name: random.normal(size=length).astype("f4") for name in LOSSES[LOSS].inputs}
        return Example(ids[0], ids[1], inputs)

    jobs = []
    for seed in range(arguments.adapters):
        lengths = random.integers(arguments.tokens // 2, arguments.tokens + 1, arguments.examples)
        examples = tuple(map(example, lengths))
        jobs.append((trainer.create(lora, seed), Pass("", seed, examples, LOSS, {}, True)))
    return jobs


def timed(trainer: Trainer, parts: list[Jobs]) -> tuple[float, list[float]]:
    """Seconds, and the losses."""
    began, losses = time.perf_counter(), []
    for jobs in parts:
        for trained, _ in jobs:
            trained.gradient = None
        losses += [output.loss for output in trainer.passes(jobs)]
        jax.block_until_ready([trained.gradient for trained, _ in jobs])
    return time.perf_counter() - began, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="Hugging Face directory")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--examples", type=int, default=4, help="of a pass")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest example")
    parser.add_argument("--rounds", type=int, default=7)
    results.add_option(parser)
    arguments = parser.parse_args()
    trainer = make_trainer(arguments.model)
    jobs = make_jobs(trainer, arguments)
    sides = {"together": [jobs], "one after the other": [[job] for job in jobs]}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(arguments.rounds + 1):
        losses = []
        for name in [*sides][:: 1 if index % 2 else -1]:
            taken, found = timed(trainer, sides[name])
            losses.append(found)
            if index:
                seconds[name].append(taken)
        np.testing.assert_allclose(*losses, rtol=1e-3)
    together, alone = seconds.values()
    low, high, level = median_interval([b / a for a, b in zip(together, alone)])
    ratio = statistics.median(b / a for a, b in zip(together, alone))
    num_tokens = sum(len(each.token_ids) for _, job in jobs for each in job.examples)
    rows = [["one after the other / together", f"{ratio:.2f} [{low:.2f}, {high:.2f}]"]]
    for name, values in seconds.items():
        middle = statistics.median(values)
        rows.append([f"seconds {name}", f"{middle:.3f}"])
        rows.append([f"tokens per second {name}", f"{num_tokens / middle:.0f}"])
    text = table(["", "median"], rows) + (
        f"\n\n{len(jobs)} adapters of rank {arguments.rank}, each with a pass of "
        f"{arguments.examples} examples of {arguments.tokens // 2} to {arguments.tokens} tokens. "
        f"Brackets: {100 * level:.0f} % interval of {len(together)} rounds.\n"
    )
    results.show("Passes of adapters that wait together", text, arguments.json)


if __name__ == "__main__":
    main()
