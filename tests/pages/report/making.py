"""Runs on disk, without training."""

import json

import numpy as np

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.runs.records import write_rollouts
from semrl_jax.runs.workdir import open_workdir
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.rows import append_start
from tests.fixtures import make_scored

ER = MetricKey("effective_rank")


def make_run(path, config, num_steps=12, *, gain=0.02, eval_every=4, text=None, starts=(0,)):
    """A run of `num_steps` steps with the keys of a real one; returns its directory.

    `text` makes texts from token ids. The accuracy rises by `gain` per step. Of the 8 problems of
    an evaluation, the first `step / eval_every + 100 * gain` are solved.
    """
    workdir = open_workdir(str(path), config)
    for step in range(num_steps):
        add_row(workdir.path, step, scalars(step, gain, evaluated=step % eval_every == 0))
    for step in starts:
        append_start(workdir.path, {"step": step, "time": "2026-11-23T10:00:00+00:00",
                                    "devices": "1 x cpu", "changed": ["a: 1 -> 2"]})  # fmt: skip
    for step in range(0, num_steps, eval_every):
        rollouts = workdir.path / "rollouts"
        train = [scored(i, correct=i % 4 == 0) for i in range(16)]
        write_rollouts(rollouts, step, Scored.of(train), text or text_of)
        solved = step // eval_every + round(gain * 100)
        problems = [scored(i, correct=i < solved, group_size=1) for i in range(8)]
        write_rollouts(rollouts, step, Scored.of(problems), text or text_of, ["sums"] * 8)
    workdir.close()
    return workdir.path


def add_row(run, step, scalars):
    """Appends a row to the log, without events for TensorBoard."""
    with open(run / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"step": step, **scalars}) + "\n")


def scalars(step, gain, evaluated):
    found = {
        "reward/mean": 0.1 + gain * step,
        "reward/correct": 0.1 + gain * step,
        "metrics/effective_rank/correct": 10 + step,
        "metrics/effective_rank/incorrect": 9 + step / 2,
        "response/length/mean": 50.0 + (step % 3),
        "policy/loss": -0.01 * step,
        "policy/update_skipped": 0.5 * (step == 3),
        "rollout/retries": 2.0 * (step == 5),
        "rollout/replica_failures": 0.0,
        "rollout/staleness": 0.0,
        "time/sample_s": 1.0,
        "time/update_s": 2.0,
        "time/step_s": 3.5,
    }
    if evaluated:
        found["eval/sums/greedy_accuracy"] = 0.2 + gain * step
        found["eval/sums/greedy_accuracy_stderr"] = 0.05
    return found


def scored(index, *, correct, group_size=4, **fields):
    metrics = {ER: Measurement(index + 0.5, index != 3)}
    fields.setdefault("effective_ranks", np.array([1.5, 2.25], np.float32))
    return make_scored(
        index, score=float(correct), group_size=group_size, metrics=metrics, extracted=str(index),
        response_ids=np.arange(1, 6 + index, dtype=np.int32), **fields,
    )  # fmt: skip


def text_of(ids):
    return f"<|im_start|>user\n{len(ids)} tokens<|im_end|>"
