"""Generation of ragged responses, compared with responses of equal length, on the JAX engine.

    python -m benchmarks.ragged

Ragged lengths come from `benchmarks.packing`. The engine generates them for a random 4.0 M Qwen2
in float32, without a service, with half as many slots as responses and with as many. The baseline
is responses of the mean length, which fill every slot. Rates count only tokens of responses.

A response is ended on the host at its length, as by a stop string. The useful share is tokens of
responses over row-steps: rows of the decode batch, times steps, finished rows included. It is
counted in the warm-up round, which also compiles. Sides then alternate in order.

The floor counts that a row costs more for a longer response. The generation of
`benchmarks.floors`, a plain JAX loop, runs with as many rows as the baseline has slots, and with
responses of several lengths, all equal in one run. This gives the time of a row by its length. The
floor is the sum of these times.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import asyncio
import dataclasses
import statistics
import threading
import time
from unittest import mock

import jax
import numpy as np

from benchmarks import floors, results
from benchmarks.packing import MEAN_TOKENS, MODEL, RESPONSE_LIMIT, rollouts
from benchmarks.results import median_interval, table
from semrl_jax import models
from semrl_jax.rollout.engines import decoding
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.types import HiddenStateParams, SampleRequest, SamplingParams, WeightVersion

VERSION = WeightVersion("benchmark", "", 0, "")
PROMPT_TOKENS = 16
FLOOR_TOKENS = (64, 128, 256, RESPONSE_LIMIT)  # responses whose cost is measured


@dataclasses.dataclass
class EndsAt:
    """In place of a `StopMatcher`: ends a response after a given number of tokens."""

    num_left: int

    def feed(self, token_ids: list[int]) -> int | None:
        fed, self.num_left = self.num_left, self.num_left - len(token_ids)
        return fed if self.num_left <= 0 else None


class RowSteps:
    """In place of `decode_chunk`: counts rows times steps. Parts of a call run in threads."""

    def __init__(self):
        self.total, self.sizes = 0, set()
        self._decode_chunk, self._lock = decoding.decode_chunk, threading.Lock()

    def __call__(self, params, slots, *arguments, **options):
        before = np.array(slots.num_generated)  # a copy: the slots are donated
        slots, chunk = self._decode_chunk(params, slots, *arguments, **options)
        rows, columns = slots.cache.positions.shape
        with self._lock:
            self.total += rows * int(np.max(np.asarray(slots.num_generated) - before))
            self.sizes.add((rows, columns))
        return slots, chunk


@dataclasses.dataclass
class Side:
    """What is generated, and what was measured."""

    lengths: np.ndarray
    engine: JaxEngine
    num_row_steps: int = 0
    num_programs: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def generate(self) -> None:
        random = np.random.default_rng(0)
        requests = tuple(
            SampleRequest(
                str(index), index, 0, random.integers(0, MODEL.vocab_size, PROMPT_TOKENS, np.int32),
                int(random.integers(2**63)),
            )
            for index in range(len(self.lengths))
        )  # fmt: skip
        sampling = SamplingParams(int(max(self.lengths)))
        call = GenerateCall(requests, sampling, HiddenStateParams((-1,), "bfloat16"), VERSION)
        response = decoding._Response

        def of_length(request, matcher=None):
            return response(request, matcher=EndsAt(int(self.lengths[int(request.sample_id)])))

        async def run():
            return [rollout async for rollout in self.engine.generate(call)]

        with mock.patch.object(decoding, "_Response", of_length):
            found = asyncio.run(run())
        assert sum(len(rollout.response_ids) for rollout in found) == sum(self.lengths)

    def warm_up(self) -> None:
        """Compiles, and counts row-steps."""
        with mock.patch.object(decoding, "decode_chunk", RowSteps()) as counted:
            self.generate()
        self.num_row_steps, self.num_programs = counted.total, len(counted.sizes)

    @property
    def useful_share(self) -> float:
        return sum(self.lengths) / self.num_row_steps

    @property
    def rate(self) -> float:
        return sum(self.lengths) / statistics.median(self.seconds)


class Floor:
    """Seconds of plain JAX by the length of responses."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._seconds: dict[int, list[float]] = {tokens: [] for tokens in FLOOR_TOKENS}
        self._params = floors.init(self._sizes(0))
        self._prompts = np.ones((num_rows, PROMPT_TOKENS), np.int32)
        for tokens in FLOOR_TOKENS:
            self._generate(tokens)  # compiles

    def measure(self) -> None:
        for tokens, found in self._seconds.items():
            found.append(self._generate(tokens))

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds for responses of these lengths."""
        medians = [0.0, *map(statistics.median, self._seconds.values())]
        return float(np.interp(lengths, [0, *FLOOR_TOKENS], medians).sum()) / self._num_rows

    def _generate(self, tokens: int) -> float:
        sizes, key = self._sizes(tokens), jax.random.key(0)
        return floors.seconds(lambda: floors.generate(self._params, self._prompts, key, sizes))

    def _sizes(self, tokens: int) -> floors.Sizes:
        return floors.Sizes(
            MODEL.num_layers, MODEL.hidden_size, MODEL.intermediate_size, MODEL.num_heads,
            MODEL.num_kv_heads, MODEL.vocab_size, MODEL.rope_theta, MODEL.rms_norm_eps,
            self._num_rows, PROMPT_TOKENS, tokens, micro=1,
        )  # fmt: skip


def engine_with(slots: int) -> JaxEngine:
    policy = models.Policy(MODEL)
    engine = JaxEngine(policy, max_batch=slots)
    params = policy.init(jax.random.key(0))
    buffers = engine.begin_weight_update(models.tensor_specs(MODEL, "float32"))
    for spec, array in models.iterate_hf_tensors(params, MODEL, "float32"):
        buffers[spec.name][:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    asyncio.run(engine.commit_weight_update(VERSION))
    return engine


def measure(num_responses: int, num_rounds: int, max_s: float) -> str:
    """Rates as Markdown."""
    drawn = rollouts(num_responses, MODEL.vocab_size, 0)
    ragged = np.array([len(rollout.response_ids) for rollout in drawn])
    few, all_at_once = engine_with(num_responses // 2), engine_with(num_responses)
    baseline = f"{MEAN_TOKENS} tokens each, {num_responses // 2} slots"
    sides = {
        baseline: Side(np.full(num_responses, MEAN_TOKENS), few),
        f"ragged, {num_responses // 2} slots": Side(ragged, few),
        f"ragged, {num_responses} slots": Side(ragged, all_at_once),
    }
    for side in sides.values():
        side.warm_up()
    floor = Floor(num_responses // 2)
    began = time.monotonic()
    for index in range(num_rounds):
        for side in [*sides.values()][:: 1 if index % 2 else -1]:
            started = time.perf_counter()
            side.generate()
            side.seconds.append(time.perf_counter() - started)
        floor.measure()
        if max_s and time.monotonic() - began > max_s:
            break
    of_baseline = sides[baseline]
    rows = []
    for name, side in sides.items():
        tokens = sum(side.lengths) / sum(of_baseline.lengths)
        ratios = [tokens * a / b for a, b in zip(of_baseline.seconds, side.seconds)]
        low, high, level = median_interval(ratios)
        rows.append(
            [
                name,
                f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]",
                f"{side.rate:.0f}",
                f"{statistics.median(side.seconds) / floor.seconds(side.lengths):.2f}",
                f"{1e6 / side.rate:.0f}",
                f"{100 * side.useful_share:.0f} %",
                f"{side.num_programs}",
            ]
        )
    header = (
        "Side", "times the baseline", "useful tokens/s", "time / floor",
        "µs per useful token", "useful row-steps", "decode programs",
    )  # fmt: skip
    return (
        table(header, rows) + f"\n\nThe baseline is the first row, with {of_baseline.rate:.0f} "
        f"tokens/s. The floor is plain JAX: {sum(ragged) / floor.seconds(ragged):.0f} tokens/s for "
        f"the ragged lengths. {num_responses} responses; ragged ones have {ragged.mean():.0f} "
        f"tokens on average and at most {ragged.max()} of {RESPONSE_LIMIT}. Brackets: "
        f"{100 * level:.0f} % intervals of the medians of {len(of_baseline.seconds)} rounds."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max_s", type=float, default=0, help="begin no round after this time")
    results.add_option(parser)
    arguments = parser.parse_args()
    text = measure(arguments.responses, arguments.rounds, arguments.max_s)
    results.show("Generation of ragged responses", text, arguments.json)


if __name__ == "__main__":
    main()
