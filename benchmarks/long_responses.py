"""Errors and time of the metrics of long responses, compared with float64.

    python -m benchmarks.long_responses

Above 512 tokens, the method `gram` measures the effective rank of all prefixes by sums over their
spectra (`semrl_jax/metrics/nested.py`). They are compared with float64 singular values of every
prefix: roots of the eigenvalues of its centred Gram matrix, by LAPACK. Both run on one thread.

A second table has the responses recorded from the reference implementation (tests/golden), which
are short. The sums are made to measure all of their prefixes of more than 16 tokens.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import math
import pathlib
import time
from unittest import mock

import ml_dtypes
import numpy as np

from benchmarks import results
from semrl_jax import metrics
from semrl_jax.metrics import prefixes
from tests.oracles import metrics as oracle

WIDTH = 3584
STRIDES = {1024: 40, 2048: 80, 4096: 512}  # by tokens; the float64 side takes minutes with less
GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "golden"
SHORTEST = 16  # prefixes that are decomposed in golden responses
RELEASE_TOKENS = 512


def cases(num_tokens: int, width: int) -> dict[str, np.ndarray]:
    """Responses [T, D] in float32."""
    rng = np.random.default_rng(0)
    gaussian = rng.normal(size=(num_tokens, width)).astype(np.float32)
    return {
        "Gaussian": gaussian,
        "columns falling to 1e-3": gaussian * np.geomspace(1, 1e-3, width, dtype=np.float32),
        "random walk": np.cumsum(gaussian, axis=0, dtype=np.float32),
    }


def effective_ranks(rows: np.ndarray, sizes: list[int]) -> list[float]:
    """Effective rank of each prefix in float64."""
    rows = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    gram, found = rows @ rows.T, []
    for size in sizes:
        part = gram[:size, :size]
        mean = part.mean(axis=1, keepdims=True)
        values = np.linalg.eigvalsh(part - mean - mean.T + mean.mean())
        # Centring removes one dimension, and there are at most D.
        values = values[::-1][: min(size - 1, rows.shape[1])]
        sigma = np.sqrt(np.maximum(values, 0.0))
        p = sigma / (sigma.sum() + prefixes.EPSILON)
        found.append(math.exp(-np.sum(p * np.log(p + prefixes.EPSILON))))
    return found


def dynamics(rows: np.ndarray, stride: int, window: str) -> list[float]:
    """ER, ERV and ERA under `gram`."""
    mask = np.ones(len(rows), bool)
    found = metrics.rank_dynamics(rows, mask, stride=stride, window=window, method="gram")
    return [float(value) for value in found[:3]]


def errors(actual: list[float], expected: list[float]) -> list[float]:
    """Relative errors, and the change of beta = sigmoid(2 d) that an error of ERA causes."""
    relative = [abs(a / b - 1) for a, b in zip(actual, expected)]
    return [*relative, 1 / (1 + math.exp(-2 * relative[2])) - 0.5]


def synthetic(lengths: dict[int, int], width: int) -> str:
    """Errors and seconds by length, as Markdown."""
    lines = []
    for num_tokens, stride in lengths.items():
        for name, rows in cases(num_tokens, width).items():
            dynamics(rows, stride, "exact")  # compiles
            began = time.perf_counter()
            actual = dynamics(rows, stride, "exact")
            took = time.perf_counter() - began
            began = time.perf_counter()
            series = effective_ranks(rows, [*range(stride, num_tokens + 1, stride), num_tokens])
            expected = [series[-1], *oracle.orders(series[:-1])]
            exact_s = time.perf_counter() - began
            lines.append([
                f"{num_tokens}, {name}", f"{stride}", *(f"{value:.4g}" for value in expected),
                *(f"{error:.0e}" for error in errors(actual, expected)), f"{took:.2f}",
                f"{exact_s:.1f}",
            ])  # fmt: skip
            print(lines[-1], flush=True)
    header = (
        "Tokens", "stride", "ER", "ERV", "ERA", "error of ER", "of ERV", "of ERA", "of beta", "s",
        "float64, s",
    )  # fmt: skip
    return results.table(header, lines) + (
        f"\n\nOne response of width {width}, window `exact`, one thread. Errors are relative; beta "
        "is the largest change that the error of ERA causes at gain 2. `float64`: every prefix is "
        "decomposed."
    )


def golden() -> str:
    """Errors on the recorded responses, as Markdown."""
    lines = []
    short = {"MAX_SHORT": SHORTEST, "NESTED_DECOMPOSITIONS": 0}
    with mock.patch.multiple(prefixes, **short):
        for file in ("metrics_small", "metrics_long"):
            data = np.load(GOLDEN / f"{file}.npz")
            states, stride = data["hidden_states_bf16_bits"], int(data["stride"])
            found = []
            for index, mask in enumerate(data["mask"].astype(bool)):
                rows = states[index, mask, 0].view(ml_dtypes.bfloat16).astype(np.float32)
                tail = rows[-RELEASE_TOKENS:]
                if len(tail) <= 3 * stride:
                    continue
                actual = dynamics(rows, stride, "exact")[:1] + dynamics(tail, stride, "release")[1:]
                expected = [
                    oracle.effective_rank(rows),
                    *oracle.orders(oracle.series(oracle.effective_rank, rows, stride, "release")),
                ]
                recorded = [
                    float(data[f"layer0/Effective Rank{suffix}"][index])
                    for suffix in (" f32", " diff", " diff 2")
                ]
                found.append(errors(actual, expected) + errors(actual, recorded)[:3])
            worst = np.max(found, axis=0)
            cells = [f"{error:.0e}" for error in worst]
            lines.append([f"`{file}`, {len(found)} responses", *cells])
    header = (
        "Golden file", "error of ER", "of ERV", "of ERA", "of beta",
        "ER compared with the recorded one", "ERV", "ERA",
    )  # fmt: skip
    return results.table(header, lines) + (
        "\n\nThe largest of the responses with at least three windows, window `release`. "
        f"Sums measure prefixes of more than {SHORTEST} tokens here, otherwise of more than "
        f"{prefixes.MAX_SHORT}. The first four errors are relative to float64; "
        "recorded values are of float32 singular values."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="*", choices=STRIDES, default=list(STRIDES))
    parser.add_argument("--width", type=int, default=WIDTH)
    results.add_option(parser)
    arguments = parser.parse_args()
    tables = [golden()]
    if arguments.tokens:
        lengths = {num_tokens: STRIDES[num_tokens] for num_tokens in arguments.tokens}
        tables.insert(0, synthetic(lengths, arguments.width))
    results.show("Errors on long responses", "\n\n".join(tables), arguments.json)


if __name__ == "__main__":
    main()
