"""Time that the hidden-state metrics add to a training step of the quickstart.

    python -m benchmarks.critical_path

After one warm start, the train loop takes every step three times: as configured; with hidden states
streamed but not measured; and without hidden states. All three start with the same train state,
prompts and sampling seeds, so they sample the same tokens. All six orders of the three are used,
and each order is followed by its reverse. The run continues from the configured step. Steps are
compared by their ratios. The median of the ratios comes first, with an interval from order
statistics.

CPU seconds are those of this process, including the embedded replica and all XLA threads. The
verifiers are separate processes, equal on all sides. Last, the metrics of one step's responses are
measured with nothing else running.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from benchmarks import cpu_clock, results
from benchmarks.results import median_interval, table
from configs import quickstart
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.models.of_config import starting_params
from semrl_jax.runs import EXIT_PREEMPTED, validate
from semrl_jax.runs.setup import OpenRun, open_run
from semrl_jax.runs.workdir import open_workdir
from semrl_jax.sampling.source import Counted, Now, Rounds
from semrl_jax.support.clock import Clock
from semrl_jax.support.console import Bar, Reporter
from semrl_jax.training import loop
from semrl_jax.training.passes import PassPlan
from semrl_jax.training.probes import Tools, load_probes
from semrl_jax.training.train_state import TrainState

MEASURED, STREAMED, NO_STATES = SIDES = "metrics", "streamed", "no states"
# Each order is followed by its reverse. Every side is first, second and last equally often.
ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2))
STAGES = ("step", "sync_weights", "sample", "generate", "advantages", "update")
ALONE_REPEATS = 5

Row = Mapping[str, float]


class Silent(Reporter):
    """Prints nothing about single steps."""

    def line(self, text: str) -> None:
        pass


def batches_of(run: OpenRun) -> Rounds:
    """What a run with neither a lag nor dynamic sampling samples."""
    return run.source.source.batches


def sides_of(run: OpenRun) -> dict[str, OpenRun]:
    """The same run as configured, without measuring, and without hidden states."""

    def variant(measured: bool, source: str) -> OpenRun:
        config = run.run.config.copy_and_resolve_references()
        config.hidden_states.source = source
        if not measured:
            config.shaping.target = "none"
        validate(config)
        rounds, sync = batches_of(run), run.evaluator.sampler.sync
        measurer = rounds.measurer if measured else None
        sync = dataclasses.replace(sync, config=config, reporter=Silent())
        sampler = dataclasses.replace(run.evaluator.sampler, config=config, sync=sync)
        of_side = {"config": config, "sampler": sampler, "measurer": measurer}
        source = Now(sampler, dataclasses.replace(rounds, **of_side))
        plan = PassPlan.of(run.learner.algorithm, config)
        return dataclasses.replace(
            run,
            source=Counted(source, run.source.counts),
            evaluator=dataclasses.replace(run.evaluator, config=config, sampler=sampler),
            learner=dataclasses.replace(run.learner, config=config, plan=plan),
            probes=load_probes(Tools(config, plan, sync.peers, measurer, sync.stop)),
        )

    return {
        MEASURED: variant(True, run.run.config.hidden_states.source),
        STREAMED: variant(False, run.run.config.hidden_states.source),
        NO_STATES: variant(False, "none"),
    }


def take_step(run: OpenRun, state: TrainState, bar: Bar) -> tuple[TrainState, Row]:
    """One step of the train loop and its row; `state` stays usable."""
    config = run.evaluator.config
    config.training.num_steps = int(state.step) + 1
    started = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # the update donates its state
    with cpu_clock.installed():
        steps = loop.run_steps(
            run.parts._replace(config=config), started._replace(position=state.position), bar.status
        )
        result = next(steps)
    num_tokens = sum(len(item.rollout.response_ids) for item in result.scored)
    row = result.scalars | result.clock.scalars() | {"response/num_tokens": float(num_tokens)}
    return result.state, row


def metrics_alone(run: OpenRun, state: TrainState, bar: Bar) -> tuple[float, float, int, int]:
    """One step's responses measured and nothing else: median seconds and CPU seconds; how many they
    are, and the bytes of their states."""
    run.evaluator.config.hidden_states.compare_every = 1  # keeps the states
    step, measurer = int(state.step), batches_of(run).measurer
    run.source.offer((state.params,), step)
    scored = run.source.next(step, state.position, Clock(bar.status)).scored
    seconds, cpu_s = [], []
    for _ in range(ALONE_REPEATS):
        started, cpu_started = time.monotonic(), time.process_time()
        pending = [measurer.submit(item.rollout.hidden_states[:, 0]) for item in scored]
        measurer.flush()
        for future in pending:
            future.result()
        measurer.submit_batch(scored.mean_states).result()
        seconds.append(time.monotonic() - started)
        cpu_s.append(time.process_time() - cpu_started)
    num_bytes = sum(item.rollout.hidden_states.nbytes for item in scored)
    return statistics.median(seconds), statistics.median(cpu_s), len(scored), num_bytes


def report(rows: Mapping[str, Sequence[Row]], alone: tuple[float, float, int, int]) -> str:
    """The ratios first, then every stage of every side, as Markdown."""

    def medians(key: str) -> list[float]:
        return [statistics.median(row[key] for row in rows[side]) for side in SIDES]

    ratios = []
    for unit, name in (("time", "step time"), ("cpu", "step CPU")):
        for baseline in (STREAMED, NO_STATES):
            key = f"{unit}/step_s"
            steps = [(row[key], other[key]) for row, other in zip(rows[MEASURED], rows[baseline])]
            found = [step / other for step, other in steps]
            added = statistics.median(step - other for step, other in steps)
            low, high, level = median_interval(found)
            ratios.append([
                f"{name}, {MEASURED} / {baseline}", f"{statistics.median(found):.3f}",
                f"[{low:.3f}, {high:.3f}]", f"{added:+.3f} s",
            ])  # fmt: skip
    stages = [
        [stage]
        + [
            f"{value:.4f}"
            for pair in zip(medians(f"time/{stage}_s"), medians(f"cpu/{stage}_s"))
            for value in pair
        ]
        for stage in STAGES
    ]
    seconds, cpu_s, num_responses, num_bytes = alone
    step_cpu_s = medians("cpu/step_s")[0]
    header = ("Ratio", "median", f"{100 * level:.1f} % interval", "difference")
    return f"""\
{table(header, ratios)}

Medians of {len(found)} pairs.

{table(("Stage", *(f"{side}, {unit}" for side in SIDES for unit in ("s", "CPU s"))), stages)}

Metrics alone: {seconds:.3f} s, {cpu_s:.3f} CPU s per step ({1e3 * cpu_s / num_responses:.2f} CPU ms
per response), {100 * cpu_s / step_cpu_s:.1f} % of the step's CPU seconds. A step has
{num_responses} responses, {medians("response/num_tokens")[0]:.0f} response tokens and
{num_bytes / 2**20:.1f} MiB of hidden states."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="steps, each taken three times")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these, not counted")
    parser.add_argument("--workdir", help="directory whose warm start is used, or made if missing")
    results.add_option(parser)
    arguments = parser.parse_args()
    config = quickstart.get_config()
    config.evaluation.every_steps = 0
    config.logging.rollouts_every_steps = 0
    validate(config)
    rows: dict[str, list[Row]] = {side: [] for side in SIDES}
    with contextlib.ExitStack() as stack:
        path = arguments.workdir or stack.enter_context(tempfile.TemporaryDirectory())
        workdir = stack.enter_context(contextlib.closing(open_workdir(path, config)))
        stop = StopRequest(config.training.grace_s, EXIT_PREEMPTED)
        run = stack.enter_context(open_run(config, workdir, Reporter(), stop, Peers()))
        sides = sides_of(run)
        # Checkpoints of the workdir are not read.
        learner = run.learner
        state = learner.first_state(starting_params(run.start, learner.policy, learner.mesh))
        num_rounds = arguments.warmup + arguments.pairs
        bar = stack.enter_context(run.run.reporter.bar("steps", num_rounds, "steps"))
        for index in range(num_rounds):
            finished, sampled = {}, set()
            for position in ORDERS[index % len(ORDERS)]:
                side = SIDES[position]
                finished[side], row = take_step(sides[side], state, bar)
                sampled.add((row["response/num_tokens"], row["reward/num_correct"]))
                if index >= arguments.warmup:
                    rows[side].append(row)
            assert len(sampled) == 1, f"the sides sampled different responses: {sampled}"
            state = finished[MEASURED]
            bar.advance()
            print(f"pair {index + 1}/{num_rounds} ...", file=sys.stderr, flush=True)
        alone = metrics_alone(sides[MEASURED], state, bar)
    results.show("Metrics in a step of the quickstart", report(rows, alone), arguments.json)


if __name__ == "__main__":
    main()
