"""Time of a weight sync to replicas on this machine, compared with a plain copy and transfer.

    python -m benchmarks.weight_sync
    SEMRL_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.weight_sync --engines jax vllm

Makes a random policy with float32 parameters: `0.5B` has the sizes of Qwen2-0.5B (tied) and sends
bfloat16, `tiny` has 4.0 million parameters and sends float32. Every replica is a process of its
own, except the embedded one, which takes `tiny`. Both ways of a sync are measured: through shared
memory, and as a stream of messages. A sync begins with the parameters on the trainer's devices and
ends when all replicas serve the weights.

The reference is one copy of the bytes in memory that was used before, plus one transfer to another
process by gRPC with nothing on top (`benchmarks.loopback`), without checksums. It is measured
between the syncs. The first sync of each way compiles and allocates; it is not counted. Medians.

`pause` is the time in which the replica samples no token; `load` is the time in which the worker
loads the weights, summed over threads. The JAX engine loads while it receives.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import queue
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import results
from benchmarks.loopback import Peer, copy_timer

ROOT = pathlib.Path(__file__).parents[1]
START_S = 150.0
SIZES = {
    "0.5B": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24,
        "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "rope_theta": 1e6,
        "tie_embeddings": True,
    },
    "tiny": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_layers": 4,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "tie_embeddings": True,
    },
}  # fmt: skip
DTYPES = {"0.5B": "bfloat16", "tiny": "float32"}
NOTE = (
    "The reference, for both ways, is one copy of the bytes in memory plus one transfer by gRPC "
    "with nothing on top. Through memory nothing is transferred, so there it is no least time. "
    "`pause` is the time without sampling. vLLM's worker loads during the pause, for `load` "
    "seconds. The JAX engine loads while it receives and samples; its `load` is the sum over "
    "threads that work at the same time, so it may be longer than the sync."
)
ENGINES = {"jax": "0.5B", "vllm": "0.5B", "embedded": "tiny"}


def policy_of(size: str):
    from semrl_jax import models

    return models.Policy(models.DecoderConfig(**SIZES[size]), compute_dtype=DTYPES[size])


def make_engine(kind: str, size: str, directory: str):
    """An engine that prints the seconds of every commit as one line of JSON."""
    policy, seconds = policy_of(size), {"load": 0.0, "cpu": time.process_time()}

    def timed(function: Callable) -> Callable:
        def call(*args, **options):
            started = time.perf_counter()
            result = function(*args, **options)
            seconds["load"] += time.perf_counter() - started
            return result

        return call

    if kind == "vllm":
        from semrl_jax.models import config_to_hf, tensor_specs
        from semrl_jax.rollout.engines.vllm import VllmEngine, VllmModel, VllmSettings

        class Timed(VllmEngine):
            async def _load(self, staged):
                started = time.perf_counter()
                await super()._load(staged)
                seconds["load"] += time.perf_counter() - started

        config, dtype = policy.config, DTYPES[size]
        pathlib.Path(directory, "config.json").write_text(
            json.dumps(config_to_hf(config, dtype=dtype))
        )
        specs = tuple(tensor_specs(config, dtype))
        model = VllmModel(
            directory, specs, config.hash, "", config.vocab_size, config.hidden_size,
            config.num_layers,
        )  # fmt: skip
        settings = VllmSettings(dtype=dtype, max_num_seqs=8, kv_cache_gib=1.0, enforce_eager=True)
        engine = Timed(model, settings, max_prompt_tokens=128, max_response_tokens=128)
    else:
        from semrl_jax.rollout.engines.jax import JaxEngine

        engine = JaxEngine(policy)
        engine.load_tensors = timed(engine.load_tensors)
    commit = engine.commit_weight_update

    async def timed_commit(version):
        started = time.perf_counter()
        await commit(version)
        pause, cpu = time.perf_counter() - started, time.process_time()
        print(json.dumps({"pause": pause, "cpu": cpu - seconds.pop("cpu"), **seconds}), flush=True)
        seconds.update(load=0.0, cpu=cpu)

    engine.commit_weight_update = timed_commit
    return engine


def serve(kind: str, size: str) -> None:
    """The process of one replica; it ends when its standard input closes."""
    from semrl_jax.rollout.server import serve as start

    async def run(directory: str) -> None:
        engine = make_engine(kind, size, directory)
        server = await start(engine, token=os.environ["SEMRL_ROLLOUT_TOKEN"])
        print(json.dumps({"address": server.address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(directory))


class ReplicaProcess(contextlib.AbstractContextManager):
    """A replica of this machine, in the environment of its engine."""

    def __init__(self, kind: str, size: str, token: str):
        python = os.environ.get("SEMRL_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python")
        command = [str(python) if kind == "vllm" else sys.executable, "-m", __spec__.name]
        self._process = subprocess.Popen(
            [*command, "--serve", kind, "--size", size],
            cwd=ROOT,
            env={
                **os.environ,
                "SEMRL_ROLLOUT_TOKEN": token,
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __exit__(self, *exc_info) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def next(self, timeout_s: float = START_S) -> dict:
        return self._lines.get(timeout=timeout_s)

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))


@contextlib.contextmanager
def embedded(size: str, token: str) -> Iterator[str]:
    from semrl_jax.rollout.engines.jax import JaxEngine
    from tests.rollout.embedded import EmbeddedReplica

    with EmbeddedReplica(JaxEngine(policy_of(size)), token=token) as replica:
        yield replica.address


def measure(kind: str, size: str, count: int, repeats: int) -> str:
    """The times of one engine, as Markdown."""
    import jax

    from semrl_jax import models
    from semrl_jax.rollout.client import RolloutClient

    policy, dtype, token = policy_of(size), DTYPES[size], secrets.token_urlsafe(32)
    config = policy.config
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)
    params = jax.tree.map(lambda s: jax.device_put(np.resize(block, s.shape)), policy.shapes())
    specs = models.tensor_specs(config, dtype)
    num_bytes = sum(spec.num_bytes for spec in specs)
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    with contextlib.ExitStack() as stack:
        replicas = []
        if kind == "embedded":
            addresses = [stack.enter_context(embedded(size, token))]
        else:
            replicas = [
                stack.enter_context(ReplicaProcess(kind, size, token)) for _ in range(count)
            ]
            addresses = [replica.next()["address"] for replica in replicas]
        clients = {}
        for way in ("memory", "stream"):
            client = RolloutClient(
                addresses, token, run_id="run", attempt_id="a", share_memory=way == "memory"
            )
            clients[way] = stack.enter_context(client)
            found = client.connect(
                model_hash=config.hash, tokenizer_hash="", vocab_size=config.vocab_size
            )
            assert all(f.reads_memory == (way == "memory") for f in found)

        def read() -> Iterator[np.ndarray]:
            return (array for _, array in models.iterate_hf_tensors(params, config, dtype))

        copy, peer = copy_timer(num_bytes), stack.enter_context(Peer())
        for repeat in range(repeats + 1):
            for way, client in clients.items():
                started, cpu = time.perf_counter(), time.process_time()
                client.sync_weights(specs, read, step=repeat)
                seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
                commits = [replica.next() for replica in replicas]
                if repeat > 0:
                    note(f"{way} sync", seconds)
                    note(f"{way} cpu", cpu)
                    for name in ("pause", "load", "cpu") if commits else ():
                        note(f"{way} replica {name}", max(commit[name] for commit in commits))
            started = time.perf_counter()
            for _ in read():
                pass
            if repeat > 0:
                note("gather", time.perf_counter() - started)
                note("copy", copy())
                note("socket", peer.socket_s(num_bytes))
                note("grpc", peer.grpc_send_s(num_bytes))
    median = {name: statistics.median(values) for name, values in times.items()}
    reference = median["copy"] + median["grpc"]
    rows = []
    for way in ("memory", "stream"):
        pause, load = median.get(f"{way} replica pause"), median.get(f"{way} replica load")
        cells = ["-"] * 3
        if load is not None:
            cpu = median[f"{way} replica cpu"]
            cells = [f"{pause:.3f}", f"{load:.3f}", f"{cpu:.2f}"]
        sync = median[f"{way} sync"]
        rows.append([way, f"{sync / reference:.2f}", f"{sync:.3f}", f"{median[f'{way} cpu']:.2f}"])
        rows[-1] += cells
    header = (
        f"{kind}, {len(addresses)} replica(s), {num_bytes / 1e6:.0f} MB {dtype}",
        "sync / reference", "sync s", "CPU s of the trainer", "pause s", "load s",
        "CPU s of the replica",
    )  # fmt: skip
    return results.table(header, rows) + (
        f"\n\nReference: copy {median['copy']:.3f} s + gRPC {median['grpc']:.3f} s = "
        f"{reference:.3f} s. A plain socket takes {median['socket']:.3f} s, gathering alone "
        f"{median['gather']:.3f} s. Medians of {repeats} alternating syncs."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--engines", nargs="+", choices=tuple(ENGINES), default=("jax", "embedded"),
        help="default: jax embedded",
    )  # fmt: skip
    parser.add_argument("--size", choices=tuple(SIZES), help="default: 0.5B, embedded tiny")
    parser.add_argument("--replicas", type=int, default=1, help="processes; default: 1")
    parser.add_argument("--repeats", type=int, default=7, help="syncs of each way; default: 7")
    parser.add_argument("--serve", choices=("jax", "vllm"), help=argparse.SUPPRESS)
    results.add_option(parser)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.size)
        return
    tables = [
        measure(kind, arguments.size or ENGINES[kind], arguments.replicas, arguments.repeats)
        for kind in arguments.engines
    ]
    text = "\n\n".join([*tables, NOTE])
    results.show("Weight sync on one machine", text, arguments.json)


if __name__ == "__main__":
    main()
