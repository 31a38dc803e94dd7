"""Speed of the metrics compared with the release's algorithm in PyTorch, on the same arrays.

    python -m benchmarks.metrics
    python -m benchmarks.metrics --shapes 64x512x896 16x1536x3584
    python -m benchmarks.metrics --accuracy
    python -m benchmarks.metrics --lengths 256 512 1024 --names effective_rank
    python -m benchmarks.metrics --costs 512x896 2048x896

The release's algorithm computes the singular values of the centred response for all five values.
For the orders of the effective rank, it computes one eigvalsh of the growing Gram matrix per
window. Both sides take turns in one process, with some responses of the batch each. A figure is the
median over the turns. `all cores` is a `Measurer` with `--threads` threads, as in the trainer.
`side by side` measures the whole batch at once, for accelerators (`--side_by_side`). A shape that
is named is measured twice: with a spectrum that float32 resolves, and with one column so large that
every response is recomputed in float64.

`--costs` compares the time of every metric of the package with the effective rank, one response on
one thread. It also measures the functions of sets of responses.

Without options, one batch is measured with the first spectrum, and long responses on one thread.
PyTorch (`pip install -e '.[test]'`) is needed except for `--accuracy`, `--lengths` and `--costs`.
"""

import os

# With several BLAS threads and XLA in one process, products are wrong.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import functools
import importlib.metadata
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import machine, results
from semrl_jax import metrics
from semrl_jax.metrics import hidden_state_metrics
from tests.oracles import metrics as oracle

ORDERS = ("effective_rank",)
STRIDE = 40
RESOLVED, UNRESOLVED = 1.0, 3e3  # size of one column relative to the others
SHAPE = (16, 512, 3584)
LONG = (512, 1024, 2048, 4096)  # tokens
GROUPS, SAMPLES = 16, 8  # of --costs


def release(states) -> dict[str, float]:
    """All five values, and ERV and ERA under the release's window, of one [T, D] torch tensor."""
    import torch

    def rank(sigma: torch.Tensor) -> float:
        p = sigma / (sigma.sum() + 1e-8)
        return float(torch.exp(-(p * torch.log(p + 1e-8)).sum()))

    sigma = torch.linalg.svdvals(states - states.mean(dim=0))
    eigenvalues = sigma[sigma**2 > 1e-8] ** 2
    q = eigenvalues / eigenvalues.sum()
    steps = states[1:] - states[:-1]
    steps = steps[steps.norm(dim=1) > 1e-6]
    cosine = torch.cosine_similarity(steps[1:], steps[:-1])
    tail = states[-512:]
    gram, series = tail @ tail.T, []
    for size in range(STRIDE + 1, len(tail) + 1, STRIDE):
        part = gram[:size, :size]
        mean = part.mean(dim=1, keepdim=True)
        values = torch.linalg.eigvalsh(part - mean - mean.T + mean.mean())
        series.append(rank(values.clamp(min=0).sqrt()))
    velocity, acceleration = oracle.orders(series)
    return {
        "effective_rank": rank(sigma),
        "log_effective_rank": math.log(rank(sigma)),
        "traditional_rank": float((sigma > sigma.max() * max(states.shape) * oracle.EPS32).sum()),
        "response_entropy": float(torch.log((q**1.0001).sum()) / (1 - 1.0001)),
        "curvature": float(torch.arccos(cosine.clamp(-1, 1)).mean()),
        "effective_rank_velocity": velocity,
        "effective_rank_acceleration": acceleration,
    }


def measurement(names: tuple[str, ...], window: str, **options) -> Callable:
    """The metrics of a batch by name, with the orders of the effective rank unless `options` name
    others."""
    options = {"orders": ORDERS, **options}

    def measure(states, mask, **more):
        found = {"stride": STRIDE, "window": window, "names": names, **options, **more}
        return metrics.flatten(hidden_state_metrics(states, mask, **found))

    return measure


def seconds(function: Callable, *arguments) -> float:
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - started


def compare(
    shape: tuple[int, int, int], outlier: float, turns: int, threads: int, side_by_side: bool
) -> str:
    """Ratios and times of one shape, with the first column `outlier` times as large; Markdown."""
    import torch

    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    batch, length, width = shape
    # Number of the batch's responses that one turn measures.
    part = batch if side_by_side else min(batch, threads * 4)
    states = rng.normal(size=(part, length, width)).astype(np.float32)
    states *= np.geomspace(1, 1e-2, width, dtype=np.float32)
    states[:, :, 0] *= outlier
    mask = np.ones((part, length), bool)
    arrays = jnp.asarray(states), jnp.asarray(mask)
    five, only = (measurement(names, "release") for names in (metrics.RELEASE_METRICS, ORDERS))

    def on_all_cores(names: tuple[str, ...], orders: tuple[str, ...]) -> list[metrics.Measured]:
        options = {"stride": STRIDE, "window": "release", "names": names, "orders": orders}
        with metrics.Measurer(max_tokens=length, num_threads=threads, **options) as measurer:
            pending = [measurer.submit(rows) for rows in states]
            measurer.flush()
            return [future.result() for future in pending]

    def with_torch() -> list[dict[str, float]]:
        return [release(response) for response in torch.from_numpy(states)]

    ways = {
        "torch": with_torch,
        "all five": lambda: five(*arrays),
        "all five, all cores": lambda: on_all_cores(metrics.RELEASE_METRICS, ORDERS),
        "all orders, all cores": lambda: on_all_cores(*[metrics.RELEASE_METRICS] * 2),
        "ER, ERV, ERA": lambda: only(*arrays),
        "ER, ERV, ERA, all cores": lambda: on_all_cores(ORDERS, ORDERS),
    }
    if side_by_side:
        ways |= {
            "all five, side by side": lambda: five(*arrays, side_by_side=True),
            "ER, ERV, ERA, side by side": lambda: only(*arrays, side_by_side=True),
        }
    measured, expected = five(*arrays), with_torch()
    for name in expected[0] if outlier == RESOLVED else ():
        # Check that both do the same work, where float32 resolves the release's small values.
        np.testing.assert_allclose(
            measured[name], [row[name] for row in expected], rtol=1e-2, err_msg=name
        )
    for name in list(ways)[1:]:
        ways[name]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            times[name].append(seconds(way) / part)
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        [name, f"{median['torch'] / value:.1f}", f"{1e3 * value:.1f}"]
        for name, value in median.items()
    ]
    column = "" if outlier == RESOLVED else f", one column {outlier:g} times as large"
    header = (f"{list(shape)}{column}", "times as fast as PyTorch", "ms per response")
    return results.table(header, rows) + (
        f"\n\n{part} responses of the batch, medians of {turns} turns; PyTorch "
        f"{importlib.metadata.version('torch')} and the rows with all cores use {threads} threads."
    )


def memory(shape: tuple[int, int, int]) -> None:
    """Prints the memory of a call in addition to its input, in units of the input."""
    one = (1, *shape[1:])
    for name, part, side_by_side in (
        ("the batch", shape, False), ("one response", one, False), ("side by side", shape, True),
    ):  # fmt: skip
        measure = measurement(metrics.RELEASE_METRICS, "release", side_by_side=side_by_side)
        structs = jax.ShapeDtypeStruct(part, jnp.float32), jax.ShapeDtypeStruct(part[:2], bool)
        compiled = jax.jit(measure).lower(*structs).compile()
        extra = compiled.memory_analysis().temp_size_in_bytes / math.prod(part) / 4
        print(f"{list(part)}, {name}: {extra:.2f} x its input beside it", flush=True)


def cases() -> dict[str, np.ndarray]:
    """Responses [384, 896] with spectra that are difficult for the methods."""
    rng = np.random.default_rng(0)
    shape = 384, 896
    u = np.linalg.qr(rng.normal(size=(shape[0], shape[0])))[0]
    v = np.linalg.qr(rng.normal(size=(shape[1], shape[0])))[0]
    gaussian = rng.normal(size=shape)
    found = {"Gaussian": gaussian, "Gaussian, bfloat16": gaussian.astype(ml_dtypes.bfloat16)}
    for smallest in (1e-2, 1e-3, 1e-4, 1e-6):
        found[f"sigma down to {smallest:.0e}"] = u * np.geomspace(1, smallest, shape[0]) @ v.T * 99
    for share in (1.2e-3, 3e-4, 1e-7):
        found[f"one direction, {share:.1e}"] = u * np.append(1, np.full(383, share)) @ v.T * 99
    for rank in (5, 20):
        rows = rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))
        found[f"rank {rank}"] = rows
    return {
        name: rows if rows.dtype == ml_dtypes.bfloat16 else rows.astype(np.float32)
        for name, rows in found.items()
    }


def errors(rows: np.ndarray, method: str) -> dict[str, float]:
    """Relative errors of ER, ERV and ERA against float64, and the resulting change of beta.

    beta = sigmoid(2 d), d = (ERA - mu) / mu. At d = 0, a relative error r of ERA changes d by r.
    """
    measured = metrics.rank_dynamics(
        rows, np.ones(len(rows), bool), stride=STRIDE, window="release", method=method
    )
    exact = rows.astype(np.float64)
    velocity, acceleration = oracle.orders(
        oracle.series(oracle.effective_rank, exact, STRIDE, "release")
    )
    expected = oracle.effective_rank(exact), velocity, acceleration
    er, erv, era = (abs(float(a) / b - 1) for a, b in zip(measured, expected))
    beta = 1 / (1 + math.exp(-2 * era)) - 0.5
    return {
        "ER": er, "ERV": erv, "ERA": era, "beta": beta, "ERV is": velocity, "ERA is": acceleration
    }  # fmt: skip


def accuracy() -> None:
    """Prints the errors of both methods for every case."""
    print(f"{'':30}{'ER':>10}{'ERV':>10}{'ERA':>10}{'beta':>10}{'ERV is':>10}{'ERA is':>10}")
    for name, rows in cases().items():
        for method in metrics.METHODS:
            values = "".join(f"{value:10.1e}" for value in errors(rows, method).values())
            print(f"{method:8}{name:22}{values}", flush=True)


def lengths(sizes: Sequence[int], width: int, names: Sequence[str], turns: int) -> str:
    """Seconds per response under the `exact` window on one thread, as Markdown."""
    measure, row = measurement(tuple(names), "exact"), ["every window"]
    for length in sizes:
        states = np.random.default_rng(0).normal(size=(1, length, width)).astype(np.float32)
        arrays = jnp.asarray(states), jnp.ones((1, length), bool)
        seconds(measure, *arrays)
        took = statistics.median(seconds(measure, *arrays) for _ in range(turns))
        row.append(f"{took:.3f}")
    header = ("Seconds per response", *(f"{length} tokens" for length in sizes))
    return results.table(header, [row]) + (
        f"\n\nOne call of `hidden_state_metrics` for one Gaussian response of width {width} under "
        f"the `exact` window: {', '.join(names)}, with orders of the effective rank; medians of "
        f"{turns}."
    )


def costs(length: int, width: int, turns: int) -> str:
    """Time of every metric compared with the effective rank, as Markdown; all take turns."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(1, length, width)).astype(np.float32)
    arrays = jnp.asarray(states), jnp.ones((1, length), bool)
    group = jnp.asarray(rng.normal(size=(GROUPS, SAMPLES, width)).astype(np.float32))
    everyone = jnp.ones((GROUPS, SAMPLES), bool)
    near = arrays[0][0] + 0.1 * jnp.asarray(rng.normal(size=(length, width)).astype(np.float32))
    calls: dict[tuple[str, str], Callable] = {}
    for name in metrics.METRICS:
        beside = tuple(dict.fromkeys((*ORDERS, name)))
        calls[name, "alone"] = measurement((name,), "exact", orders=())
        calls[name, "beside"] = measurement(beside, "exact", orders=())
        calls[name, "orders"] = measurement((name,), "exact", orders=(name,))
    sets = {
        "linear_cka": lambda *_: metrics.linear_cka(arrays[0][0], near, arrays[1][0]),
        "drift": lambda *_: metrics.drift(arrays[0][0], near, arrays[1][0]),
        "lidar": lambda *_: metrics.lidar(group, everyone),
        "elliptical_novelty": lambda *_: metrics.elliptical_novelty(group[0], everyone[0]),
        "log_determinant": lambda *_: metrics.log_determinant(group[0], everyone[0]),
    }
    calls |= {(name, "alone"): function for name, function in sets.items()}
    for function in calls.values():
        seconds(function, *arrays)  # compiles
    found = {key: [] for key in calls}
    for _ in range(turns):
        for key, function in calls.items():
            found[key].append(seconds(function, *arrays))
    # The smallest: what else runs on the machine only adds to these few milliseconds.
    took = {key: 1e3 * min(values) for key, values in found.items()}
    one, base = took["effective_rank", "alone"], took["effective_rank", "orders"]
    rows = [
        [
            f"`{name}`",
            f"{took[name, 'alone']:.1f}",
            f"{took[name, 'alone'] / one:.2f}",
            f"{took[name, 'beside'] / one - 1:+.2f}" if name not in ORDERS else "",
            f"{took[name, 'orders']:.1f}",
            f"{took[name, 'orders'] / base:.2f}",
        ]
        for name in sorted(metrics.METRICS, key=lambda name: (name not in ORDERS, name))
    ]
    rows += [
        [f"`{name}`", f"{took[name, 'alone']:.1f}", f"{took[name, 'alone'] / one:.2f}", "", "", ""]
        for name in sets
    ]
    header = (
        f"{length} tokens, width {width}", "ms", "/ ER", "added to ER", "ms with orders",
        "/ ER with orders",
    )  # fmt: skip
    return results.table(header, rows) + (
        f"\n\nOne Gaussian response, `exact` window, stride {STRIDE}, `gram`; the smallest of "
        f"{turns} turns of all. *Added to ER*: what the metric adds to a call that measures ER "
        f"too, in units of ER alone. Sets: `lidar` of {GROUPS} groups of {SAMPLES} mean states, "
        "`elliptical_novelty` and `log_determinant` of one of them, the others of two responses."
    )


def shape_of(text: str) -> tuple[int, int]:
    """Tokens and width of an argument such as "512x896"; ValueError for any other text."""
    tokens, width = map(int, text.split("x"))
    return tokens, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--accuracy", action="store_true", help="errors against float64, no times")
    parser.add_argument("--lengths", type=int, nargs="*", help="growth of the `exact` window")
    parser.add_argument(
        "--names", nargs="*", default=list(metrics.RELEASE_METRICS), help="for --lengths"
    )
    parser.add_argument("--costs", nargs="+", type=shape_of, metavar="TxD", help="such as 512x896")
    parser.add_argument("--width", type=int, default=3584, help="for --lengths")
    parser.add_argument("--shapes", nargs="*", help="such as 64x512x896")
    parser.add_argument("--side_by_side", action="store_true", help="for accelerators")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch, and of the Measurer")
    results.add_option(parser)
    arguments = parser.parse_args()
    if arguments.accuracy:
        accuracy()
        print(machine.description())
        return
    versions = {}
    if not (arguments.costs or arguments.lengths):  # these two do not compare
        if importlib.util.find_spec("torch") is None:
            parser.error("PyTorch is not installed, which this compares with: .[test] has it.")
        versions["torch"] = importlib.metadata.version("torch")
    compared = functools.partial(
        compare,
        turns=arguments.turns,
        threads=arguments.threads,
        side_by_side=arguments.side_by_side,
    )
    if arguments.costs:
        tables = [costs(*shape, arguments.turns) for shape in arguments.costs]
    elif arguments.lengths:
        width, names = arguments.width, arguments.names
        tables = [lengths(arguments.lengths, width, names, arguments.turns)]
    elif arguments.shapes:
        tables = []
        for shape in (tuple(map(int, text.split("x"))) for text in arguments.shapes):
            tables += [compared(shape, outlier) for outlier in (RESOLVED, UNRESOLVED)]
            memory(shape)
    else:
        tables = [compared(SHAPE, RESOLVED), lengths(LONG, SHAPE[-1], ORDERS, turns=1)]
    results.show("Speed of the metrics", "\n\n".join(tables), arguments.json, versions)


if __name__ == "__main__":
    main()
