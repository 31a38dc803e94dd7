"""Times checkpoints against plain file writes and reads of the same bytes.

    python -m benchmarks.checkpoints

Two train states are measured: the quickstart's, and one of about 100 M parameters with Adam. The
figures are: how long a save blocks the loop, how long until the checkpoint is complete (on disk,
with its checksums), how long a restore with verification takes, and the bytes. The plain write puts
as many random bytes into one file and calls fsync. The plain read reads them back, from the page
cache, as the restore does. All of these alternate in one process, and the result is the median.
Last, a short quickstart run is timed with a save after every step, and without. The difference is
compared with the time for which the loop is blocked.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from semrl_jax import models
from semrl_jax.runs.checkpoint_files import file_checksums
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.optimizer import make_optimizer
from semrl_jax.training.train_state import TrainState, init_state

MIB = 2**20
ARCHITECTURES = {
    "quickstart": models.DecoderConfig(
        vocab_size=34, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=32, tie_embeddings=True,
    ),
    "100M": models.DecoderConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12,
        num_kv_heads=6, head_dim=64, tie_embeddings=True,
    ),
}  # fmt: skip


def timed(function: Callable, *arguments) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    function(*arguments)
    return time.monotonic() - started


def make_state(architecture: models.DecoderConfig) -> TrainState:
    """A state as after some training: every array is random, because zeros would compress."""
    policy = models.Policy(architecture)
    optimizer = make_optimizer(
        learning_rate=1e-4, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.95,
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    mesh = models.make_mesh({"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1})
    params = jax.jit(policy.init)(jax.random.key(0))
    state = init_state(params, optimizer, init_shaping_state(), mesh)
    random = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype != jnp.float32:
            return leaf
        return jax.device_put(random.standard_normal(leaf.shape, np.float32), leaf.sharding)

    return state._replace(
        params=jax.tree.map(fill, state.params), optimizer=jax.tree.map(fill, state.optimizer)
    )


def write_plainly(file: pathlib.Path, content: bytes) -> None:
    with open(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def measure_state(state: TrainState, directory: pathlib.Path, repeats: int) -> dict[str, float]:
    """Medians over `repeats` rounds; one more round before them, which compiles, is not counted."""
    checkpoints = Checkpoints(directory / "checkpoints", keep=1)
    seconds: dict[str, list[float]] = {name: [] for name in ("blocking", "sealed", "restore")}
    seconds |= {"plain write": [], "plain read": []}
    num_bytes, content = 0, b""
    for step in range(1, repeats + 2):
        numbered = state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))
        started = time.monotonic()
        blocking_s = timed(checkpoints.save, numbered)
        checkpoints.wait()
        sealed_s = time.monotonic() - started
        if not num_bytes:
            sums = file_checksums(directory / "checkpoints" / str(step))
            num_bytes = sum(size for size, _ in sums.values())
            content = np.random.default_rng(0).bytes(num_bytes)
        write_s = timed(write_plainly, directory / "plain", content)
        reader = Checkpoints(directory / "checkpoints", keep=1)
        restore_s = timed(lambda reader=reader: jax.block_until_ready(reader.restore(state)[:5]))
        reader.close()
        read_s = timed((directory / "plain").read_bytes)
        if step > 1:
            values = (blocking_s, sealed_s, restore_s, write_s, read_s)
            for name, value in zip(seconds, values):
                seconds[name].append(value)
    checkpoints.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "sealed / plain write": medians["sealed"] / medians["plain write"],
        "restore / plain read": medians["restore"] / medians["plain read"],
        "blocking / sealed": medians["blocking"] / medians["sealed"],
        "MiB": num_bytes / MIB,
        **{f"{name} s": value for name, value in medians.items()},
    }


def run_s(directory: pathlib.Path, every_steps: int, num_steps: int) -> float:
    """Seconds from the row of the first step to the row of the last, in a short quickstart run."""
    workdir = directory / f"every_{every_steps}"
    if workdir.exists():
        shutil.rmtree(workdir)
    command = [
        sys.executable, "-m", "launch.train", "--config=configs/quickstart.py",
        f"--workdir={workdir}", f"--config.training.num_steps={num_steps}",
        "--config.warm_start.num_steps=0", "--config.evaluation.every_steps=0",
        "--config.logging.rollouts_every_steps=0", "--config.logging.plot_every_steps=0",
        f"--config.checkpoints.every_steps={every_steps}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    at = [time.monotonic() for line in process.stdout if line.startswith("step ")]
    if process.wait():
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    rows = (workdir / "metrics.jsonl").read_text().splitlines()
    assert len([row for row in map(json.loads, rows) if "policy/loss" in row]) == num_steps
    return at[-1] - at[0]  # the first step compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="*", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run-steps", type=int, default=8, help="steps of a short run; 0: none")
    parser.add_argument("--run-repeats", type=int, default=3)
    parser.add_argument("--directory", help="on the disk to be measured; default: a temporary one")
    arguments = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(dir=arguments.directory))
    results = {}
    try:
        for name in arguments.sizes:
            print(f"{name} ...", file=sys.stderr, flush=True)
            folder = directory / name
            folder.mkdir()
            results[name] = measure_state(
                make_state(ARCHITECTURES[name]), folder, arguments.repeats
            )
            shutil.rmtree(folder)
        width = 24
        print("".ljust(width) + "".join(name.rjust(14) for name in results))
        for key in next(iter(results.values()), ()):
            print(key.ljust(width) + "".join(f"{r[key]:14.4f}" for r in results.values()))
        if arguments.run_steps:
            pairs = []
            for _ in range(arguments.run_repeats):
                print("runs with and without checkpoints ...", file=sys.stderr, flush=True)
                pairs.append([run_s(directory, every, arguments.run_steps) for every in (1, 10**6)])
            saving, not_saving = (statistics.median(column) for column in zip(*pairs))
            print(
                f"{arguments.run_steps} quickstart steps, saved after every step / after the last: "
                f"{saving / not_saving:.3f} ({saving:.2f} s / {not_saving:.2f} s)"
            )
            if "quickstart" in results:
                step_s = not_saving / (arguments.run_steps - 1)
                share = results["quickstart"]["blocking s"] / step_s
                print(f"share of a step blocked by a save: {share:.2%} of {step_s:.2f} s")
    finally:
        shutil.rmtree(directory)
    print(machine.description())


if __name__ == "__main__":
    main()
