"""Steps per second with sampling during the updates, and without it.

    python -m benchmarks.ahead --pairs=7 --json=benchmarks/results/ahead.json

Runs of launch.train with lag 0 and 1 alternate, replica and trainer on one core each:

- delayed: a replica that sleeps as long as the trainer works on a batch, in place of sampling; all
  else, weight sync and streaming, is real. A run whose replica answers at once shows all the work
  of the trainer's core.
- real: configs/quickstart_async.py with its JAX replica, the model of benchmarks.step, and 16
  responses of 256 tokens.
- quickstart: configs/quickstart_async.py, 256 short responses.

Sampling and measuring take three quarters of the time of the update in both.

Then one batch of 32 groups goes to four delayed replicas, one of which takes 4 times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np

from benchmarks import results
from benchmarks.step import make_model
from configs import quickstart
from semrl_jax.data import tokenizer_hash
from semrl_jax.models import tensor_specs
from semrl_jax.models.of_config import build_policy
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire.auth import TOKEN_VARIABLE, new_token
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.types import Rollout, SampleRequest, SamplingParams, VersionSpan
from tests.rollout.embedded import EmbeddedReplica

CORES = sorted(os.sched_getaffinity(0))
GROUPS, GROUP_S = 32, 0.1  # of a batch for several replicas; seconds for each group
SKIPPED = 3  # steps at the start of a run: compilation, and the pipeline is filled
# One kind of step.
PLAIN = (
    "--config.warm_start.num_steps=0", "--config.evaluation.every_steps=0",
    "--config.checkpoints.every_steps=1000", "--config.logging.rollouts_every_steps=0",
    "--config.logging.plot_every_steps=0",
)  # fmt: skip
# 64 responses of 256 tokens, so that receiving and grading them takes little of the cores that the
# update needs; the engine that sleeps has no states.
LONG = (
    "--config.data.prompts_per_step=8", "--config.training.prompts_per_minibatch=8",
    "--config.rollout.max_response_tokens=256", "--config.training.micro_batch_size=4",
    "--config.hidden_states.source=none", "--config.shaping.target=none",
)  # fmt: skip


# Few long responses of a larger model, by a real replica.
FEW_LONG = (
    "--config.data.task=files", "--config.data.prompts_per_step=2",
    "--config.training.prompts_per_minibatch=2", "--config.training.micro_batch_size=4",
    "--config.rollout.max_response_tokens=256", "--config.rollout.jax_chunk_tokens=16",
    "--config.rewards.function=benchmarks.peers.reward:vowels",
    "--config.evaluation.held_out=False",
)  # fmt: skip


class SleepingEngine(JaxEngine):
    """Takes weights as the JAX engine does, and sleeps where that would sample.

    Attributes:
      delay_s: from the start of a call to its last response; they come at equal distances.
    """

    delay_s = 0.0
    group_s = 0.0  # more for each group of the call

    async def generate(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        async with self.turn:  # one call at a time
            async for rollout in self._slept(call):
                yield rollout

    @functools.cached_property
    def turn(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def _slept(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        length = call.sampling.max_tokens
        groups = {request.group_id for request in call.requests}
        pause_s = (self.delay_s + self.group_s * len(groups)) / len(call.requests)
        loop = asyncio.get_running_loop()
        started = loop.time()
        for number, request in enumerate(call.requests, 1):
            await asyncio.sleep(started + number * pause_s - loop.time())
            ids = np.random.default_rng(request.seed).integers(3, 20, length, np.int32)
            logprobs = np.full(length, -3.0, np.float32)
            yield Rollout(
                sample_id=request.sample_id,
                group_id=request.group_id,
                sample_index=request.sample_index,
                prompt_ids=request.prompt_ids,
                response_ids=ids,
                rollout_logprobs=logprobs,
                rollout_raw_logprobs=logprobs,
                finish_reason="length",
                versions=(VersionSpan(call.version, 0, length),),
            )


@contextlib.contextmanager
def sleeping_replica(token: str, delay_s: float, group_s: float = 0.0) -> Iterator[str]:
    """The address of a new server in this process: a replica serves one run."""
    policy, tokenizer = build_policy(quickstart.get_config())
    engine = SleepingEngine(policy, tokenizer_hash=tokenizer_hash(tokenizer))
    engine.delay_s, engine.group_s = delay_s, group_s
    with EmbeddedReplica(engine, token=token) as replica:
        yield replica.address


def batch_s(group_s: list[float], num_batches: int) -> float:
    """Seconds, the median, in which replicas that take so long for a group sample one batch."""
    token = new_token()
    policy, tokenizer = build_policy(quickstart.get_config())
    specs = tensor_specs(policy.config, policy.compute_dtype)
    weights = [np.zeros(spec.shape, spec.dtype) for spec in specs]
    requests = [
        SampleRequest(f"{group}/{i}", group, i, np.array([3, 4], np.int32), seed=group * 8 + i)
        for group in range(GROUPS)
        for i in range(8)
    ]
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(sleeping_replica(token, 0.0, each)) for each in group_s]
        client = RolloutClient(addresses, token, run_id="run", attempt_id="attempt")
        stack.enter_context(client).connect(
            model_hash=policy.config.hash,
            tokenizer_hash=tokenizer_hash(tokenizer),
            vocab_size=policy.config.vocab_size,
        )
        version = client.sync_weights(specs, lambda: iter(weights), step=0)
        seconds = []
        for _ in range(num_batches):
            started = time.monotonic()
            options = {"version": version, "groups_per_call": 1}
            found = list(client.generate(requests, SamplingParams(max_tokens=16), **options))
            assert len(found) == len(requests)
            seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def slow_replica(num_batches: int) -> str:
    """The table of one slow replica among four."""
    kinds = {
        "four": [GROUP_S] * 4,
        "four, one of them 4 times as slow": [4 * GROUP_S] + [GROUP_S] * 3,
        "three": [GROUP_S] * 3,
    }
    seconds = {name: batch_s(each, num_batches) for name, each in kinds.items()}
    lines = []
    for name, each in kinds.items():
        bound = 4 / sum(GROUP_S / of_group for of_group in each)
        ratio = seconds[name] / seconds["four"]
        lines.append([name, f"**{ratio:.2f}**", f"{bound:.2f}", f"{seconds[name]:.3f}"])
    return results.table(["replicas", "time of a batch to that of four", "bound", "s"], lines)


class Runs:
    """Runs of launch.train, one after the other."""

    def __init__(self, directory: pathlib.Path, num_steps: int):
        self._directory, self._num_steps, self._count = directory, num_steps, 0
        self._token = token = new_token()
        # Programs are compiled once for all runs.
        self._environment = {TOKEN_VARIABLE: token, "JAX_COMPILATION_CACHE_DIR": f"{directory}/jax"}

    def delayed(self, lag: int, delay_s: float) -> list[dict[str, float]]:
        """See `rows`; here with a sleeping replica."""
        with sleeping_replica(self._token, delay_s) as address:
            flags = (f"--config.rollout.addresses={address}", *LONG)
            return self.rows("quickstart", lag, *flags, prefix=("taskset", "-c", str(CORES[0])))

    def rows(
        self, config: str, lag: int, *flags: str, prefix: tuple[str, ...] = ()
    ) -> list[dict[str, float]]:
        """The rows of a new run, without its first steps; `prefix` is put before the command."""
        self._count += 1
        workdir = self._directory / str(self._count)
        command = [
            *prefix, sys.executable, "-m", "launch.train", f"--config=configs/{config}.py",
            f"--workdir={workdir}", f"--config.rollout.max_staleness={lag}",
            f"--config.training.num_steps={self._num_steps}", *PLAIN, *flags,
        ]  # fmt: skip
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=os.environ | self._environment
        )
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines][SKIPPED:]


def few_long(directory: pathlib.Path) -> tuple[str, ...]:
    """The flags of a run with few long responses; makes its model."""
    model, file = directory / "model", directory / "prompts.jsonl"
    prompts = make_model(model)
    file.write_text("\n".join(json.dumps({"question": text, "answer": "0"}) for text in prompts))
    return (*FEW_LONG, f"--config.model.path={model}", f"--config.data.files={file}")


def median(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row.get(key, 0.0) for row in rows)


def busy(rows: list[dict[str, float]]) -> tuple[float, float]:
    """The shares of a step in which the trainer and the replicas work, the medians."""
    trainer, ahead = [], []
    for row in rows:
        step_s, waits_s = row["time/step_s"], row["time/sample_s"]
        trainer.append(1 - waits_s / step_s)
        ahead.append(min(row.get("time/sample_ahead_s", waits_s) / step_s, 1.0))
    return statistics.median(trainer), statistics.median(ahead)


def own_s(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds per step of the trainer's own work, and of weight sync and sampling."""
    trainer = [row["time/step_s"] - row["time/sample_s"] for row in rows]
    ahead = [row.get("time/sample_ahead_s", row["time/sample_s"]) for row in rows]
    return statistics.median(trainer), statistics.median(ahead)


def compared(
    name: str, pairs: list[tuple[list[dict[str, float]], list[dict[str, float]]]]
) -> list[str]:
    """A line of the table, which compares lag 0 with lag 1."""
    ratios = [median(a, "time/step_s") / median(b, "time/step_s") for a, b in pairs]
    low, high, _ = results.median_interval(ratios)
    sides = list(zip(*pairs))
    steps = [statistics.median(median(rows, "time/step_s") for rows in side) for side in sides]
    shares = [[statistics.median(share) for share in zip(*map(busy, side))] for side in sides]
    own = [[statistics.median(seconds) for seconds in zip(*map(own_s, side))] for side in sides]
    return [
        name,
        f"**{statistics.median(ratios):.2f}** [{low:.2f}, {high:.2f}]",
        f"{sum(own[0]) / max(own[0]):.2f}",
        *(f"{seconds:.3f}" for seconds in steps),
        *(f"{trainer:.0%}, {replicas:.0%}" for trainer, replicas in shares),
        *(f"{trainer:.3f}, {replicas:.3f}" for trainer, replicas in own),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15)
    results.add_option(parser)
    arguments = parser.parse_args()
    if len(CORES) < 2:
        raise SystemExit("this benchmark needs two cores")
    os.sched_setaffinity(0, CORES[1:])  # the delayed replica is in this process
    pairs = {"delayed": [], "real": [], "quickstart": []}
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(pathlib.Path(directory), arguments.steps)
        flags_of = {"real": few_long(pathlib.Path(directory)), "quickstart": ()}
        delay_s, _ = own_s(runs.delayed(0, 0.0))
        at_once = []
        for _ in range(arguments.pairs):
            at_once.append(runs.delayed(0, 0.0))
            pairs["delayed"].append(tuple(runs.delayed(lag, delay_s) for lag in (0, 1)))
            both = "taskset", "-c", ",".join(map(str, CORES))
            for name, flags in flags_of.items():
                pairs[name].append(
                    tuple(runs.rows("quickstart_async", lag, *flags, prefix=both) for lag in (0, 1))
                )
    header = [
        "replica", "steps/s, lag 1 / lag 0", "most possible", "step s, lag 0", "step s, lag 1",
        "trainer, replica busy, lag 0", "busy, lag 1", "work of trainer, replica, s, lag 0",
        "work s, lag 1",
    ]  # fmt: skip
    alone = [median(rows, "time/step_s") for rows in at_once]
    ratios = [
        median(b, "time/step_s") / max(each, delay_s)
        for each, (_, b) in zip(alone, pairs["delayed"])
    ]
    low, high, level = results.median_interval(ratios)
    lines = results.table(header, [compared(name, found) for name, found in pairs.items()])
    notes = (
        f"{arguments.pairs} alternating pairs of runs of {arguments.steps} steps; brackets: "
        f"{level:.0%} interval of the median. `most possible` is the work of the trainer and the "
        "replica, divided by the larger of the two, with lag 0. With lag 1, the trainer's work "
        "includes receiving and grading the next batch, on the same core. The delayed replica "
        f"sleeps {delay_s:.3f} s per batch, as long as the trainer works on a batch that it has. "
        f"With a replica that answers at once, a step takes {statistics.median(alone):.3f} s: all "
        "the work of the trainer's core, so an ideal overlap takes as long. In the row `delayed`, "
        f"a step with lag 1 takes {statistics.median(ratios):.3f} times that [{low:.3f}, "
        f"{high:.3f}]."
    )
    others = (
        f"A batch of {GROUPS} groups, {GROUP_S:g} s each, `groups_per_call=1`; the bound is that "
        "of speeds that add up. A slow replica that cost its share would give the time of three."
    )
    text = f"{lines}\n\n{notes}\n\n{slow_replica(arguments.pairs)}\n\n{others}"
    os.sched_setaffinity(0, CORES)  # the result names the machine
    results.show("Sampling during the updates", text, arguments.json)


if __name__ == "__main__":
    main()
