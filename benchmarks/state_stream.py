"""Throughput of hidden states from a replica to the trainer, compared with gRPC alone.

    python -m benchmarks.state_stream

A replica in another process streams 64 responses of 512 tokens with final hidden states of width
3584 in bfloat16 (235 MB), which it has already. The client decodes and checks them as a trainer
does. `benchmarks.loopback` moves as many bytes by gRPC without messages. Both sides alternate;
medians of the ratio and of the throughputs.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import subprocess
import sys
import time

import ml_dtypes
import numpy as np

from benchmarks import results
from benchmarks.loopback import Peer
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.server import serve
from semrl_jax.types import (
    HiddenStateParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    VersionSpan,
)

VOCAB_SIZE = 1000
SPECS = (TensorSpec("w", (1,), "float32"),)


class StoredStates(Engine):
    """Sends the same states for every response."""

    def __init__(self, width: int):
        self._width = width
        self._states = np.zeros((0, 1, width), ml_dtypes.bfloat16)

    def describe(self) -> ReplicaDescription:
        return ReplicaDescription(
            engine="stored", engine_version="1", model_hash="model", tokenizer_hash="",
            vocab_size=VOCAB_SIZE, layers=(-1,), state_kinds=("decode",),
            logprob_kinds=("sampling",), max_prompts=4096, max_prompt_tokens=64,
            max_response_tokens=8192,
        )  # fmt: skip

    async def generate(self, call):
        num_tokens = call.sampling.max_tokens
        if len(self._states) != num_tokens:
            bits = np.random.default_rng(0).integers(0, 0x3F80, (num_tokens, 1, self._width))
            self._states = bits.astype(np.uint16).view(ml_dtypes.bfloat16)
        for request in call.requests:
            yield Rollout(
                **request.rollout_fields,
                response_ids=np.zeros(num_tokens, np.int32),
                rollout_logprobs=np.zeros(num_tokens, np.float32),
                rollout_raw_logprobs=None,
                finish_reason="length",
                versions=(VersionSpan(call.version, 0, num_tokens),),
                hidden_states=self._states,
                layers=(-1,),
            )

    def expected_tensors(self):
        return SPECS

    def begin_weight_update(self, specs, adapter=None):
        return {spec.name: np.empty(spec.num_bytes, np.uint8) for spec in specs}

    async def commit_weight_update(self, version) -> None:
        pass

    def abort_weight_update(self) -> None:
        pass


async def _serve(width: int) -> None:
    server = await serve(StoredStates(width), token=os.environ["SEMRL_ROLLOUT_TOKEN"])
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


def measure(arguments) -> None:
    token = secrets.token_urlsafe(32)
    command = [sys.executable, "-m", __spec__.name, "--serve", f"--width={arguments.width}"]
    replica = subprocess.Popen(
        command,
        env={**os.environ, "SEMRL_ROLLOUT_TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = replica.stdout.readline().strip()
    sampling, states = SamplingParams(arguments.tokens), HiddenStateParams((-1,), "bfloat16")
    prompt = np.zeros(1, np.int32)
    requests = [SampleRequest(f"{i}", i, 0, prompt, i) for i in range(arguments.responses)]
    num_bytes = arguments.responses * arguments.tokens * arguments.width * 2
    client = RolloutClient([address], token, run_id="run", attempt_id="a")
    with Peer() as peer, client:
        client.connect(model_hash="model", tokenizer_hash="", vocab_size=VOCAB_SIZE)
        version = client.sync_weights(SPECS, lambda: [np.ones(1, np.float32)], step=0)

        def stream_s() -> float:
            started = time.perf_counter()
            found = 0
            for rollout in client.generate(requests, sampling, states, version=version):
                found += rollout.hidden_states.nbytes
            assert found == num_bytes
            return time.perf_counter() - started

        pairs = [(stream_s(), peer.grpc_receive_s(num_bytes)) for _ in range(arguments.repeats + 1)]
    replica.stdin.close()
    replica.wait()
    pairs = pairs[1:]
    ratio = statistics.median(raw / ours for ours, raw in pairs)
    ours, raw = (statistics.median(side) for side in zip(*pairs))
    name = f"{arguments.responses} x {arguments.tokens} x {arguments.width} bfloat16"
    rates = [f"{num_bytes / seconds / 1e9:.2f}" for seconds in (ours, raw)]
    header = ("States", "MB", "share of raw gRPC", "states GB/s", "raw gRPC GB/s")
    rows = [[name, f"{num_bytes / 1e6:.0f}", f"{ratio:.0%}", *rates]]
    note = f"Medians of {arguments.repeats} alternating transfers from a replica to the trainer."
    text = results.table(header, rows) + f"\n\n{note}"
    results.show("Hidden states from a replica", text, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--responses", type=int, default=64, help="default: 64")
    parser.add_argument("--tokens", type=int, default=512, help="of each response; default: 512")
    parser.add_argument("--width", type=int, default=3584, help="of a state; default: 3584")
    parser.add_argument("--repeats", type=int, default=9, help="default: 9")
    results.add_option(parser)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(_serve(arguments.width))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
