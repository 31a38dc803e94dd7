"""What rounding explains between an engine and the trainer, and how many faults are named.

    python -m benchmarks.mismatch --json=benchmarks/results/mismatch.json
    python -m benchmarks.mismatch --runs=0 --faults=0 --model=models/smollm2

The budget: the JAX engine samples with random models of five families, in a dtype, and the trainer
computes the same tokens in another. The faults: engines of `benchmarks.faults`, half of them in
architectures, layers and sizes drawn by the seed. `semrl_jax/runs/mismatch_budget.py` has the
limits of the first table.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time

import numpy as np

from benchmarks import faults, results
from semrl_jax import models
from semrl_jax.analysis.mismatch import Observation
from semrl_jax.analysis.mismatch.computation import computation_of

# Trainer and engine; fp8 is rounding of the engine's kernels, with bfloat16 activations.
PAIRS = (
    ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"), ("float32", "fp8"), ("bfloat16", "fp8"),
)  # fmt: skip


def differences(pair: faults.Pair, observation: Observation, dtype: str) -> dict[str, float]:
    """Mean and largest difference of log-probabilities in nats, and of final states, relative."""
    computed = computation_of(pair.config, pair.params, observation.ids, observation.targets, dtype)
    x = None
    for index in range(pair.config.num_layers + 1):
        x = computed.states(index - 1, index, x)
    ours, theirs = np.asarray(x, np.float32), observation.states[pair.config.num_layers]
    rows = np.isfinite(observation.logprobs) & observation.is_token
    relative = np.linalg.norm(ours - theirs, axis=2) / np.linalg.norm(ours, axis=2)
    nats = np.abs(computed.logprobs(x) - observation.logprobs)
    found = {}
    for name, values in (("logprob", nats[rows]), ("state", relative[rows])):
        found |= {f"{name} mean": float(values.mean()), f"{name} max": float(values.max())}
    return found


def engine_pair(config: models.DecoderConfig, params: models.Params, dtype: str) -> faults.Pair:
    """A healthy engine in a dtype."""
    if dtype == "fp8":
        params_of_engine = faults.in_fp8(config, params)
        return faults.Pair(config, params, models.Policy(config, "bfloat16"), params_of_engine)
    return faults.Pair(config, params, models.Policy(config, dtype), params)


def budget(models_of: list[tuple[models.DecoderConfig, models.Params]], **sizes: int) -> str:
    """The table of the largest values over all models."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {pair: [] for pair in PAIRS}
    for seed, (config, params) in enumerate(models_of):
        for dtype in dict.fromkeys(engine for _, engine in PAIRS):
            pair = engine_pair(config, params, dtype)
            observation = faults.observe(pair, seed, **sizes)
            for trainer in [trainer for trainer, engine in PAIRS if engine == dtype]:
                found[trainer, dtype].append(differences(pair, observation, trainer))
    rows = []
    for (trainer, engine), each in found.items():
        largest = {name: max(one[name] for one in each) for name in each[0]}
        typical = np.median([one["logprob mean"] for one in each])
        rows.append(
            [
                f"{trainer}, {engine}", f"{typical:.1e}",
                *(f"{largest[n]:.1e}" for n in ("logprob mean", "logprob max")),
                *(f"{largest[n]:.1e}" for n in ("state mean", "state max")),
            ]
        )  # fmt: skip
    header = (
        "trainer, engine", "mean logprob, median", "mean logprob, largest", "max logprob",
        "mean state, largest", "max state",
    )  # fmt: skip
    return results.table(header, rows)


def judged(seeds: range, dtype: str) -> tuple[str, str]:
    """The share of faults with the right layer and cause, by kind, and those that are not."""
    right: dict[str, list[bool]] = {}
    wrong, started = [], time.monotonic()
    for seed in seeds:
        for case in faults.cases(seed, dtype):
            diagnosis = faults.diagnosed(case.pair(), seed)
            is_right = faults.is_right(case, diagnosis)
            right.setdefault(case.name.rpartition(" ")[0], []).append(is_right)
            if not is_right:
                wrong.append(f"- {case.name}: {diagnosis.sentence}")
    rows = [[kind, f"{sum(each)} of {len(each)}"] for kind, each in right.items()]
    total = [one for each in right.values() for one in each]
    rows.append(["all", f"{sum(total)} of {len(total)} ({100 * np.mean(total):.0f} %)"])
    seconds = (time.monotonic() - started) / max(len(total), 1)
    note = f"\n\n{seconds:.1f} s per fault, with the sampling." + "\n".join(["", *wrong])
    return results.table(("fault", "right layer and cause"), rows), note


def false_alarms(count: int) -> str:
    """How many healthy pairs are blamed."""
    wrong = []
    cases = [case for seed in range(count) for case in faults.healthy(seed)]
    for case in cases:
        diagnosis = faults.diagnosed(case.pair(), int(case.name.split()[-1]))
        if not diagnosis.is_healthy:
            wrong.append(f"- {case.name}: {diagnosis.sentence}")
    return "\n".join([f"{len(wrong)} of {len(cases)} healthy pairs are blamed.", *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="random models of the budget")
    parser.add_argument("--faults", type=int, default=5, help="seeds, of ten faults each")
    parser.add_argument("--healthy", type=int, default=20, help="seeds, of three pairs each")
    parser.add_argument("--dtype", default="float32", help="of the engines with faults")
    parser.add_argument("--model", default="", help="Hugging Face directory, for the budget too")
    results.add_option(parser)
    options = parser.parse_args()
    parts = []
    if options.runs:
        random = [
            faults.model(list(faults.FAMILIES)[seed % len(faults.FAMILIES)], seed)
            for seed in range(options.runs)
        ]
        parts.append(f"{options.runs} random models of four layers:\n\n{budget(random)}")
    if options.model:
        directory = pathlib.Path(options.model)
        config = models.load_config(directory)
        config = dataclasses.replace(config, max_position_embeddings=512)
        policy = models.Policy(config)
        mesh = models.make_mesh(dict.fromkeys(models.AXES, 1))
        shardings = models.parameter_shardings(policy.shapes(), mesh)
        params = models.load_params(directory, config, shardings)
        table = budget([(config, params)], count=4, num_tokens=24)
        parts.append(f"{directory.name}, four responses of 24 tokens:\n\n{table}")
    if options.faults:
        table, note = judged(range(options.faults), options.dtype)
        parts.append(f"Faults of engines in {options.dtype}:\n\n{table}{note}")
    if options.healthy:
        parts.append(false_alarms(options.healthy))
    results.show("Mismatch: budget and causes", "\n\n".join(parts), options.json)


if __name__ == "__main__":
    main()
