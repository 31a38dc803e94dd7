"""What ER, ERV and ERA measure, and whether they select: questions 1 and 2 of docs/evidence.md.

    python -m benchmarks.evidence.selection prompts --output=DIR     # DIR/gym.jsonl
    python -m launch.generate --policy=MODEL --prompts=DIR/gym.jsonl --n=8 --logprobs \
        --hidden_states=-1,15,7 --states=decode --states_dtype=float32 \
        --verifier=reasoning_gym --template=... --output=DIR/NAME
    python -m benchmarks.evidence.selection measure --output=DIR --policy=MODEL --layers 15 7 \
        --names NAME ...

A directory of `launch.generate` is one population of responses for each benchmark in it. --layers
are the layer in the middle and the one at a quarter. The last command writes
benchmarks/results/evidence_selection.json and the tables of the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Bool, Float
from matplotlib.figure import Figure

from benchmarks import machine
from benchmarks.evidence import results
from semrl_jax.analysis import study
from semrl_jax.analysis.measures import RANKS, RESPONSE_MEASURES, StudiedResponse, measure
from semrl_jax.analysis.responses import measure_response
from semrl_jax.analysis.study_sources import of_generated
from semrl_jax.data import procedural
from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.generated_files import RESPONSES
from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.rewards.grading.text import answer_class
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import read_json_object, replacing, write_json

FILE = results.HERE / "benchmarks" / "results" / "evidence_selection.json"
ENTRIES = (
    "basic_arithmetic:min_terms=2:max_terms=2:min_digits=1:max_digits=2"
    ':operators=["+"]:allow_negation=false:allow_parentheses=false'
    ":format_style=natural:contains=What is:name=sums",
    "letter_counting:min_words=3:max_words=5:name=letters",
    "gcd:min_numbers=2:max_numbers=2:max_value=20:name=gcd",
    "syllogism:name=syllogism",
    "spell_backward:min_word_len=3:max_word_len=4:name=spelling",
)
NUM_PROMPTS = 100
NEAR = 1.1  # ratio of two lengths that count as equal
# A response is chosen by the highest value of a measure, or by the lowest if it is in LOW.
MEASURES = {
    "ER": RANKS[0], "ERV": RANKS[1], "ERA": RANKS[2], "log-probability": "mean_logprob",
    "entropy": "token_entropy", "length": "length", "repetition": "repetition",
}  # fmt: skip
LOW = ("entropy", "length", "repetition")
DRAWN = {
    "ER": ("#1f5fa8", "o"), "ERV": ("#6fa3d8", "o"), "ERA": ("#d1662a", "o"),
    "log-probability": ("#5f6b76", "s"), "length": ("#b0b7be", "s"),
    "majority": ("#2e7d4f", "^"), "linear probe": ("#8a4fa3", "^"),
}  # fmt: skip
CORRELATIONS = [
    "ER, ERV, equal length", "ER, ERA, equal length", "ER, length, all", "ERV, length, all",
    "ERA, length, all",
    *(
        f"{rank}, {other}, equal length"
        for other in ("entropy", "log-probability", "repetition")
        for rank in ("ER", "ERA")
    ),
]  # fmt: skip
WITH_CORRECT = [f"{rank}, correct, equal length" for rank in ("ER", "ERV", "ERA")]
NUM_FOLDS = 5


class Setting(NamedTuple):
    """How the metrics are measured."""

    layer: int = FINAL_LAYER
    stride: int = 4
    window: str = "exact"
    bfloat16: bool = False  # round the states
    centred: bool = True


# Each changes one thing; the layers are named by the command.
LAYERS = ("middle layer", "layer at a quarter")
SETTINGS = {
    "stride 8": Setting(stride=8), "stride 16": Setting(stride=16),
    "window later": Setting(window="later"), "states in bfloat16": Setting(bfloat16=True),
    "states not centred": Setting(centred=False),
}  # fmt: skip
OF_SETTINGS = ("ER", "ERV", "ERA", "linear probe")  # choices that the table of settings has
R_OF_SETTINGS = ("ER, ERV, equal length", "ER, length, all")
UNCENTRED = "benchmarks.evidence.uncentred_effective_rank"


def prompts(directory: pathlib.Path, entries: Sequence[str], count: int) -> None:
    """Writes `count` problems of each procedural set to DIRECTORY/gym.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "gym.jsonl").open("w") as file:
        for row in procedural.held_out_problems(procedural.sources(entries), count):
            fields = {name: getattr(row, name) for name in ("question", "answer", "data_source")}
            file.write(json.dumps(fields | json.loads(row.columns)) + "\n")


def populations(
    directory: pathlib.Path, policy: str | None, setting: Setting
) -> dict[str, dict[str, np.ndarray]]:
    """The responses of a directory by benchmark: a table of measures, answers and features."""
    if not (directory / RESPONSES).is_file():
        raise UserError(f"--names: {directory} has no {RESPONSES}; name one of launch.generate.")
    columns = ["group_id", "sample_index", "benchmark", "extracted"]
    rows = pq.read_table(directory / RESPONSES, columns=columns).to_pylist()
    of_row = {(row["group_id"], row["sample_index"]): row for row in rows}
    responses = [
        rounded(response) if setting.bfloat16 else response
        for response in of_generated(directory, policy, setting.layer)[0]
    ]
    responses.sort(key=lambda response: (response.group_id, response.sample_index))
    options = {"stride": setting.stride, "window": setting.window}
    found = {}
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        own = [r for r in responses if of_row[r.group_id, r.sample_index]["benchmark"] == name]
        table = measure(own, **options, wanted=RESPONSE_MEASURES.__contains__).responses
        if not setting.centred:
            names = {"names": (UNCENTRED,), "orders": (UNCENTRED,)}
            rows = [measure_response(response.states, **options, **names) for response in own]
            for rank in RANKS:
                table[rank] = np.array([row[f"uncentred_{rank}"] for row in rows])
        keys = zip(table["group_id"].tolist(), table["sample_index"].tolist())
        table["answer"] = np.array([answer_class(of_row[key]["extracted"]) for key in keys])
        table["features"] = np.stack([features(response.states) for response in own])
        found[name] = table
    return found


def rounded(response: StudiedResponse) -> StudiedResponse:
    states = response.states.astype(jnp.bfloat16).astype(np.float32)
    return dataclasses.replace(response, states=states)


def features(states: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "2 D"]:
    """The mean state and the last one."""
    return (
        np.concatenate([states.mean(axis=0), states[-1]])
        if len(states)
        else np.zeros(2 * states.shape[1], np.float32)
    )


def by_prompt(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """[P, G]; all prompts have as many responses."""
    order = np.argsort(groups, kind="stable")
    return values[order].reshape(len(np.unique(groups)), -1, *values.shape[1:])


def majority(answers: np.ndarray) -> Float[np.ndarray, "P G"]:
    """How many responses to the prompt give the same answer; 0 without one, as in maj@k."""
    equal = answers[:, :, None] == answers[:, None, :]
    return np.where(answers == "", 0.0, equal.sum(axis=2))


def probed(
    inputs: Float[np.ndarray, "P G F"], correct: Bool[np.ndarray, "P G"]
) -> Float[np.ndarray, "P G"]:
    """Ridge regression from states to correctness, of prompts that it was not trained on."""
    count, size = correct.shape
    found, folds = np.zeros((count, size)), np.arange(count) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        seen = folds != fold
        x, y = inputs[seen].reshape(-1, inputs.shape[-1]), correct[seen].ravel().astype(float)
        centre, scale = x.mean(axis=0), x.std(axis=0) + 1e-6
        x, other = (x - centre) / scale, (inputs[~seen] - centre) / scale
        kernel = x @ x.T  # of as many rows as responses, fewer than features
        # The penalty equals the mean of the kernel's diagonal, the number of features.
        weights = np.linalg.solve(kernel + x.shape[1] * np.eye(len(x)), y - y.mean())
        found[~seen] = other @ (x.T @ weights)
    return found


def chosen(
    values: Float[np.ndarray, "P G"], correct: Bool[np.ndarray, "P G"]
) -> Float[np.ndarray, " P"]:
    """Correctness of the response with the highest value; the mean over ties, NaN never chosen."""
    values = np.where(np.isnan(values), -np.inf, values)
    best = values == values.max(axis=1, keepdims=True)
    return (best * correct).sum(axis=1) / best.sum(axis=1)


def pairs_above(
    values: Float[np.ndarray, "P G"],
    correct: Bool[np.ndarray, "P G"],
    lengths: Float[np.ndarray, "P G"],
) -> PerProblem:
    """The share of pairs in which the correct response has the higher value; the weight is pairs.

    A pair is a correct and a wrong response to a prompt, of nearly equal lengths. Ties count half.
    """
    above, pairs = np.zeros((2, len(values)))
    for row, (of_prompt, is_correct, sizes) in enumerate(zip(values, correct, lengths)):
        for i, j in itertools.product(np.flatnonzero(is_correct), np.flatnonzero(~is_correct)):
            near = max(sizes[i], sizes[j]) <= NEAR * min(sizes[i], sizes[j])
            if near and not math.isnan(of_prompt[i] + of_prompt[j]):
                above[row] += (np.sign(of_prompt[i] - of_prompt[j]) + 1) / 2
                pairs[row] += 1
    return PerProblem(above / np.maximum(pairs, 1), pairs)


def with_interval(figure: PerProblem) -> list[float]:
    """The mean over prompts, and the bounds of its 95 % bootstrap interval.

    NaN if fewer than five prompts count: one with a single pair would have an interval of no width.
    """
    if figure.weights is not None and np.count_nonzero(figure.weights) < study.MIN_DRAWN:
        return [math.nan] * 3
    draws = statistics.bootstrap({"": figure}, "")[""]
    return [statistics.mean(figure), *statistics.interval(draws)]


def gained(values: Float[np.ndarray, "P G"], correct: Bool[np.ndarray, "P G"]) -> list[float]:
    """What the choice by `values` gains over a random one, and the bounds of its interval.

    The bootstrap has two more prompts, with the largest and the smallest gain that there can be
    (as Agresti and Coull 1998 add two successes and two failures). Without them, a choice without a
    success has no draw with one. Of random choices, the interval then was below 0 in 34 % of cases
    where 8 of 100 prompts had a correct and a wrong response, and in 5 % where 40 had.
    """
    gains = chosen(values, correct) - correct.mean(axis=1)
    most = 1 - 1 / correct.shape[1]
    _, *bounds = with_interval(PerProblem(np.append(gains, [most, -most])))
    return [float(gains.mean()), *bounds]


def between_prompts(values: Float[np.ndarray, "P G"]) -> float:
    """The share of the variance that lies between prompts (ICC(1)), from 1 down to below 0.

    Responses without a value are left out, and prompts with fewer than two of the others.

    Source: Shrout and Fleiss 1979; with unequal sizes, Donner 1986.
    """
    rows = [row[~np.isnan(row)] for row in values]
    rows = [row for row in rows if len(row) > 1]
    if len(rows) < study.MIN_DRAWN:
        return math.nan
    sizes, means = np.array([len(row) for row in rows]), np.array([row.mean() for row in rows])
    count, everything = len(rows), np.concatenate(rows)
    between = sizes @ (means - everything.mean()) ** 2 / (count - 1)
    within = np.sum((everything - np.repeat(means, sizes)) ** 2) / (len(everything) - count)
    size = (len(everything) - sizes @ sizes / len(everything)) / (count - 1)
    return float((between - within) / (between + (size - 1) * within))


def figures(table: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What the results file has of a population."""
    groups = table["group_id"]
    correct = by_prompt(table["correct"], groups) > 0.5
    lengths = by_prompt(table["length"], groups).astype(float)
    values = {
        name: by_prompt(table[column], groups) * (-1.0 if name in LOW else 1.0)
        for name, column in MEASURES.items()
        if column in table and not np.isnan(table[column]).all()
    }
    values["longest"] = lengths  # the opposite of "length", which chooses the shortest
    values["majority"] = majority(by_prompt(table["answer"], groups))
    values["linear probe"] = probed(by_prompt(table["features"], groups), correct)
    random = correct.mean(axis=1)
    mixed = int(np.sum((random > 0) & (random < 1)))
    found: dict[str, Any] = {
        "prompts": len(correct), "mixed_prompts": mixed, "responses": correct.shape[1],
        "length": float(lengths.mean()), "random": float(random.mean()),
        "any": float(correct.any(axis=1).mean()), "select": {}, "above": {}, "between_prompts": {},
    }  # fmt: skip
    for name, own in values.items():
        if mixed:
            found["select"][name] = gained(own, correct)
            found["above"][name] = with_interval(pairs_above(own, correct, lengths))
        if name in MEASURES and not math.isnan(share := between_prompts(own)):
            found["between_prompts"][name] = share
    found["r"] = {
        f"{x}, {y}, {subset}": [c.r, c.low, c.high]
        for x, y, subset in correlated(table)
        for c in [study.correlation(dict(table), MEASURES[x], MEASURES.get(y, y), subset)]
        if not math.isnan(c.r)
    }
    return found


def correlated(table: Mapping[str, np.ndarray]) -> list[tuple[str, str, str]]:
    """Pairs of measures, over all responses and at equal length."""
    pairs = [("ER", "ERV", "all"), ("ER", "ERV", "equal length"), ("ER", "ERA", "equal length")]
    for x in ("ER", "ERV", "ERA"):
        pairs.append((x, "length", "all"))
        pairs += [
            (x, y, subset)
            for y in ("log-probability", "entropy", "repetition", "correct")
            for subset in ("all", study.EQUAL_LENGTH)
            if MEASURES.get(y, y) in table
        ]
    return pairs


def compared(table: Mapping[str, np.ndarray], default: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What the results file has of a population measured with another setting."""
    found = figures(table)
    joined = dict(table) | {f"default {name}": default[name] for name in RANKS}
    like = {
        name: study.correlation(joined, column, f"default {column}", study.EQUAL_LENGTH).r
        for name, column in zip(("ER", "ERV", "ERA"), RANKS)
    }
    return {
        "select": {name: found["select"][name] for name in OF_SETTINGS if name in found["select"]},
        "r": {name: found["r"][name] for name in R_OF_SETTINGS if name in found["r"]},
        "like": like,
    }


def of_settings(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """The rows of the table of settings: ranges over the populations, and how many choose well."""
    by_setting: dict[str, list[Mapping[str, Any]]] = {"as above": list(found.values())}
    for each in found.values():
        for name, other in each.get("others", {}).items():
            by_setting.setdefault(name, []).append(other)

    def between(values: Sequence[float]) -> str:
        if not (known := [value for value in values if not math.isnan(value)]):
            return ""
        low, high = (f"{value:.2f}" for value in (min(known), max(known)))
        return low if low == high else f"{low} to {high}"

    def choices(populations: Sequence[Mapping[str, Any]], measure: str) -> str:
        gains = [each["select"][measure] for each in populations]
        better, worse = sum(low > 0 for _, low, _ in gains), sum(high < 0 for *_, high in gains)
        return f"{better}, {worse}"

    return {
        setting: [
            str(len(own)),
            *(
                between([each["r"][name][0] for each in own if name in each["r"]])
                for name in R_OF_SETTINGS
            ),
            *(
                between([each["like"][name] for each in own if "like" in each])
                for name in ("ER", "ERV", "ERA")
            ),
            *(choices(own, name) for name in OF_SETTINGS),
        ]
        for setting, own in by_setting.items()
    }


def draw(found: Mapping[str, Any]) -> Figure:
    """The points that a choice gains, and the share of pairs in which it is right."""
    found = {name: each for name, each in found.items() if each["select"]}
    figure = Figure(figsize=(11, 1.2 + 0.42 * len(found)), layout="constrained")
    for place, (key, unit, base, title) in zip(
        figure.subplots(1, 2, sharey=True),
        (
            ("select", 100, 0.0, "Points gained over a random choice"),
            ("above", 1, 0.5, "Share of pairs of equal length with the correct one above"),
        ),
    ):
        for number, (name, (colour, marker)) in enumerate(DRAWN.items()):
            rows = np.arange(len(found)) + (number - (len(DRAWN) - 1) / 2) / (len(DRAWN) + 1)
            mean, low, high = unit * np.array([each[key][name] for each in found.values()]).T
            place.hlines(rows, low, high, color=colour, lw=1.2)
            place.plot(mean, rows, marker, color=colour, ms=4, label=name)
        place.axvline(base, color="black", lw=0.8)
        place.set_title(title, loc="left", fontsize=10)
        place.set_yticks(range(len(found)), list(found), fontsize=8)
        place.set_ylim(len(found) - 0.5, -0.5)
        place.grid(axis="x", alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    place.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def table(head: str, titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [f"| {head} | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]


def points(three: Sequence[float]) -> str:
    mean, low, high = (100 * x for x in three)
    return f"{mean:+.0f} ({low:+.0f}, {high:+.0f})"


def shares(three: Sequence[float]) -> str:
    mean, low, high = three
    return "" if math.isnan(mean) else f"{mean:.2f} ({low:.2f}, {high:.2f})"


def section(record: Mapping[str, Any]) -> str:
    """The tables of the page."""
    found: Mapping[str, Any] = record["populations"]
    selected = {name: each for name, each in found.items() if each["select"]}
    measures = list(dict.fromkeys(name for each in found.values() for name in each["select"]))

    def r(each: Mapping[str, Any], name: str) -> str:
        return f"{each['r'][name][0]:.2f}" if name in each["r"] else ""

    titles = ["prompts", "with correct and wrong ones", "mean length"]
    titles += ["correct", "one of 8 correct"]
    rows = {
        name: [
            str(each["prompts"]), str(each["mixed_prompts"]), f"{each['length']:.0f}",
            f"{each['random']:.1%}", f"{each['any']:.0%}",
        ]
        for name, each in found.items()
    }  # fmt: skip
    lines = table("responses", titles, rows)
    lines += ["![Choices by each measure](figures/evidence_selection.png)", ""]
    lines += ["Points gained by choosing one of the responses, over a random one:", ""]
    rows = {
        name: [points(each["select"][m]) if m in each["select"] else "" for m in measures]
        for name, each in selected.items()
    }
    lines += table("chosen by", measures, rows)
    lines += ["Share of pairs of equal length in which the correct response is above:", ""]
    rows = {
        name: [shares(each["above"][m]) if m in each["above"] else "" for m in measures]
        for name, each in selected.items()
    }
    lines += table("", measures, rows)
    lines += ["Pearson's r; at equal length, the partial correlation:", ""]
    rows = {name: [r(each, label) for label in CORRELATIONS] for name, each in found.items()}
    lines += table("", CORRELATIONS, rows)
    lines += ["The same with correctness, over the responses of all prompts:", ""]
    rows = {
        name: [shares(each["r"][label]) if label in each["r"] else "" for label in WITH_CORRECT]
        for name, each in selected.items()
    }
    lines += table("", WITH_CORRECT, rows)
    lines += ["Share of the variance that lies between prompts:", ""]
    names = [name for name in MEASURES if any(name in p["between_prompts"] for p in found.values())]
    rows = {
        name: [
            f"{each['between_prompts'][m]:.2f}" if m in each["between_prompts"] else ""
            for m in names
        ]
        for name, each in found.items()
    }
    lines += table("", names, rows)
    lines += [
        "Other layers and settings, where a prompt has correct and wrong responses. A cell of r "
        "has its range over the populations; r with the default is at equal length.",
        "The last four columns count the populations in which a choice is better than a random "
        "one, and those in which it is worse:", "",
    ]  # fmt: skip
    titles = ["populations", "r of ER and ERV, equal length", "r of ER and length"]
    titles += [f"r of {name} with the default" for name in ("ER", "ERV", "ERA")]
    titles += [f"chosen by {name}" for name in OF_SETTINGS]
    lines += table("setting", titles, of_settings(selected))
    return "\n".join([*lines, f"Measured on {results.measured_on(record)}."])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["prompts", "measure"])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--policy", help="of the responses, for entropies")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="in addition: inputs")
    parser.add_argument("--names", nargs="*", default=[], help="directories in --output")
    given = parser.parse_args()
    try:
        if given.work == "prompts":
            prompts(given.output, ENTRIES, NUM_PROMPTS)
            return
        if not given.names:
            raise UserError("--names is needed: directories of launch.generate in --output.")
        record = read_json_object(FILE) if FILE.is_file() else {"populations": {}}
        for name in given.names:
            directory = given.output / name
            tables = populations(directory, given.policy, Setting())
            layers = {name: Setting(layer) for name, layer in zip(LAYERS, given.layers)}
            others = {
                setting: populations(directory, None, options)
                for setting, options in (layers | SETTINGS).items()
            }
            for benchmark, measured in tables.items():
                title = f"{name}, {benchmark}" if len(tables) > 1 else name
                record["populations"][title] = figures(measured) | {
                    "others": {
                        setting: compared(of[benchmark], measured) for setting, of in others.items()
                    }
                }
        record["machine"] = machine.description()
        write_json(FILE, record)
        with replacing(results.DOCS / "figures" / "evidence_selection.png") as out:
            draw(record["populations"]).savefig(out, format="png", dpi=110)
        results.fill("selection", section(record))
    except UserError as error:
        raise SystemExit(f"python -m benchmarks.evidence.selection: {error}") from None


if __name__ == "__main__":
    main()
