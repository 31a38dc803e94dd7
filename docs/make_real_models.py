"""Makes the figures of docs/evidence.md on two small models.

    python -m launch.prepare_model --name=smollm2-135m --output=DIR/models/smollm2
    python -m launch.prepare_model --name=gemma3-270m --output=DIR/models/gemma3
    python docs/make_real_models.py prompts DIR         # DIR/gym.jsonl and DIR/shots.txt
    python -m launch.prepare_data --dataset=gsm8k --split=test --output=DIR/gsm8k.jsonl
    python -m launch.generate ...                       # four times, see below
    python docs/make_real_models.py measure DIR MODEL   # DIR/MODEL.npz of DIR/MODEL/{gym,gsm8k}
    python docs/make_real_models.py draw DIR            # figures/real_models_*.png, and the tables

`launch.generate` runs for both models and both tasks, with these flags:

    all     --policy=DIR/models/MODEL --output=DIR/MODEL/TASK --n=4 --states_dtype=float32
            --config.rollout.jax_max_batch=64
    smollm2 --template='chat:{input} Think step by step and end with the answer.'
            --hidden_states=-1,10,20
    gemma3  --template=DIR/shots.txt --config.rollout.stop_strings=Q: --hidden_states=-1,6,12
    gym     --prompts=DIR/gym.jsonl --verifier=reasoning_gym --max_response_tokens=128
            --config.evaluation.responses_per_call=120 --max_prompt_tokens=128 (gemma3: 320)
    gsm8k   --prompts=DIR/gsm8k.jsonl --num_prompts=20 --verifier=math --max_response_tokens=192
            --config.data.answer_after='####' --config.evaluation.responses_per_call=80
            --max_prompt_tokens=256 (gemma3: 512)
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib
import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from safetensors import safe_open
from scipy.stats import spearmanr

from semrl_jax.analysis import similarity
from semrl_jax.analysis.study import correlation, with_interval
from semrl_jax.evaluation.statistics import NUM_DRAWS, interval
from semrl_jax.metrics import MetricKey, flatten, hidden_state_metrics
from semrl_jax.metrics.names import ORDERS
from semrl_jax.metrics.spectrum import PrefixSpectra
from semrl_jax.metrics.valid_rows import anchor, compact
from semrl_jax.support import compilation

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from benchmarks.evidence import selection
from tests.oracles import metrics as oracle

matplotlib.use("Agg")
FIGURES = pathlib.Path(__file__).parent / "figures"
BLUE, ORANGE, GREY = "#1f5fa8", "#d1662a", "#8c8c8c"
MODELS = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
TASKS = ("sums", "letters", "gcd", "gsm8k")
NUM_PROMPTS = 40
SHOTS = """Q: What is 23 + 9?
A: 20 + 9 is 29, and 29 + 3 is 32. The answer is 32.

Q: How many times does the letter "e" appear in the text: "we see the sea"?
A: we has 1, see has 2, the has 1, and sea has 1. 1 + 2 + 1 + 1 = 5. The answer is 5.

Q: Find the Greatest Common Divisor (GCD) of these numbers: 12, 18.
A: The divisors of 12 are 1, 2, 3, 4, 6, 12. Of these, 6 is the largest that divides 18. The answer is 6.

Q: Tom has 3 boxes with 4 pens each. He gives away 5 pens. How many pens are left?
A: Tom has 3 * 4 = 12 pens. He gives away 5 pens, so 12 - 5 = 7 pens are left. The answer is 7.

Q: {input}
A:"""  # noqa: E501
STRIDES = (1, 4, 16, 40)
STRIDE, ROUTE_STRIDE = 4, 16  # of the results, and of the errors by route
ROUTES = ("float64", "float32")
EVERY = 8  # the slow oracle checks every 8th response, and all responses of the slower route
EQUAL = 32  # tokens of the spectra: the first ones of each response that has as many
NEAR = 1.1  # ratio of two lengths that count as equal
LABELS = tuple(MetricKey("effective_rank", order).label for order in ORDERS)
SHORT = dict(zip(LABELS, ("ER", "ERV", "ERA")))


def prompts(directory: pathlib.Path) -> None:
    selection.prompts(directory, selection.ENTRIES[:3], NUM_PROMPTS)
    (directory / "shots.txt").write_text(SHOTS)


def responses(directory: pathlib.Path):
    """Row, states [T, L, D] and layers of each response of two tokens or more."""
    for task in ("gym", "gsm8k"):
        index = json.loads((directory / task / "states.index.json").read_text())
        for row in pq.read_table(directory / task / "responses.parquet").to_pylist():
            name = f"{row['group_id']}/{row['sample_index']}/decode"
            with safe_open(directory / task / index["weight_map"][name], "numpy") as tensors:
                states = tensors.get_tensor(name)
            row["task"] = row["benchmark"] if task == "gym" else task
            if len(states) > 1:
                yield row, states, index["metadata"]["layers"]


def measure(directory: pathlib.Path, model: str) -> None:
    rows, states, (layers, *_) = zip(*responses(directory / model))
    found = {name: np.array([row[name] for row in rows]) for name in ("task", "correct")}
    found["log-probability"] = np.array([row["mean_logprob"] for row in rows])
    found["ended"] = np.array([row["finish_reason"] != "length" for row in rows])
    found["prompt"] = np.array([f"{row['task']}/{row['group_id']}" for row in rows])
    found["repetition"] = np.array([similarity.repetition([row["response_ids"]]) for row in rows])
    found["length"], found["layers"] = np.array([len(x) for x in states]), np.array(layers)
    mask = np.arange(found["length"].max()) < found["length"][:, None]
    for number, layer in enumerate(layers):
        padded = np.zeros((*mask.shape, states[0].shape[-1]), np.float32)
        padded[mask] = np.concatenate([x[:, number] for x in states])
        for stride in STRIDES if layer == -1 else (STRIDE,):
            found |= measured(padded, mask, f"{layer}/{stride}", stride)
        found |= of_equal(padded[found["length"] >= EQUAL, :EQUAL], layer)
        which = np.array([ROUTES[route(x, m, ROUTE_STRIDE)] for x, m in zip(padded, mask)])
        some = np.flatnonzero((which != "float32") | (np.arange(len(which)) % EVERY == 0))
        ours = measured(padded[some], mask[some], "ours", ROUTE_STRIDE)
        rounded = measured(
            padded[some].astype(ml_dtypes.bfloat16), mask[some], "ours", ROUTE_STRIDE
        )
        exact = np.array([by_oracle(padded[i][mask[i]]) for i in some]).T
        found[f"{layer}/route"], found[f"{layer}/some"] = which, some
        for name, values in (("error", ours), ("bfloat16", rounded)):
            found[f"{layer}/{name}"] = abs(np.array(list(values.values())) / exact - 1).T
        print(f"{model}: layer {layer} of {len(rows)} responses", flush=True)
    np.savez(directory / f"{model}.npz", **found)


def measured(states, mask, prefix, stride):
    """Value, velocity and acceleration of ER; NaN where not valid."""
    # One program for all lengths: compiling one for each would take longer than the arithmetic.
    one = jax.jit(functools.partial(hidden_state_metrics, stride=stride, names=("effective_rank",)))
    found = [jax.device_get(flatten(one(x[None], m[None]))) for x, m in zip(states, mask)]
    found = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    return {f"{prefix}/{x}": np.where(found[f"{x}_valid"], found[x], np.nan) for x in LABELS}


def by_oracle(rows):
    """ER, ERV and ERA of one response in float64; NaN where not valid."""
    series = oracle.series(oracle.effective_rank, rows, ROUTE_STRIDE, "exact")
    orders = (np.nan if x is None else x for x in oracle.orders(series))
    return oracle.effective_rank(rows), *orders


@functools.partial(jax.jit, static_argnames="stride")
def route(states, mask, stride):
    """Which of ROUTES measures a response."""
    rows, size = compact(states, mask), len(states)
    spectra = PrefixSpectra(anchor(rows, stride))
    counts = jnp.append(jnp.arange(stride, size + 1, stride), rows.num_tokens)
    one = lambda n: spectra(size, n, n <= rows.num_tokens).resolved  # noqa: E731
    return jnp.all(jax.lax.map(one, counts)).astype(int)


def of_equal(rows, layer):
    """Singular values of the first tokens [B, EQUAL, D], and what dominates them."""
    rows = rows.astype(np.float64)
    centred = rows - rows.mean(1, keepdims=True)
    energy, largest = (centred**2).sum(1), (centred**2).sum(1).argmax(1)  # [B, D], [B]
    kept = centred.copy()
    np.put_along_axis(kept, largest[:, None, None], 0.0, axis=2)
    found = {
        "sigma": np.linalg.svd(centred, compute_uv=False)[:, :-1],
        "rank": rank_of(centred), "uncentred": rank_of(rows), "without column": rank_of(kept),
        "mean": 1 - energy.sum(1) / (rows**2).sum((1, 2)),
        "column": largest, "column share": energy.max(1) / energy.sum(1),
    }  # fmt: skip
    return {f"{layer}/{name}": value for name, value in found.items()}


def rank_of(rows):
    return np.array([np.exp(-sum(p * np.log(p + 1e-8) for p in s / s.sum()))
                     for s in np.linalg.svd(rows, compute_uv=False)])  # fmt: skip


def auc(values, found, chosen, pairs):
    """Share of pairs whose correct response has the larger value; 95 % interval; number of pairs.

    Prompts are drawn with replacement. `pairs(i, j)` says which pairs of responses count.
    """
    chosen = np.flatnonzero(chosen & ~np.isnan(values))
    right, wrong = (chosen[found["correct"][chosen] == value] for value in (True, False))
    counts = np.broadcast_to(pairs(right[:, None], wrong[None]), (len(right), len(wrong))) * 1.0
    above = counts * (np.sign(values[right][:, None] - values[wrong]) + 1) / 2
    names = np.unique(found["prompt"][chosen])
    of_prompt = np.searchsorted(names, found["prompt"])
    draws = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), NUM_DRAWS
    )
    draws = np.concatenate([np.ones((1, len(names)), int), draws])
    first, second = draws[:, of_prompt[right]], draws[:, of_prompt[wrong]]
    with np.errstate(invalid="ignore"):
        shares = ((first @ above) * second).sum(1) / ((first @ counts) * second).sum(1)
    return shares[0], *interval(shares[1:]), int(counts.sum())


def draw(directory: pathlib.Path) -> None:
    data = {model: dict(np.load(directory / f"{model}.npz")) for model in MODELS}
    for function in (outcome, length, separation, strides, spectrum):
        print(f"\n{function.__doc__}")
        figure = function(data)
        if figure is not None:
            figure.savefig(FIGURES / f"real_models_{function.__name__}.png", dpi=120)


def panels(rows, columns, height, **options):
    figure = Figure(figsize=(9.6, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    return figure, grid


def legend(figure, entries):
    dots = [Line2D([], [], color=colour, marker="o", ls="") for colour in entries.values()]
    options = {"fontsize": 8, "frameon": False, "ncols": len(entries)}
    figure.legend(dots, entries, loc="outside upper right", **options)


def cells(data):
    """Title, numbers of the model, and which responses, of each model and task."""
    for model, found in data.items():
        for task in TASKS:
            yield f"{MODELS[model]}, {task}", found, found["task"] == task


def largest(values):
    return max(values, default=np.nan)


def median(values):
    return float(np.nanmedian(values)) if len(values) else np.nan


def show(title, *values):
    print(f"| {title} |", *(f"{x} |" if isinstance(x, str | int) else f"{x:.3g} |" for x in values))


def outcome(data):
    """Responses, correct, median length, % ended, medians of ER, ERV, ERA: correct and wrong."""
    (figure, grid), titles = panels(1, 3, 4.2, sharey=True), []
    for place, (title, found, chosen) in enumerate(cells(data)):
        right, line = chosen & found["correct"], []
        titles.append(f"{title}\n{right.sum()} correct, {chosen.sum() - right.sum()} wrong")
        for axes, name in zip(grid[0], LABELS):
            values = found[f"-1/{STRIDE}/{name}"]
            for part, colour, shift in ((right, BLUE, -0.19), (chosen & ~right, ORANGE, 0.19)):
                of_part = values[part & ~np.isnan(values)]
                line.append(median(of_part))
                axes.boxplot(
                    of_part, positions=[place + shift], widths=0.32, orientation="horizontal",
                    patch_artist=True, boxprops={"facecolor": colour, "alpha": 0.6, "lw": 0.6},
                    medianprops={"color": "black"}, flierprops={"ms": 2, "mew": 0.4},
                )  # fmt: skip
        counts = int(chosen.sum()), int(right.sum()), int(np.median(found["length"][chosen]))
        show(title, *counts, 100 * found["ended"][chosen].mean(), *line)
    for axes, unit in zip(
        grid[0], ("ER (directions)", "ERV (directions)", "ERA (directions per stride)")
    ):
        axes.set_xlabel(unit, fontsize=9)
        axes.set_yticks(range(len(titles)), titles, fontsize=7)
    grid[0, 0].invert_yaxis()
    legend(figure, {"correct": BLUE, "wrong": ORANGE})
    return figure


def length(data):
    """Exponent of ER in length; rank correlation of ER, ERV, ERA with it; r of ER with ERV, ERA."""
    figure, grid = panels(2, 4, 4.8)
    for axes, (title, found, chosen) in zip(grid.flat, cells(data)):
        ranks, velocity, acceleration = (found[f"-1/{STRIDE}/{x}"][chosen] for x in LABELS)
        tokens, right = found["length"][chosen], found["correct"][chosen]
        for part, colour in ((~right, ORANGE), (right, BLUE)):
            axes.scatter(tokens[part], ranks[part], s=7, alpha=0.6, lw=0, color=colour)
        line = [
            spearmanr(tokens, values, nan_policy="omit")[0]
            for values in (ranks, velocity, acceleration)
        ]
        table = {"group_id": found["prompt"][chosen], "length": tokens}
        table |= dict(zip(SHORT.values(), (ranks, velocity, acceleration)))
        for pair in (("ER", "ERV"), ("ER", "ERA")):
            for subset in ("all", "equal length"):
                line.append(with_interval(correlation(table, *pair, subset), empty="-"))
        show(title, np.polyfit(np.log(tokens), np.log(ranks), 1)[0], *line)
        axes.set_title(f"{title}: rank corr. {line[0]:.2f}", fontsize=7.5, loc="left")
    figure.supxlabel("response tokens", fontsize=9)
    figure.supylabel("ER (directions)", fontsize=9)
    legend(figure, {"correct": BLUE, "wrong": ORANGE})
    return figure


def separation(data):
    """Share of pairs whose correct response has the larger value, 95 % interval (pairs)."""
    (figure, grid), titles = panels(1, 5, 4.2, sharey=True, sharex=True), []
    names = {"length": "length", "log-probability": "mean log-probability"}
    names |= {f"-1/{STRIDE}/{name}": text for name, text in SHORT.items()}
    colours = {"all pairs": GREY, "lengths within 10 %": BLUE, "same prompt": ORANGE}
    for title, found, chosen in cells(data):
        if not found["correct"][chosen].any():
            continue
        place, titles = len(titles), [*titles, title]
        size, prompt = found["length"], found["prompt"]
        kinds = (
            lambda i, j: True,
            lambda i, j: np.maximum(size[i], size[j]) <= NEAR * np.minimum(size[i], size[j]),  # noqa: B023
            lambda i, j: prompt[i] == prompt[j],  # noqa: B023
        )
        for axes, (name, text) in zip(grid[0], names.items()):
            line = []
            for shift, kind, colour in zip((-0.22, 0, 0.22), kinds, colours.values()):
                value, low, high, count = auc(found[name].astype(float), found, chosen, kind)
                line.append(f"{value:.2f} [{low:.2f}, {high:.2f}] ({count})")
                axes.plot([low, high], [place + shift] * 2, color=colour, lw=1.2)
                axes.plot([value], [place + shift], "o", ms=4, color=colour)
            show(title, text, *line)
    for axes, text in zip(grid[0], names.values()):
        axes.axvline(0.5, color="black", lw=0.6)
        axes.set_title(text, fontsize=9, loc="left")
        axes.set(yticks=range(len(titles)), yticklabels=titles, xticks=[0, 0.5, 1], xlim=(0, 1))
    grid[0, 0].invert_yaxis()
    legend(figure, colours)
    figure.supxlabel("share of pairs whose correct response has the larger value", fontsize=9)
    return figure


def strides(data):
    """% of responses with a value by stride; rank correlation of two strides (responses)."""
    for model, found in data.items():
        for name in LABELS[1:]:
            values = {s: found[f"-1/{s}/{name}"] for s in STRIDES}
            shares = [f"{100 * np.isfinite(x).mean():.0f}" for x in values.values()]
            for a, b in itertools.combinations(STRIDES, 2):
                both = np.isfinite(values[a] + values[b])
                r = spearmanr(values[a][both], values[b][both])[0]
                shares.append(f"{r:.2f} ({both.sum()})")
            show(f"{MODELS[model]}, {SHORT[name]}", *shares)


def spectrum(data):
    """Layers: spectrum of the first tokens, agreement with the final state, routes and errors."""
    figure, grid = panels(1, 2, 3.4, sharey=True)
    for axes, (model, found) in zip(grid[0], data.items()):
        names = {x: f"input of layer {x}" for x in sorted(found["layers"]) if x >= 0}
        names |= {-1: "final state"}
        for colour, (layer, name) in zip((GREY, ORANGE, BLUE), names.items()):
            keys = "rank", "uncentred", "mean", "column share", "without column", "column"
            part = {key: found[f"{layer}/{key}"] for key in keys}
            sigma = found[f"{layer}/sigma"]
            share, x = sigma / sigma[:, :1], range(1, sigma.shape[1] + 1)
            axes.plot(x, np.median(share, axis=0), color=colour, label=name)
            bounds = np.quantile(share, [0.05, 0.95], axis=0)
            axes.fill_between(x, *bounds, color=colour, alpha=0.12, lw=0)
            common = np.unique(part.pop("column"), return_counts=True)[1].max() / len(sigma)
            first = (sigma**2 / (sigma**2).sum(1, keepdims=True))[:, 0]
            medians = [median(v) for v in (share[:, -1], first, *part.values())]
            same = [
                spearmanr(*(found[f"{k}/{STRIDE}/{y}"] for k in (layer, -1)), nan_policy="omit")[0]
                for y in LABELS
            ]
            alone = float((sigma[:, 0] > 10 * sigma[:, 1]).mean())  # one direction has nearly all
            show(f"{MODELS[model]}, {name}", len(sigma), *medians, float(common), alone, *same)
            which, some = found[f"{layer}/route"], found[f"{layer}/some"]
            for name in ROUTES[::-1]:
                of_name, errors = which == name, found[f"{layer}/error"][which[some] == name]
                numbers = [of(x[~np.isnan(x)]) for x in errors.T for of in (largest, median)]
                rounded = found[f"{layer}/bfloat16"][which[some] == name][:, 0]
                numbers += [largest(rounded), median(found["repetition"][of_name])]
                show(f"   {name}", int(of_name.sum()), len(errors), *numbers)
        axes.set_yscale("log")
        axes.set_xlabel("number of the singular value, centred", fontsize=9)
        axes.set_title(f"{MODELS[model]}, first {EQUAL} tokens", fontsize=9, loc="left")
        axes.legend(fontsize=8, frameon=False)
    grid[0, 0].set_ylabel("share of the largest", fontsize=9)
    return figure


if __name__ == "__main__":
    command, place, *names = sys.argv[1:]
    compilation.keep_programs()
    {"prompts": prompts, "measure": measure, "draw": draw}[command](pathlib.Path(place), *names)
