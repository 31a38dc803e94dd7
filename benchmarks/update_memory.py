"""Memory that an update needs, for the model and the batch of `benchmarks.step`.

    python -m benchmarks.update_memory

One optimiser step on 64 responses of 128 tokens to prompts of 16, in float32 and without KL, by the
number of responses of a micro-batch and by `model.remat`. Two figures for each:

- What the compiled program allocates in addition to its arguments and results, as XLA reports it.
- How much the resident memory of the process grows during an update (Linux). Parameters, moments
  and batch are there before. Programs are compiled before, and free memory is given back to the
  system. The largest of several updates counts.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import ctypes
import dataclasses
import os
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine, results
from benchmarks.packing import MODEL, PADDING, learners
from benchmarks.step import GROUP, PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS
from semrl_jax.support.clock import Clock
from semrl_jax.training import trainee
from semrl_jax.training.learner import Learner
from semrl_jax.types import Rollout, RolloutBatch

TIED = dataclasses.replace(MODEL, tie_embeddings=True)
REMAT = ("dots", "none")  # dots is the default
SIZES = (4, 16, 64)  # responses of a micro-batch; benchmarks.step has 4
MIB = 2**20


class Allocated:
    """In place of `update_rows`: keeps the memory analysis of the last program."""

    def __init__(self):
        self.analysis = None
        self._update_rows = trainee.update_rows

    def __call__(self, *arguments, **options):
        self.analysis = self._update_rows.lower(*arguments, **options).compile().memory_analysis()
        return self._update_rows(*arguments, **options)


def resident_mib() -> float:
    """Resident memory of this process now, after the allocator gave back what is free."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def growth_mib(function) -> float:
    """How much the resident memory grows at most while the function runs."""
    before = resident_mib()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    jax.block_until_ready(function())
    return machine.peak_mib(os.getpid()) - before


def full_batch(learner: Learner) -> RolloutBatch:
    """Responses that all have the same length, to prompts that do."""
    random = np.random.default_rng(0)
    return learner.batch(
        [
            Rollout(
                sample_id=str(index), group_id=index // GROUP, sample_index=index % GROUP,
                prompt_ids=random.integers(0, MODEL.vocab_size, PROMPT_TOKENS, np.int32),
                response_ids=random.integers(0, MODEL.vocab_size, RESPONSE_TOKENS, np.int32),
                rollout_logprobs=np.full(RESPONSE_TOKENS, -8.0, np.float32),
                rollout_raw_logprobs=None, finish_reason="length", versions=(),
            )
            for index in range(PROMPTS * GROUP)
        ]
    )  # fmt: skip


def row(size: int, remat: str, num_updates: int) -> list[str]:
    """The figures of one size of the micro-batch, in MiB."""
    learner = learners(TIED, PROMPTS * GROUP, size * (PROMPT_TOKENS + RESPONSE_TOKENS))[PADDING]
    policy = dataclasses.replace(learner.policy, remat=remat)
    learner = dataclasses.replace(learner, policy=policy)
    batch = full_batch(learner)
    states = [learner.first_state(learner.policy.init(jax.random.key(0)))]
    passes = learner.passes(states[0], batch, Clock())
    advantages = np.ones(batch.response_mask.shape, np.float32)

    def update_once():
        states[0] = learner.update(states[0], batch, passes, jnp.asarray(advantages))[0]
        return states[0]

    with mock.patch.object(trainee, "update_rows", Allocated()) as allocated:
        update_once()  # compiles
    grown = max(growth_mib(update_once) for _ in range(num_updates))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((states[0].params, states[0].optimizer)))
    temp = allocated.analysis.temp_size_in_bytes
    return [f"{size}, `{remat}`", *(f"{x:.0f}" for x in (held / MIB, temp / MIB, grown))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=3)
    results.add_option(parser)
    arguments = parser.parse_args()
    header = (
        "Responses of a micro-batch, `model.remat`", "parameters and moments, MiB",
        "temporary arrays of the program, MiB", "growth of the resident memory, MiB",
    )  # fmt: skip
    text = results.table(
        header, [row(size, remat, arguments.updates) for size in SIZES for remat in REMAT]
    )
    results.show(
        "Memory of an update",
        f"{text}\n\nGrowth: how far the resident memory rises, in {arguments.updates} updates, "
        "above its level before the first, which includes parameters and moments. "
        f"{PROMPTS * GROUP} responses of {RESPONSE_TOKENS} tokens to prompts of {PROMPT_TOKENS}, "
        "in float32. `benchmarks.step` has 4 responses and `dots`.",
        arguments.json,
    )


if __name__ == "__main__":
    main()
