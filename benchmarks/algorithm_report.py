"""The page of `benchmarks.algorithms`: docs/algorithm_study.md and its figure.

The runs of all seeds are evaluated on the same problems. Intervals come from a bootstrap over both:
each draw resamples the seeds and the problems, with replacement, and takes the mean over all pairs.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Float
from matplotlib.figure import Figure

from benchmarks.pass_at_k import NUM_SAMPLES, pass_at_k
from semrl_jax.pages.report.picture import COLOURS
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import read_rows
from semrl_jax.support.safe_files import read_json_object, replacing

matplotlib.use("Agg")

START = "start"  # name of the runs that only make and evaluate a warm start
BASE = "grpo"  # with which the others are compared
RESULT = "result.json"  # in the directory of a run that is finished
ACCURACY = "eval/arithmetic/greedy_accuracy"
NUM_DRAWS = 10_000
MIN_SEEDS = 3  # with fewer, an interval says nothing about the spread over seeds
DOCS = pathlib.Path(__file__).parents[1] / "docs"
FIGURE = "figures/algorithm_study.png"
SCORES = {
    "steps": "accuracy over steps", "greedy": "greedy accuracy", 1: "pass@1",
    NUM_SAMPLES: f"pass@{NUM_SAMPLES}",
}  # fmt: skip
COMPARED = ("steps", "greedy", NUM_SAMPLES)  # with GRPO


class Results(NamedTuple):
    """The finished runs of one variant.

    Attributes:
      title: for tables.
      seeds: of the runs, ascending.
      scores: by the keys of SCORES, float64 [S, P]: per seed and problem. "steps" is the mean
        greedy accuracy over the evaluations after the first step, the others are of the last
        weights.
      curves: greedy accuracy by step, one dict per seed.
      machines: descriptions of the machines that ran them.
    """

    title: str
    seeds: tuple[int, ...]
    scores: dict[str | int, Float[np.ndarray, "S P"]]
    curves: list[dict[int, float]]
    machines: set[str]


def read_results(output: pathlib.Path, variant: str) -> Results | None:
    """Reads all finished runs of a variant; None if there is none."""
    runs = [file.parent for file in output.glob(f"seed*/{variant}/{RESULT}")]
    if not runs:
        return None
    records = {run: read_json_object(run / RESULT) for run in runs}
    runs.sort(key=lambda run: records[run]["seed"])
    found = [run_scores(run) for run in runs]
    return Results(
        title=records[runs[0]]["title"],
        seeds=tuple(records[run]["seed"] for run in runs),
        scores={score: np.stack([one[score] for one in found]) for score in SCORES},
        curves=[curve(run) for run in runs],
        machines={records[run]["machine"] for run in runs},
    )


def run_scores(run: pathlib.Path) -> dict[str | int, Float[np.ndarray, " P"]]:
    """The scores of each problem in one run."""
    files = sorted((run / "rollouts").glob("eval_*.parquet"))
    steps = np.mean([correct_responses(file)[:, 0] for file in files[1:] or files], axis=0)
    last = correct_responses(files[-1])
    num_correct = last[:, 1:].sum(axis=1).astype(int)
    passed = {
        k: np.array([pass_at_k(NUM_SAMPLES, c, k) for c in num_correct.tolist()])
        for k in SCORES
        if isinstance(k, int)
    }
    return {"steps": steps, "greedy": last[:, 0], **passed}


def correct_responses(file: pathlib.Path) -> Float[np.ndarray, "P samples"]:
    """1 if a response is correct; the greedy one first, then those of pass@k, if there are any."""
    table = pq.read_table(file, columns=["group_id", "sample_index", "correct"])
    problem, sample, correct = (column.to_numpy() for column in table.columns)
    found = np.zeros((problem.max() + 1, sample.max() + 1))
    found[problem, sample] = correct
    return found


def curve(run: pathlib.Path) -> dict[int, float]:
    rows = read_rows(run / "metrics.jsonl")
    return {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row}


def interval(values: Float[np.ndarray, "S P"]) -> tuple[float, float, float]:
    """The mean and the bounds of its 95 % bootstrap interval over seeds and problems."""
    random, (num_seeds, num_problems) = np.random.default_rng(0), values.shape
    seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_DRAWS)
    problems = random.multinomial(num_problems, np.full(num_problems, 1 / num_problems), NUM_DRAWS)
    means = np.sum(seeds @ values * problems, axis=1) / values.size  # [draws]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def differences(own: Results, base: Results, score: str | int) -> Float[np.ndarray, "S P"] | None:
    """Scores less those of `base`, on the seeds that both have; None if there is none."""
    both = sorted(set(own.seeds) & set(base.seeds))
    if not both:
        return None
    rows = ([found.seeds.index(seed) for seed in both] for found in (own, base))
    own_rows, base_rows = rows
    return own.scores[score][own_rows] - base.scores[score][base_rows]


def table(results: dict[str, Results]) -> list[str]:
    """The rows of the Markdown table, in percent."""
    lines = [
        "| | seeds | accuracy over steps | less GRPO's | greedy accuracy | less GRPO's | pass@1 | "
        "pass@8 | less GRPO's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in results.items():
        cells = [own.title, str(len(own.seeds))]
        for score in SCORES:
            cells.append(_percent(interval(own.scores[score])))
            if score not in COMPARED:
                continue
            compared = name not in (START, BASE)
            found = differences(own, results[BASE], score) if compared else None
            cells.append("" if found is None else _percent(interval(found), sign="+"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _percent(values: tuple[float, float, float], sign: str = "") -> str:
    mean, low, high = (f"{100 * value:{sign}.1f}" for value in values)
    return f"{mean} ({low} to {high})"


def conclusion(results: dict[str, Results]) -> str:
    """Which variants with enough seeds differ from GRPO, in a sentence per score."""
    sentences = []
    for score in COMPARED:
        sides: dict[str, list[str]] = {"above": [], "below": []}
        for name, own in results.items():
            found = None if name in (START, BASE) else differences(own, results[BASE], score)
            if found is None or len(found) < MIN_SEEDS:
                continue
            _, low, high = interval(found)
            if low > 0 or high < 0:
                sides["above" if low > 0 else "below"].append(own.title)
        told = [f"{', '.join(names)} {side}" for side, names in sides.items() if names]
        sentences.append(f"- {SCORES[score]}: {'; '.join(told) or 'no variant'}.")
    head = f"Variants of at least {MIN_SEEDS} seeds whose interval of the difference excludes 0:"
    return "\n".join([head, "", *sentences])


def draw(results: dict[str, Results]) -> Figure:
    """Learning curves, and the final scores with their intervals."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    trained = {name: found for name, found in results.items() if name != START}
    for colour, found in zip(COLOURS, trained.values()):
        steps = sorted(set.intersection(*(set(one) for one in found.curves)))
        values = 100 * np.array([[one[step] for step in steps] for one in found.curves])
        left.plot(steps, values.mean(axis=0), color=colour, lw=1.8, label=found.title)
        left.fill_between(
            steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.1, lw=0
        )
    left.set(xlabel="step", ylabel="greedy accuracy, %", ylim=(0, 100))
    left.set_title("Held-out accuracy: mean and range over seeds", loc="left", fontsize=10)
    left.legend(fontsize=8, loc="lower right")
    for row, (colour, found) in enumerate(zip(COLOURS, trained.values())):
        for offset, score, face in ((-0.15, "greedy", colour), (0.15, NUM_SAMPLES, "white")):
            mean, low, high = (100 * value for value in interval(found.scores[score]))
            right.plot([low, high], [row + offset] * 2, color=colour, lw=1.4)
            right.plot(mean, row + offset, "o", color=colour, mfc=face)
    right.set_yticks(range(len(trained)), [found.title for found in trained.values()], fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="%")
    right.set_title("After the last step: greedy, and pass@8 (hollow)", loc="left", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def page(results: dict[str, Results]) -> str:
    num_problems = next(iter(results.values())).scores["greedy"].shape[1]
    machines = sorted(set.union(*(found.machines for found in results.values())))
    return "\n".join(
        [
            PAGE.format(num_problems=num_problems, figure=FIGURE, table="\n".join(table(results))),
            conclusion(results),
            "",
            LIMITS,
            "Measured on:",
            "",
            *machine_lines(machines),
            "",
        ]
    )


def machine_lines(machines: Sequence[str]) -> list[str]:
    """A line per machine and its versions, with all revisions of the code that ran there."""
    revisions: dict[str, list[str]] = {}
    for machine in machines:
        name, _, revision = machine.partition(", git ")
        revisions.setdefault(name, []).extend([revision] if revision else [])
    return [
        f"- {name}" + (f", git {', '.join(found)}" if found else "")
        for name, found in revisions.items()
    ]


PAGE = """# Algorithms compared on the quickstart

This page is made from finished runs by `python -m benchmarks.algorithms --output=DIR --report`.
`python -m benchmarks.algorithms --output=DIR` makes the runs.

The task is that of `configs/quickstart.py`: 40 steps of 256 responses, one update per step. The
runs of one seed start from the same warm start, which the first row describes. The number of
responses, the learning rate and the coefficients of KL and entropy are the same in all runs, except
where a config file of its own (`configs/quickstart_ppo.py`) says otherwise. A step of PPO has 256
prompts with one response each, a step of the others 32 prompts with 8. "+ VERL" adds the shaping to
the advantages.

![Learning curves and final scores]({figure})

Percent of {num_problems} held-out problems, with 95 % bootstrap intervals over seeds and problems.
"accuracy over steps" is the mean of the greedy accuracies after steps 5, 10, ..., 40: the earlier a
run learns, the higher. The other columns describe the weights after the last step. "greedy
accuracy" is of one response at temperature 0. pass@1 and pass@8 are estimated without bias from 8
responses at temperature 1. Differences from GRPO are paired: same seeds, same problems.

{table}
"""
LIMITS = """What this does not show:

- One task and one small model. All responses have about 52 tokens, so the ways to weight tokens and
  responses hardly differ.
- One learning rate, chosen for GRPO with VERL. Other variants may have a better one.
- With one update per step, every ratio of probabilities is 1. No clip acts, and GSPO differs from
  GRPO only in how tokens are weighted.
- A bootstrap over 3 to 5 seeds gives intervals that are 10 to 20 % too narrow.
"""


def write(output: pathlib.Path, variants: Sequence[str]) -> None:
    """Writes the page and its figure from the finished runs below `output`.

    Raises:
      UserError: if there is no finished run of GRPO.
    """
    found = {name: read_results(output, name) for name in (START, *variants)}
    results = {name: one for name, one in found.items() if one is not None}
    if BASE not in results:
        raise UserError(f"--output={output} has no finished run of GRPO to compare with.")
    with replacing(DOCS / FIGURE) as out:
        draw(results).savefig(out, format="png", dpi=110)
    with replacing(DOCS / "algorithm_study.md") as out:
        out.write(page(results).encode())
    print(
        f"wrote {DOCS / 'algorithm_study.md'} from {sum(len(r.seeds) for r in results.values())} "
        "runs"
    )
