"""What the metrics cost in addition to the rest of a step, by length and width.

    python -m benchmarks.evidence.cost

Measures ER, ERV and ERA of one Gaussian response on one core, and sets the seconds against the
arithmetic of a step: 8 FLOP per parameter and token of a response, 2 in sampling, 2 of the pass
forward in the update and 4 of the pass backward. Writes a part of docs/evidence.md.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.evidence import results
from semrl_jax.metrics import hidden_state_metrics
from semrl_jax.support.safe_files import write_json

REPEATS = 3
ACCELERATOR_RATE = 4e14  # FLOP/s that a step reaches on an H100, 40 % of its peak in bfloat16
CORES = 16  # of the host, for each accelerator


class Size(NamedTuple):
    model: str
    num_parameters: float
    width: int
    num_tokens: int  # of a response
    stride: int


SIZES = (
    Size("SmolLM2-135M", 135e6, 576, 64, 4),
    Size("SmolLM2-135M", 135e6, 576, 512, 40),
    Size("Qwen2.5-1.5B", 1.5e9, 1536, 1024, 40),
    Size("Qwen2.5-7B", 7.6e9, 3584, 1024, 40),
    Size("Qwen2.5-7B", 7.6e9, 3584, 4096, 40),
)


def seconds(call: Callable[[], jax.Array]) -> float:
    """The median of calls after the first, which compiles."""
    found = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def rate() -> float:
    """FLOP/s of products of this machine on the cores of this process."""
    matrix, times = jnp.ones((2048, 2048)), jax.jit(jnp.matmul)
    return 2 * 2048**3 / seconds(lambda: times(matrix, matrix))


def measured(size: Size) -> float:
    """Seconds of a response."""
    random, shape = np.random.default_rng(0), (1, size.num_tokens, size.width)
    states = jnp.asarray(random.normal(size=shape).astype(np.float32))
    mask = jnp.ones(shape[:2], bool)
    names = {"names": ("effective_rank",), "stride": size.stride}
    measure = jax.jit(functools.partial(hidden_state_metrics, method="gram", **names))
    return seconds(lambda: measure(states, mask))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    here = rate()
    rows = [size._asdict() | {"metrics_s": measured(size)} for size in SIZES]
    record = {"machine": machine.description(), "flop_per_s": here, "rows": rows}
    write_json(results.HERE / "benchmarks" / "results" / "evidence_cost.json", record)
    results.fill("cost", section(record))


def section(record: dict) -> str:
    """The table: seconds of a response, and the metrics in percent of the rest of its step."""
    lines = [
        "| model | tokens | stride | metrics, ms of one core | in % of the step on the same core | "
        f"in % on an H100 with {CORES} cores |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        step = 8 * row["num_parameters"] * row["num_tokens"]  # FLOP
        own, spread = row["metrics_s"], row["metrics_s"] / CORES
        here, there = own * record["flop_per_s"] / step, spread * ACCELERATOR_RATE / step
        cells = row["model"], row["num_tokens"], row["stride"], f"{1e3 * own:,.1f}"
        of_accelerator = f"{there:.0%}" if row["num_parameters"] > 1e9 else ""  # others are toys
        lines.append("| " + " | ".join(map(str, cells)) + f" | {here:.1%} | {of_accelerator} |")
    lines += [
        "",
        f"Measured on {results.measured_on(record)}, {record['flop_per_s'] / 1e9:.0f} GFLOP/s.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
