"""What a TPU reads and computes for log-probabilities, by the size of a tile of the logits.

    python -m benchmarks.logit_tiles --topology=v5e:2x2 --hidden_size=896

Compiles without a TPU, in an environment with `jax[tpu]`. One tile is compiled. Its cost, times the
number of tiles, is the cost of all rows: cost analysis counts the body of a loop once. The bytes
of the gradient include the bytes of the forward pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import results
from semrl_jax.models.token_logprobs import Tiles, token_logprobs

ROWS, VOCABULARY = 16_384, 151_936
TILES = (
    (110, VOCABULARY),
    (1024, 18_992),
    (2048, 9496),
    (4096, 4096),
    (8192, 2048),
    (16_384, 1024),
)


def cost(device: jax.Device, rows: int, columns: int, width: int, *, gradient: bool) -> dict:
    """Cost analysis of one tile."""
    sharding = SingleDeviceSharding(device)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def values(states, matrix, ids):
        return token_logprobs(states, ids, matrix, Tiles(0, 1.0, rows * columns))

    def gradients(states, matrix, ids):
        def total(states, matrix):
            logprobs, entropies = values(states, matrix, ids)
            return jnp.sum(logprobs) + 0.001 * jnp.sum(entropies)

        return jax.grad(total, (0, 1))(states, matrix)

    traced = jax.jit(gradients if gradient else values).trace(
        array((rows, width), jnp.bfloat16),
        array((columns, width), jnp.bfloat16),
        array((rows,), jnp.int32),
    )
    return traced.lower(lowering_platforms=("tpu",)).compile().cost_analysis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--hidden_size", type=int, default=896)
    results.add_option(parser)
    args = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit("libtpu is not installed; run: pip install -e '.[tpu]'")
    device = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices[0]
    header = ["tile", "tiles", "forward, GB", "forward, TFLOP", "gradient, GB", "gradient, TFLOP"]
    rows = []
    for height, width in TILES:
        count = ROWS / height * VOCABULARY / width
        cells = []
        for gradient in (False, True):
            found = cost(device, height, width, args.hidden_size, gradient=gradient)
            cells += [found["bytes accessed"] * count / 1e9, found["flops"] * count / 1e12]
        rows.append([f"{height} x {width}", f"{count:.0f}", *(f"{cell:.1f}" for cell in cells)])
    text = (
        f"{ROWS} tokens, vocabulary {VOCABULARY}, width {args.hidden_size}, bfloat16, for a "
        f"{device.device_kind}. Compiled without one; the tiles of one size read and compute:"
    )
    results.show("Tiles of the logits", f"{text}\n\n{results.table(header, rows)}", args.json)


if __name__ == "__main__":
    main()
