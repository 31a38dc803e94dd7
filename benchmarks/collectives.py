"""What one update moves between devices and holds on each, from compiled programs alone.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --axes
    python -m benchmarks.collectives --scaling --devices 8 64 --layers 28

Nothing runs: the programs are compiled for forced CPU devices in a process of their own, with
abstract arguments. `--axes` sets the bytes of each kind of collective on every axis alone beside
the formula; `--scaling` is a weak-scaling table for the sizes of Qwen2.5-7B, one row of 2048 tokens
a device. Both are of one micro-batch, forward, backward (remat "full") and AdamW, in float32, since
this backend sums bfloat16 in float32; in bfloat16 activations and gathered parameters are half.

Bytes are those a device sends under the ring algorithms: (n - 1) / n of what is gathered or
scattered, twice that of what is summed. Loops are counted as often as they run, a branch as if it
were always taken, so the floating point operations of attention are those of all blocks, twice
what a causal mask leaves. This backend leaves a sum and its slice apart where GPU and TPU compilers
join them to a reduce-scatter of half the bytes, and sums the gradients of products that share an
input one by one where those add them first (five sums a layer, for two).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time

TOKENS = 2048
AXES_LAYERS = 4  # enough: everything a layer moves is counted by its loop
SCALING = {
    8: ((1, 8, 1, 1), (2, 4, 1, 1), (1, 4, 1, 2), (1, 2, 1, 4), (1, 4, 2, 1), (1, 2, 2, 2)),
    64: ((1, 64, 1, 1), (8, 8, 1, 1), (1, 32, 1, 2), (1, 16, 1, 4), (1, 16, 4, 1), (1, 16, 2, 2)),
}


def sizes(num_layers: int):
    """Qwen2.5-7B, or its first layers."""
    from semrl_jax.models import DecoderConfig

    return DecoderConfig(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_layers=num_layers,
        num_heads=28, num_kv_heads=4, head_dim=128, rope_theta=1e6,
    )  # fmt: skip


def compiled_update(config, mesh, num_rows: int, num_tokens: int):
    """One micro-batch and its optimiser step, compiled for shapes."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from semrl_jax import models
    from semrl_jax.models.sharding import PARTITION_SPECS

    policy = models.Policy(config, remat="full", mesh=mesh)
    optimizer = optax.adamw(1e-6)

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
    rows = models.batch_sharding(mesh)
    batch = [
        jax.ShapeDtypeStruct((num_rows, num_tokens), dtype, sharding=rows)
        for dtype in (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    ]
    return jax.jit(step, donate_argnums=(0, 1)).lower(*state, *batch).compile()


def measure(sizes_of_mesh, num_layers: int, num_tokens: int) -> dict:
    """What the program of one mesh holds and moves, a device; runs in a process of its own."""
    from benchmarks import hlo
    from semrl_jax import models

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
    """Bytes a device sends where `axis` alone has `n` devices, by kind; small terms left out.

    fsdp: a layer's matrices are gathered forward and backward, the output matrix once and its
    gradient scattered; gradients of layers are summed; states of the embedding change hands.
    tensor: states are summed twice a layer forward, once more where the backward pass computes the
    layer again, and five times for gradients; once at the embedding and once at the logits.
    sequence: keys and values go round forward and again backward, there twice with their gradients;
    all gradients are summed. replica: all gradients are summed.
    """
    width, layers = config.hidden_size, config.num_layers
    heads, kv_heads = (h * config.head_dim for h in (config.num_heads, config.num_kv_heads))
    layer = 4 * width * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    matrix = 4 * width * config.vocab_size
    states = 4 * num_rows * num_tokens * width
    keys = 4 * num_rows * num_tokens * kv_heads / n  # a device's; values are as many
    share = (n - 1) / n
    if axis == "fsdp":
        return {
            "all-gather": share * (2 * layers * layer + matrix),
            "all-reduce": 2 * share * layers * layer,
            "reduce-scatter": share * matrix,
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
    """`measure` in a child with so many forced devices."""
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
        f"Each axis alone with {num_devices} devices: {num_layers} layers of Qwen2.5-7B, "
        f"{num_devices} rows of {num_tokens} tokens.\n"
    )
    print("| axis | collective | sent, MiB a device | formula, MiB | ratio |")
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
        f"\nQwen2.5-7B, {num_layers} layers, one row of {num_tokens} tokens a device; meshes are "
        "replica x fsdp x sequence x tensor, figures a device.\n"
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
    parser.add_argument("--axes", action="store_true", help="the table of axes alone, and no other")
    parser.add_argument("--scaling", action="store_true", help="the scaling table, and no other")
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
    from benchmarks import machine  # brings JAX, which this process needs for nothing else

    print(machine.description())


if __name__ == "__main__":
    main()
