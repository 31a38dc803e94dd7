"""Concurrent chats over HTTP, compared with the same work over gRPC, and the first streamed token.

    python -m benchmarks.http --policy=runs/models/smollm2

A replica (`launch.rollout --policy`) serves both. A round sends 200 chats of OpenAI's client at
once, each with 64 tokens, and the same prompts and seeds in one gRPC call, in alternating order.
Then a lone chat is streamed: its first token is compared with a gRPC call of one token, which is a
prefill and a decode step, and with the time between tokens. The first round, which compiles, is not
counted.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import openai

from benchmarks import results
from benchmarks.results import median_interval, table
from semrl_jax import data, models
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.wire.auth import TOKEN_VARIABLE, new_token
from semrl_jax.types import SampleRequest, SamplingParams

PORTS = 50071, 50072


def chats(count: int) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": f"Tell me about the number {17 * i + 3}."}]
        for i in range(count)
    ]


class Sides:
    """The two ways to ask for the same responses."""

    def __init__(self, policy: pathlib.Path, token: str, num_tokens: int, count: int):
        self.num_tokens, self.asked = num_tokens, chats(count)
        tokenizer = data.load_tokenizer(policy)
        texts = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False)
            for each in self.asked
        ]
        self.prompts = [
            np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
            for text in texts
        ]
        self.http = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{PORTS[1]}/v1", api_key=token, max_retries=0, timeout=3600
        )
        self.model = policy.name
        self.grpc = RolloutClient([f"127.0.0.1:{PORTS[0]}"], token, run_id="", attempt_id="")

    def connect(self, policy: pathlib.Path) -> None:
        config = models.load_config(policy)
        (description,) = self.grpc.connect(
            model_hash=config.hash, tokenizer_hash="", vocab_size=config.vocab_size
        )
        self.version = description.version

    def over_grpc(self, num_tokens: int | None = None, count: int | None = None) -> float:
        requests = [
            SampleRequest(str(i), i, 0, prompt, i) for i, prompt in enumerate(self.prompts[:count])
        ]
        began = time.perf_counter()
        found = list(
            self.grpc.generate(
                requests, SamplingParams(num_tokens or self.num_tokens), version=self.version
            )
        )
        seconds = time.perf_counter() - began
        assert len(found) == len(requests)
        return seconds

    async def over_http(self) -> float:
        async def one(seed: int) -> int:
            answer = await self.http.chat.completions.create(
                model=self.model, messages=self.asked[seed], seed=seed, max_tokens=self.num_tokens,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.usage.completion_tokens

        began = time.perf_counter()
        found = await asyncio.gather(*map(one, range(len(self.asked))))
        seconds = time.perf_counter() - began
        assert found == [self.num_tokens] * len(self.asked)
        return seconds

    async def streamed(self) -> tuple[float, float]:
        """Seconds to the first token of a lone chat, and between two tokens (median)."""
        began, times = time.perf_counter(), []
        stream = await self.http.chat.completions.create(
            model=self.model, messages=self.asked[0], seed=0, max_tokens=self.num_tokens,
            stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.perf_counter())
        return times[0] - began, statistics.median(b - a for a, b in itertools.pairwise(times))


async def measure(sides: Sides, rounds: int) -> tuple[list[tuple[float, float]], list]:
    pairs, lone = [], []
    for index in range(rounds + 1):
        order = ("http", "grpc") if index % 2 else ("grpc", "http")
        seconds = {}
        for side in order:
            call = sides.over_http() if side == "http" else asyncio.to_thread(sides.over_grpc)
            seconds[side] = await call
        first, step = await sides.streamed()
        one = await asyncio.to_thread(sides.over_grpc, 1, 1)
        if index:
            pairs.append((seconds["grpc"], seconds["http"]))
            lone.append((first, step, one))
        print(f"{index}/{rounds}: {seconds}, first {first:.3f}, step {step:.3f}", file=sys.stderr)
    return pairs, lone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    results.add_option(parser)
    arguments = parser.parse_args()
    token = new_token()
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((directory / "log.txt").open("w"))
        replica = subprocess.Popen(
            [sys.executable, "-m", "launch.rollout", f"--policy={arguments.policy}",
             f"--port={PORTS[0]}", f"--http_port={PORTS[1]}",
             f"--config.rollout.max_response_tokens={max(arguments.tokens, 64)}"],
            env={**os.environ, TOKEN_VARIABLE: token}, stdout=log, stderr=log,
        )  # fmt: skip
        stack.callback(replica.wait)
        stack.callback(replica.terminate)
        sides = Sides(arguments.policy, token, arguments.tokens, arguments.requests)
        while "serves " not in (directory / "log.txt").read_text():
            if replica.poll() is not None:
                sys.exit((directory / "log.txt").read_text()[-2000:])
            time.sleep(0.2)
        sides.connect(arguments.policy)
        pairs, lone = asyncio.run(measure(sides, arguments.rounds))
    ratios = [grpc / http for grpc, http in pairs]
    low, high, level = median_interval(ratios)
    firsts = [(first - (one - step)) / step for first, step, one in lone]
    rows = [
        ["tokens per second over HTTP / over gRPC",
         f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"],
        ["seconds over gRPC", f"{statistics.median(a for a, _ in pairs):.2f}"],
        ["seconds over HTTP", f"{statistics.median(b for _, b in pairs):.2f}"],
        ["first token of a lone chat, less its prefill, in decode steps",
         f"{statistics.median(firsts):.2f}"],
        ["first token, s", f"{statistics.median(a for a, _, _ in lone):.3f}"],
        ["between tokens, s", f"{statistics.median(b for _, b, _ in lone):.3f}"],
    ]  # fmt: skip
    text = table(["", "median"], rows) + (
        f"\n\nBrackets: {100 * level:.0f} % interval of {len(pairs)} rounds of "
        f"{arguments.requests} chats of {arguments.tokens} tokens.\n"
    )
    names = "openai", "starlette", "uvicorn"
    versions = {name: importlib.metadata.version(name) for name in names}
    results.show("Chats over HTTP", text, arguments.json, versions)


if __name__ == "__main__":
    main()
