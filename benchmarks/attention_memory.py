"""Memory of attention on one TPU chip: the fused kernel against the blocks of plain XLA.

Compiles the gradient of one layer's attention for a chip, without one. Nothing is executed. It
needs the compiler for TPUs: `pip install -e '.[tpu]'`.

    export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
    python -m benchmarks.attention_memory
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from semrl_jax.models.attention import self_attention

MIB = 2**20
HEADS, KV_HEADS, WIDTH = 28, 4, 128  # of Qwen2.5-7B


def temporary_bytes(kernel: str, num_tokens: int, device: jax.Device) -> int:
    """Temporary memory of the compiled gradient of one row of packed tokens in bfloat16."""
    sharding = NamedSharding(Mesh(np.array([device]), ("chip",)), PartitionSpec())

    def array(shape, dtype):
        return jax.ShapeDtypeStruct((1, num_tokens, *shape), dtype, sharding=sharding)

    def loss(positions, segment_ids, *arrays):
        attended = self_attention(positions, segment_ids, kernel=kernel)(*arrays, None)
        return jnp.sum(attended.astype(jnp.float32) ** 2)

    places = [array((), jnp.int32)] * 2
    arrays = [array((n, WIDTH), jnp.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS)]
    program = jax.jit(jax.grad(loss, argnums=(2, 3, 4))).lower(*places, *arrays).compile()
    return program.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096, 16384])
    arguments = parser.parse_args()
    device = topologies.get_topology_desc(platform="tpu", topology_name=arguments.topology).devices[
        0
    ]
    print("| tokens of a row | kernel | temporary arrays, MiB | seconds to compile |")
    print("|---|---|---|---|")
    for num_tokens in arguments.tokens:
        for kernel in ("xla", "splash"):
            started = time.monotonic()
            size = temporary_bytes(kernel, num_tokens, device) / MIB
            seconds = time.monotonic() - started
            print(f"| {num_tokens} | {kernel} | {size:.0f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
