"""What one update sends between devices and holds on each, read from compiled programs.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --axes
    python -m benchmarks.collectives --scaling --devices 8 64 --layers 28

Nothing is executed. The programs are compiled for forced CPU devices in separate processes, with
abstract arguments. `--axes` compares the bytes of each kind of collective with the formula, for one
axis at a time. `--scaling` prints a weak-scaling table for the sizes of Qwen2.5-7B, with one row of
2048 tokens per device. Both use one micro-batch, forward, backward (remat "full") and AdamW, in
float32, because this backend sums bfloat16 in float32. In bfloat16, activations and gathered
parameters need half.

Bytes are those that a device sends with ring algorithms: (n - 1) / n of what is gathered or
scattered, and twice that of what is summed. Loops are counted as often as they run. A branch counts
as always taken, so the floating point operations of attention include all blocks, twice those that
a causal mask needs. This backend differs from GPU and TPU compilers in one way: it sums the
gradients of products that share an input one by one, where they add them first (five sums per
layer, not two).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time

TOKENS = 2048
AXES_LAYERS = 4  # enough, because a loop counts everything that a layer sends
SCALING = {
    8: ((1, 8, 1, 1), (2, 4, 1, 1), (1, 4, 1, 2), (1, 2, 1, 4), (1, 4, 2, 1), (1, 2, 2, 2)),
    64: ((1, 64, 1, 1), (8, 8, 1, 1), (1, 32, 1, 2), (1, 16, 1, 4), (1, 16, 4, 1), (1, 16, 2, 2)),
}


def sizes(num_layers: int):
    """Qwen2.5-7B, or only its first layers."""
    from semrl_jax.models import DecoderConfig

    return DecoderConfig(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_layers=num_layers,
        num_heads=28, num_kv_heads=4, head_dim=128, rope_theta=1e6,
    )  # fmt: skip


def compiled_update(config, mesh, num_rows: int, num_tokens: int):
    """One micro-batch and its optimiser step, compiled for abstract arguments."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from semrl_jax import models
    from semrl_jax.models.sharding import PARTITION_SPECS
    from semrl_jax.training.optimizer import Optimizer

    policy = models.Policy(config, remat="full", mesh=mesh)
    optimizer = Optimizer(*optax.adamw(1e-6))

    def step(params, opt_state, token_ids, positions, segment_ids, advantages):
        def loss(params):
            states = policy.final_states(params, token_ids, positions, segment_ids)
            logprobs, _ = policy.token_logprobs(params, states, token_ids)
            return -jnp.sum(jnp.where(segment_ids != 0, logprobs * advantages, 0.0))

        changes, new_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, changes), new_state

    def laid_out(path, leaf):
        name = "/".join(str(key.key) for key in path if hasattr(key, "key"))
        spec = PARTITION_SPECS.get(name, PartitionSpec())  # moments have their parameter's name
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = policy.shapes()
    state = jax.tree_util.tree_map_with_path(
        laid_out, (params, jax.eval_shape(optimizer.init, params))
    )
    rows = NamedSharding(mesh, PartitionSpec(models.DATA_AXES))
    batch = [
        jax.ShapeDtypeStruct((num_rows, num_tokens), dtype, sharding=rows)
        for dtype in (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    ]
    return jax.jit(step, donate_argnums=(0, 1)).lower(*state, *batch).compile()


def measure(sizes_of_mesh, num_layers: int, num_tokens: int) -> dict:
    """What the program of one mesh holds and sends per device. Runs in a separate process."""
    from semrl_jax import models
    from semrl_jax.planning import hlo

    started = time.monotonic()
    mesh = models.make_mesh(dict(zip(models.AXES, sizes_of_mesh)))
    compiled = compiled_update(sizes(num_layers), mesh, mesh.size, num_tokens)
    memory, program = compiled.memory_analysis(), hlo.read(compiled.as_text())
    sent = dict.fromkeys(hlo.COLLECTIVES, 0.0)
    for found in program.collectives:
        sent[found.kind] += found.sent_bytes
    return {
        "mesh": sizes_of_mesh,
        "argument": memory.argument_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "flops": program.dot_flops,
        "sent": sent,
        "seconds": time.monotonic() - started,
    }


def expected(axis: str, n: int, config, num_rows: int, num_tokens: int) -> dict[str, float]:
    """Bytes that a device sends, by kind, if only `axis` has `n` devices. Small terms are left out.

    fsdp: the matrices of a layer are gathered in the forward and in the backward pass, and their
    gradients are scattered. The output matrix is gathered once and its gradient is scattered.
    States of the embedding are exchanged.
    tensor: states are summed twice per layer in the forward pass, once more where the backward pass
    computes the layer again, and five times for gradients; also once at the embedding and once at
    the logits.
    sequence: keys and values go round the ring in the forward pass, again where the backward pass
    computes the layer again, and in the backward pass with their gradients. All gradients are
    summed.
    replica: all gradients are summed.
    """
    width, layers = config.hidden_size, config.num_layers
    heads, kv_heads = (h * config.head_dim for h in (config.num_heads, config.num_kv_heads))
    layer = 4 * width * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    matrix = 4 * width * config.vocab_size
    states = 4 * num_rows * num_tokens * width
    keys = 4 * num_rows * num_tokens * kv_heads / n  # of one device; values have the same size
    share = (n - 1) / n
    if axis == "fsdp":
        return {
            "all-gather": share * (2 * layers * layer + matrix),
            "reduce-scatter": share * (layers * layer + matrix),
            "all-to-all": 2 * share * states / n,
        }
    if axis == "tensor":
        return {"all-reduce": 2 * share * states * (layers * (2 + 1 + 5) + 2)}
    whole = {"all-reduce": 2 * share * (layers * layer + 2 * matrix)}
    if axis == "sequence":
        travels = 2 * (n - 1) * 2 + 2 * (n - 1) + 2 * n  # forward twice; backward; gradients
        return whole | {"collective-permute": layers * keys * travels}
    return whole


def in_process(num_devices: int, arguments: list) -> dict:
    """Runs `measure` in a child process with so many forced devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.collectives", "--measure", json.dumps(arguments)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    return json.loads(out.splitlines()[-1])


def axes_table(num_layers: int, num_tokens: int, num_devices: int = 4) -> None:
    print(
        f"One axis at a time with {num_devices} devices: {num_layers} layers of Qwen2.5-7B, "
        f"{num_devices} rows of {num_tokens} tokens.\n"
    )
    print("| axis | collective | sent, MiB per device | formula, MiB | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for index, axis in enumerate(("replica", "fsdp", "sequence", "tensor")):
        mesh = [num_devices if i == index else 1 for i in range(4)]
        print(f"compiling mesh {mesh} ...", file=sys.stderr, flush=True)
        found = in_process(num_devices, [mesh, num_layers, num_tokens])["sent"]
        formula = expected(axis, num_devices, sizes(num_layers), num_devices, num_tokens)
        for kind, sent in found.items():
            want = formula.get(kind, 0.0)
            if sent or want:
                ratio = f"{sent / want:.3f}" if want else ""
                print(
                    f"| {axis} | {kind} | {sent / 2**20:.1f} | {want / 2**20:.1f} | {ratio} |",
                    flush=True,
                )


def scaling_table(devices: list[int], num_layers: int, num_tokens: int) -> None:
    print(
        f"\nQwen2.5-7B, {num_layers} layers, one row of {num_tokens} tokens per device. Meshes are "
        "replica x fsdp x sequence x tensor, figures are per device.\n"
    )
    print(
        "| devices | mesh | arguments, GiB | temporaries, GiB | TFLOP | sent, GiB | compiled in |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for num_devices in devices:
        for mesh in SCALING[num_devices]:
            name = "x".join(map(str, mesh))
            print(f"compiling mesh {name} ...", file=sys.stderr, flush=True)
            found = in_process(num_devices, [mesh, num_layers, num_tokens])
            print(
                f"| {math.prod(mesh)} | {name} | {found['argument'] / 2**30:.2f} "
                f"| {found['temp'] / 2**30:.2f} | {found['flops'] / 1e12:.1f} "
                f"| {sum(found['sent'].values()) / 2**30:.2f} | {found['seconds']:.0f} s |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--axes", action="store_true", help="print only the table of axes")
    parser.add_argument("--scaling", action="store_true", help="print only the scaling table")
    parser.add_argument("--devices", type=int, nargs="+", choices=sorted(SCALING), default=[8, 64])
    parser.add_argument("--layers", type=int, default=28, help="of the scaling table; default: 28")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a row; default: 2048")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*json.loads(arguments.measure))))
        return
    if not arguments.scaling:
        axes_table(AXES_LAYERS, arguments.tokens)
    if not arguments.axes:
        scaling_table(arguments.devices, arguments.layers, arguments.tokens)
    from benchmarks import machine  # here, because it imports JAX, which nothing else here needs

    print(machine.description())


if __name__ == "__main__":
    main()
