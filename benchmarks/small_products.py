"""Products of few rows on a CPU: the kernel as the right factor, and as the left one.

    python -m benchmarks.small_products --model=SmolLM2-135M

The products of all layers of a decoding step, one program at a time. `left` is what
`decoder._product_of_few` does with at most `FEW_ROWS` rows; both sides have the same kernels, which
lie in memory as [out, in]. Sides alternate in order.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks import results
from benchmarks.results import median_interval, table
from semrl_jax import models
from semrl_jax.models.decoder import _product_of_few
from semrl_jax.models.hf_weights import layer_kernels


def step(product):
    """A program with the products of all layers; each one depends on the one before."""

    def products(x, layers):
        for kernels in layers:
            for kernel in kernels:
                num_in = kernel.shape[1]
                rows = jnp.resize(x, (len(x), num_in)) if x.shape[1] != num_in else x
                x = jnp.tanh(product(rows, kernel.T))
        return x

    return jax.jit(products)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--pairs", type=int, default=15)
    results.add_option(parser)
    arguments = parser.parse_args()
    config = models.load_config(arguments.model)
    shapes = [kernel.shape for kernel in layer_kernels(config).values()]
    keys = iter(jax.random.split(jax.random.key(0), config.num_layers * len(shapes)))
    layers = [
        [jax.random.normal(next(keys), shape) / shape[1] ** 0.5 for shape in shapes]
        for _ in range(config.num_layers)
    ]
    sides = {"right": step(jnp.matmul), "left": step(_product_of_few)}
    found = []
    for num_rows in arguments.rows:
        x = jnp.ones((num_rows, config.hidden_size))
        seconds = {name: [] for name in sides}
        for number in range(arguments.pairs + 1):
            for name in [*sides][:: 1 if number % 2 else -1]:
                began = time.monotonic()
                sides[name](x, layers).block_until_ready()
                if number:  # the first time compiles
                    seconds[name].append(time.monotonic() - began)
        ratios = [right / left for right, left in zip(seconds["right"], seconds["left"])]
        low, high, _ = median_interval(ratios)
        times = [f"{1e3 * statistics.median(each):.0f}" for each in seconds.values()]
        found.append(
            [f"{num_rows}", f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]", *times]
        )
    text = table(["rows", "right / left", "right, ms", "left, ms"], found)
    results.show("Products of few rows", text, arguments.json)


if __name__ == "__main__":
    main()
