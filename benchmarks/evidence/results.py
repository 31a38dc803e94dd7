"""From finished runs to a small file, its statistics, and the part of docs/evidence.md on them."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from scipy import stats

from benchmarks import machine
from benchmarks.evidence.studies import (
    DEFECTS,
    METHODS,
    OF_FORMATS,
    OF_GCD,
    OF_SUMS,
    SHAPED,
    STUDIES,
    Study,
    Ways,
)
from benchmarks.performance import LEFT_OUT
from semrl_jax.evaluation.scores.pass_at_k import pass_at_k
from semrl_jax.jobs.result_directory import SAMPLES
from semrl_jax.jobs.sweep import Variant
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import read_rows
from semrl_jax.support.safe_files import read_json_object, replacing, write_json

matplotlib.use("Agg")

HERE = pathlib.Path(__file__).parents[2]
DOCS = HERE / "docs"
DIGITS = "0123456789abcdefghijklmnopqrstuvw"  # the number of correct responses to a problem
BONUS = "shaping/bonus_to_advantage/mean"
SAMPLED = "rollout/num_sampled_tokens"
NUM_DRAWS = 10_000
START = "start"  # the name of the model that all variants start from


class Part(NamedTuple):
    """A part of the page.

    Attributes:
      name: of its place on the page and of its figure.
      study: whose runs it is made of.
      variants: of the study, in this order.
      bases: variants with which all are compared, also with p values and pass@n: the first.
      page: in docs/.
    """

    name: str
    study: str
    variants: Sequence[str]
    bases: Sequence[str]
    page: str = "evidence.md"


PARTS = (
    Part("tiny", "tiny", tuple(SHAPED), ("none", "verl")),
    Part("formats", "formats", tuple(OF_FORMATS), ("none", "verl")),
    Part("sums", "sums", OF_SUMS, ("none", "verl")),
    Part("gcd", "gcd", OF_GCD, ("none", "verl")),
    Part("defects", "tiny", ("verl", "none", *DEFECTS), ("verl",)),
    Part("methods", "methods", tuple(METHODS), ("GRPO",), "algorithm_study.md"),
)


BY_K = {"verl": "#1f5fa8", "length": "#d1662a", "shuffled": "#8a939c"}  # of the figure by k


class Outcome(NamedTuple):
    """The finished runs of a variant, by ascending seed.

    Attributes:
      correct: responses per problem that are correct.
      curves: greedy accuracy by step.
      sampled: tokens sampled in training up to each of these steps; empty if the record has none.
      tokens: sampled in training.
      bonus: the mean bonus as a share of the mean |advantage|, over all steps.
    """

    seeds: tuple[int, ...]
    correct: Int[np.ndarray, "S P"]
    curves: list[dict[int, float]]
    sampled: list[dict[int, int]]
    tokens: Float[np.ndarray, " S"]
    bonus: Float[np.ndarray, " S"]

    @classmethod
    def of(cls, runs: Mapping[str, Any]) -> Outcome:
        seeds = sorted(runs, key=int)
        return cls(
            tuple(map(int, seeds)),
            np.array([[DIGITS.index(c) for c in runs[seed]["correct"]] for seed in seeds]),
            *(
                [{int(step): value for step, value in runs[s].get(key, {}).items()} for s in seeds]
                for key in ("greedy", "sampled")
            ),
            *(np.array([runs[seed][key] for seed in seeds]) for key in ("tokens", "bonus")),
        )

    def passed(self, k: int, num_samples: int) -> Float[np.ndarray, "S P"]:
        """pass@k of each seed and problem."""
        table = np.array([pass_at_k(num_samples, c, k) for c in range(num_samples + 1)])
        return table[self.correct]

    def over_steps(self) -> Float[np.ndarray, "S 1"]:
        """The mean greedy accuracy after the first step, of each seed; NaN without steps."""
        curves = [[value for step, value in one.items() if step] for one in self.curves]
        return np.array([[np.mean(each) if each else np.nan] for each in curves])

    def _by_tokens(self, seed: int) -> Float[np.ndarray, "2 E"]:
        """Tokens sampled so far, and greedy accuracy, at each evaluated step."""
        place = self.seeds.index(seed)
        curve = sorted(self.curves[place].items())
        rows = [(self.sampled[place].get(step, 0), accuracy) for step, accuracy in curve]
        return np.reshape(rows, (-1, 2)).T

    def at_tokens_of(self, base: Outcome) -> dict[int, float]:
        """Seeds: the mean difference of the greedy accuracy, after as many tokens as `base`.

        It is compared after each step of `base` but the first, and is interpolated between its own.
        Where `base` has sampled more than the whole run, both are taken after the run's last token.
        """
        found = {}
        for seed in sorted(set(self.seeds) & set(base.seeds)):
            (x, y), (x_base, y_base) = self._by_tokens(seed), base._by_tokens(seed)
            at = np.minimum(x_base[x_base > 0], x.max(initial=0.0))
            if at.any():
                found[seed] = np.mean(np.interp(at, x, y) - np.interp(at, x_base, y_base))
        return found


Score = Callable[[Outcome], Float[np.ndarray, "S P"]]  # of each seed and problem


def passed(k: int, num_samples: int) -> Score:
    return lambda outcome: outcome.passed(k, num_samples)


def evaluation_of(output: pathlib.Path, seed: int) -> pathlib.Path:
    """Where launch.evaluate writes what it found of the policies of a seed."""
    return output / "evaluation" / f"seed{seed}"


def collect(study: Study, output: pathlib.Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the results file has of a study; runs that are not evaluated are left out.

    Args:
      known: the file before. Its runs stay where `output` has none, so another machine can go on.
    """
    found: dict[str, dict[str, Any]] = {}
    for seed in study.all_seeds:
        for name in (START, *study.variants):
            directory = Variant((), name).directory
            run, policy = output / directory / f"seed{seed}", f"{directory}/seed{seed}-step"
            start = pathlib.PurePath(f"seed{seed}", study.start_model).parts[-2:]
            policy = "/".join(start) if name == START else policy + str(study.num_steps)
            file = evaluation_of(output, seed) / policy / SAMPLES
            own = known.get("runs", {}).get(name, {}).get(str(seed))
            if file.is_file():
                rows = read_rows(run / "metrics.jsonl")
                if name == START or (rows and rows[-1]["step"] == study.num_steps):
                    own = _of_run(rows, file) | _ways(study.ways, file)
                elif not own:
                    raise UserError(
                        f"{run} lacks its log of {study.num_steps} steps; bring it back."
                    )
            if own:
                found.setdefault(name, {})[str(seed)] = own
    return {
        "num_samples": study.evaluation["n"], "machine": machine.description(), "runs": found,
    }  # fmt: skip


def _of_run(rows: Sequence[Mapping[str, Any]], samples: pathlib.Path) -> dict[str, Any]:
    table = pq.read_table(samples, columns=["group_id", "correct"])
    problem, correct = (column.to_numpy(zero_copy_only=False) for column in table.columns)
    # Dynamic sampling drops responses, which count too.
    tokens = [row.get(SAMPLED, row.get("response/num_tokens", 0)) for row in rows]
    keys = {key for row in rows for key in row}
    accuracy = min((key for key in keys if key.endswith("/greedy_accuracy")), default="")
    return {
        "correct": "".join(DIGITS[c] for c in np.bincount(problem, correct).astype(int).tolist()),
        "greedy": {row["step"]: row[accuracy] for row in rows if accuracy in row},
        # A step is evaluated before it samples.
        "sampled": {
            row["step"]: int(before)
            for row, before in zip(rows, np.cumsum([0, *tokens]))
            if accuracy in row
        },
        "tokens": int(sum(tokens)),
        "bonus": float(np.mean([row[BONUS] for row in rows if BONUS in row] or [0.0])),
    }


def _ways(ways: Ways | None, samples: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """For each way to write a response: the share that takes it, and how much of it is right."""
    if ways is None:
        return {}
    table = pq.read_table(samples, columns=["response", "correct"]).to_pydict()
    way, correct = np.array(list(map(ways.of, table["response"]))), np.array(table["correct"])

    def shares(taken):
        return [taken.mean(), (correct & taken).sum() / max(taken.sum(), 1)]

    return {"ways": {name: np.round(shares(way == name), 4).tolist() for name in ways.names}}


def interval(values: Float[np.ndarray, "S P"]) -> tuple[float, float, float]:
    """The mean and the bounds of its 95 % bootstrap interval over seeds and problems.

    Each draw resamples both with replacement, and takes the mean over all pairs.
    """
    random, (num_seeds, num_problems) = np.random.default_rng(0), values.shape
    seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_DRAWS)
    problems = random.multinomial(num_problems, np.full(num_problems, 1 / num_problems), NUM_DRAWS)
    means = np.sum(seeds @ values * problems, axis=1) / values.size  # [draws]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


class Gain(NamedTuple):
    """The mean difference of two variants in percent points, paired by seed and problem.

    `low` and `high` are the wider bounds of two 95 % intervals: of the bootstrap over seeds and
    problems, and of Student's t over the seeds. Of three seeds, the bootstrap has no draw beyond
    the least and the largest, which include the true mean in 75 % of cases. `p` is of Student's t,
    NaN below two seeds. Bounds are NaN if there is a single value.
    """

    mean: float
    low: float
    high: float
    p: float

    @classmethod
    def of(cls, own: Outcome, base: Outcome, score: Score) -> Gain | None:
        """None without a seed that both have."""
        both = sorted(set(own.seeds) & set(base.seeds))
        if not both:
            return None
        own_scores, base_scores = (
            score(one)[[one.seeds.index(seed) for seed in both]] for one in (own, base)
        )
        return cls.of_differences(100 * (own_scores - base_scores))

    @classmethod
    def of_differences(cls, found: Float[np.ndarray, "S P"]) -> Gain:
        of_seeds = found.mean(axis=1)
        if found.size < 2:
            return cls(float(found.mean()), *[float("nan")] * 3)
        mean, low, high = interval(found)
        if len(found) < 2 or not np.ptp(of_seeds):  # equal to the bit is a comparison too
            return cls(mean, low, high, float("nan") if len(found) < 2 or mean else 1.0)
        test = stats.ttest_1samp(of_seeds, 0.0)
        of_t = test.confidence_interval(0.95)
        return cls(mean, min(low, of_t.low), max(high, of_t.high), float(test.pvalue))

    def __str__(self) -> str:
        bounds = "" if np.isnan(self.low) else f" ({self.low:+.1f}, {self.high:+.1f})"
        return f"{self.mean:+.1f}{bounds}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for the number of comparisons. Source: Holm 1979, step down."""
    order = np.argsort(p_values)
    scaled = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return corrected[np.argsort(order)].tolist()


def p_values(outcomes: Mapping[str, Outcome], base: str, n: int) -> dict[str, float]:
    """p of the difference in pass@1 from the base, for each variant that has one."""
    names = [name for name in outcomes if name not in (START, base)]
    gains = {name: Gain.of(outcomes[name], outcomes[base], passed(1, n)) for name in names}
    return {name: gain.p for name, gain in gains.items() if gain and not np.isnan(gain.p)}


def table(
    outcomes: Mapping[str, Outcome],
    bases: Sequence[str],
    n: int,
    further: Sequence[float] = (),
    levels: Mapping[str, Outcome] = {},
) -> list[str]:
    """A Markdown table: levels of the start and of the first base, differences of the others.

    A column of tokens or bonuses is there if the rows differ in it. "at equal tokens" is "over
    steps" as `Outcome.at_tokens_of` compares it.

    Args:
      further: p values of other tables, for which those here are corrected too.
      levels: the start and the first base with the seeds of the study alone. Their levels are
        shown; differences are over all seeds that two variants share.
    """
    base, *more = bases
    levels = {**outcomes, **levels}
    first, last = passed(1, n), passed(n, n)
    own = p_values(outcomes, base, n)
    corrected = dict(zip(own, holm([*own.values(), *further])))

    def score(name: str, of: Score, compared: str = base) -> str:
        if name in (START, compared):
            return shown(100 * of(levels[name]).mean(), ".1f") if compared == base else ""
        return str(Gain.of(outcomes[name], outcomes[compared], of) or "")

    def of_training(name: str, text: str) -> str:
        return "" if name == START else text

    def at_equal_tokens(name: str) -> str:
        if name in (START, base):
            return ""
        found = outcomes[name].at_tokens_of(outcomes[base])
        return str(Gain.of_differences(100 * np.array([*found.values()])[:, None])) if found else ""

    columns = {
        "seeds": lambda name: str(len(outcomes[name].seeds)),
        "tokens": lambda name: of_training(name, in_short(levels[name].tokens.mean())),
        "bonus": lambda name: of_training(name, f"{100 * levels[name].bonus.mean():.1f} %"),
        "over steps": lambda name: score(name, Outcome.over_steps),
        "at equal tokens": at_equal_tokens,
        "pass@1": lambda name: score(name, first),
        "p": lambda name: shown(corrected.get(name, np.nan), ".2g"),
        **{
            f"pass@1 less {other}'s": lambda name, other=other: score(name, first, other)
            for other in more
        },
        f"pass@{n}": lambda name: score(name, last),
    }
    cells = {title: [text(name) for name in outcomes] for title, text in columns.items()}
    trained = slice(list(outcomes).index(base), None)
    same = {t for t in ("tokens", "bonus", "at equal tokens") if len(set(cells[t][trained])) == 1}
    same |= {"at equal tokens"} if "tokens" in same else set()
    cells = {title: of_rows for title, of_rows in cells.items() if title not in same}
    lines = [f"| | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in zip(outcomes, *cells.values()))]


def table_of_ways(runs: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """A Markdown table with a row for each variant whose runs have `ways`, over all its responses.

    Seeds have as many responses.
    """
    lines = [f"| | seeds | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for variant, of_variant in runs.items():
        known = [own["ways"] for own in of_variant.values() if "ways" in own]
        cells = []
        for name in names if known else ():
            taken, right = np.array([ways[name] for ways in known]).T
            share = np.mean(taken)
            right = taken @ right / max(taken.sum(), 1e-9)
            cells.append(f"{100 * share:.0f} % ({100 * right:.0f} % right)")
        lines += [f"| {variant} | {len(known)} | {' | '.join(cells)} |"] if cells else []
    return lines


def measured_on(record: Mapping[str, Any]) -> str:
    """The machine, JAX and the revision; the record has the other packages too."""
    return LEFT_OUT.sub("", record["machine"])


def in_short(count: float) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e5 else f"{count / 1e3:.0f} k"


def shown(value: float, spec: str) -> str:
    return "" if np.isnan(value) else f"{value:{spec}}"


def draw(
    outcomes: Mapping[str, Outcome], base: str, n: int, levels: Mapping[str, Outcome] = {}
) -> Figure:
    """Differences of pass@1 and pass@n from the variant `base`, and learning curves.

    `levels` are as in `table`.
    """
    outcomes = {name: own for name, own in outcomes.items() if name != START}
    others = [name for name in outcomes if name != base]
    figure = Figure(figsize=(11, 1.6 + 0.28 * len(others)), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(3, 3, 4))
    for place, k in zip(axes, (1, n)):
        score = passed(k, n)
        gains = {name: Gain.of(outcomes[name], outcomes[base], score) for name in others}
        *usual, widest = sorted(max(-gain.low, gain.high) for gain in gains.values() if gain) or [0]
        reach = 1.1 * (usual[-1] if usual and widest > 3 * usual[-1] > 0 else widest)
        if reach:
            place.set_xlim(-reach, reach)
        for row, (name, gain) in enumerate(gains.items()):
            if gain is None:
                continue
            if abs(gain.mean) > reach:  # a single one would make all others look like zero
                side = "right" if gain.mean > 0 else "left"
                where = {"x": np.sign(gain.mean) * reach, "ha": side, "va": "center"}
                place.text(y=row, s=f" {gain.mean:+.2g} ", fontsize=8, **where)
                continue
            colour = "#1f5fa8" if name.startswith("verl") else "#5f6b76"
            place.plot([gain.low, gain.high], [row, row], color=colour, lw=1.6)
            place.plot(gain.mean, row, "o", color=colour, ms=4)
        place.axvline(0, color="black", lw=0.8)
        place.set_yticks(range(len(others)), others if k == 1 else [""] * len(others), fontsize=8)
        place.invert_yaxis()
        place.set_xlabel("points")
        place.set_title(f"pass@{k} less that of {base}", loc="left", fontsize=10)
    # Levels differ between seeds, so a mean over others would mislead.
    levels = {name: levels.get(name, own) for name, own in outcomes.items()}
    drawn = {name: own for name, own in levels.items() if own.seeds == levels[base].seeds}
    for name, own in drawn.items():
        steps = sorted(set.intersection(*(set(curve) for curve in own.curves)))
        means = [100 * np.mean([curve[step] for curve in own.curves]) for step in steps]
        is_main = name in (base, "verl")
        axes[2].plot(
            steps, means, lw=2 if is_main else 0.8, zorder=2 + is_main,
            color={base: "black", "verl": "#1f5fa8"}.get(name, "#b0b7be"),
            label=name if is_main else None,
        )  # fmt: skip
    if drawn.keys() - {base, "verl"}:
        axes[2].plot([], [], lw=0.8, color="#b0b7be", label="the others")
    axes[2].legend(fontsize=8)
    axes[2].locator_params(axis="x", integer=True)
    axes[2].set_xlabel("step")
    axes[2].set_title("Greedy accuracy, %: means over all seeds", loc="left", fontsize=10)
    for place in axes:
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    return figure


def draw_by_k(records: Mapping[str, Mapping[str, Any]]) -> Figure:
    """What variants gain over plain GRPO in pass@k, by k: a panel for each record of a study."""
    figure = Figure(figsize=(3.7 * len(records), 3.3), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(records)))
    for place, (task, record) in zip(panels, records.items()):
        base, n = Outcome.of(record["runs"]["none"]), record["num_samples"]
        ks = 2 ** np.arange(n.bit_length())
        for number, (variant, colour) in enumerate(BY_K.items()):
            own = Outcome.of(record["runs"][variant])
            by_k = [Gain.of(own, base, passed(k, n)) for k in ks.tolist()]
            gains = np.array([gain[:3] if gain else [np.nan] * 3 for gain in by_k]).T
            place.errorbar(
                np.arange(len(ks)) + 0.12 * (number - 1), gains[0], np.abs(gains[1:] - gains[0]),
                color=colour, marker="o", ms=4, lw=1.2, capsize=2, label=variant,
            )  # fmt: skip
        place.axhline(0, color="black", lw=0.8)
        place.set_xticks(range(len(ks)), ks)
        place.set_xlabel("k")
        count = len({*base.seeds} & {*map(int, record["runs"]["verl"])})
        place.set_title(f"{task}, {count} seed{'s' * (count != 1)}", loc="left", fontsize=10)
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("points of pass@k over GRPO")
    place.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def outcomes_of(part: Part, record: Mapping[str, Any]) -> dict[str, Outcome]:
    """The variants in the order of the part, without those that the record lacks."""
    names = [name for name in (START, *part.variants) if name in record["runs"]]
    return {name: Outcome.of(record["runs"][name]) for name in names}


def section(part: Part, record: Mapping[str, Any]) -> str:
    """What the page says of the runs of a part."""
    study, n = STUDIES[part.study], record["num_samples"]
    outcomes = outcomes_of(part, record)
    limited = {
        name: {seed: one for seed, one in record["runs"][name].items() if int(seed) in study.seeds}
        for name in (START, part.bases[0])
        if name in outcomes
    }
    levels = {name: Outcome.of(runs) for name, runs in limited.items() if runs}
    own = {frozenset((name, part.bases[0])) for name in part.variants}
    further = [
        p
        for other in PARTS
        if other.study == part.study and other != part
        for name, p in p_values(outcomes_of(other, record), other.bases[0], n).items()
        if frozenset((name, other.bases[0])) not in own
    ]
    count = sum(len(own.seeds) for name, own in outcomes.items() if name != START)
    planned = sum(len(study.seeds_of(name)) for name in part.variants)
    state = "all" if count >= planned else f"**not finished: {count} of {planned}**"
    with replacing(DOCS / "figures" / f"evidence_{part.name}.png") as out:
        draw(outcomes, part.bases[0], n, levels).savefig(out, format="png", dpi=110)
    return "\n".join(
        [
            f"Runs of `python -m benchmarks.evidence {part.study} --output=runs/evidence`: "
            f"{state}. {study.num_steps} steps each.",
            "",
            f"![Differences of variants, and learning curves](figures/evidence_{part.name}.png)",
            "",
            *table(outcomes, part.bases, n, further, levels),
            "",
            *_about_ways(study.ways, {name: record["runs"][name] for name in outcomes} | limited),
            f"Summed up on {measured_on(record)}.",
        ]
    )


def _about_ways(ways: Ways | None, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if ways is None:
        return []
    intro = "Share of responses that take each way after the last step, and of right ones in it:"
    return [intro, "", *table_of_ways(runs, ways.names), ""]


def write(name: str, study: Study, output: pathlib.Path) -> None:
    """Writes the results file of a study, and its parts of the page; UserError without a run."""
    file = HERE / "benchmarks" / "results" / f"evidence_{name}.json"
    known = read_json_object(file) if file.is_file() else {}
    record = collect(study, output, known)
    if not record["runs"]:
        raise UserError(f"--output={output} has no evaluated run of {name}.")
    if json.loads(json.dumps(record["runs"])) == known.get("runs"):  # nothing was summed up here
        record["machine"] = known["machine"]
    write_json(file, record)
    for part in PARTS:
        if part.study == name and set(part.bases) <= set(record["runs"]):
            fill(part.name, section(part, record), part.page)
    tasks = [part.study for part in PARTS if part.bases == ("none", "verl")]
    files = {task: file.with_name(f"evidence_{task}.json") for task in tasks}
    records = {task: read_json_object(each) for task, each in files.items() if each.is_file()}
    records = {task: each for task, each in records.items() if {"none", *BY_K} <= set(each["runs"])}
    if name in records:
        with replacing(DOCS / "figures" / "evidence_by_k.png") as out:
            draw_by_k(records).savefig(out, format="png", dpi=110)


def fill(name: str, text: str, page: str = "evidence.md") -> None:
    """Replaces a part of a page in docs/."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern, file = re.compile(f"{begin}.*{end}", re.DOTALL), DOCS / page
    filled = pattern.sub(lambda _: f"{begin}\n{text}\n{end}", file.read_text())
    with replacing(file) as out:
        out.write(filled.encode())
