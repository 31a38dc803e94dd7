"""Training steps of this project, compared with google-tunix and TRL, and with floors.

    benchmarks/peers/make_env.sh tunix
    benchmarks/peers/make_env.sh trl
    python -m benchmarks.step
    python -m benchmarks.step --model=runs/models/smollm2

All train the same random Qwen2 of 4.0 M parameters in float32 on the same prompts, with the same
reward: GRPO with 8 prompts of 16 tokens, 8 responses to each, no KL, and one update per step. Every
response has all 128 tokens. Ours is measured with hidden states, metrics and VERL shaping, and
without them.

With `--model`, all train a real model of Hugging Face's format on 8 problems, which are sums or
come from `--problems`, in its chat template. Responses end where the model ends them, so their
lengths differ between systems and rounds. Ratios compare seconds per response token, and seconds.
transformers' `generate` is measured alone too. The floor is the arithmetic of the products at the
rate of large products. The memory of all systems adds up; `--systems` chooses some.

Each system is a process that stays alive, and one works at a time. A round takes one step of each.
Rounds alternate in order. The first steps, which compile, are not counted. Ratios are taken within
rounds. The median comes first, with an interval from order statistics. CPU seconds count the
system's processes. The cores that other programs used during a step are measured as well.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import machine, real_model, results
from benchmarks.results import median_interval, table

ROOT = pathlib.Path(__file__).parents[1]
OURS, PLAIN, TUNIX, TRL, GENERATE, FLOORS = NAMES = (
    "ours", "plain", "tunix", "trl", "generate", "floors"
)  # fmt: skip
TITLES = {
    OURS: "ours", PLAIN: "ours without states and VERL", TUNIX: "google-tunix", TRL: "TRL",
    GENERATE: "transformers' generate", FLOORS: "plain JAX",
}  # fmt: skip
MODEL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_layers": 4,
    "num_heads": 4, "num_kv_heads": 2, "context": 2048,
}  # fmt: skip
PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8, 16, 128
NUM_TOKENS = PROMPTS * GROUP * RESPONSE_TOKENS
PASSES = {"rollout_s": 1, "update_s": 3}  # forward and backward, in the cost of a forward pass

Row = Mapping[str, Any]


def words(draw: random.Random, count: int) -> str:
    """Words of random syllables, from which a tokenizer of 4096 tokens can be trained."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    return " ".join("".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(count))


def make_model(directory: pathlib.Path) -> list[str]:
    """Makes the model and its tokenizer unless they exist; returns the prompts."""
    import tokenizers

    draw = random.Random(0)
    if not directory.exists():
        text = directory.with_suffix(".jsonl")
        text.write_text("\n".join(json.dumps({"text": words(draw, 50)}) for _ in range(2000)))
        sizes = [f"--{name}={value}" for name, value in MODEL.items()]
        subprocess.run(
            [sys.executable, "-m", "launch.random_model", f"--text={text}", *sizes,
             f"--output={directory}"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    draw, prompts = random.Random(1), []
    while len(prompts) < PROMPTS:
        text = words(draw, 10)
        if len(tokenizer.encode(text).ids) == PROMPT_TOKENS:
            prompts.append(text)
    return prompts


def random_work(directory: pathlib.Path) -> dict[str, Any]:
    """What the systems do with the random model."""
    return {
        "model": str(directory.absolute()),
        "prompts": make_model(directory),
        "prompt_lengths": [PROMPT_TOKENS] * PROMPTS,
        "end_token_ids": [],  # none: every response has all tokens
        "response_tokens": RESPONSE_TOKENS,
        "micro_batch_size": 4,
        "peer_micro_batch_size": PROMPTS * GROUP,
        "ours": {},
    }


def real_work(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the systems do with the model of `--model`."""
    micro = arguments.micro_batch
    stride = min(16, arguments.response_tokens // 3)  # ERA needs 3 measured prefixes
    return real_model.work(arguments.model, arguments.problems, PROMPTS) | {
        "response_tokens": arguments.response_tokens,
        "micro_batch_size": micro,
        "peer_micro_batch_size": micro,
        "ours": {"metrics.stride": stride, "training.micro_batch_size": micro},
    }


class System:
    """A process that takes training steps when told to."""

    def __init__(self, command: Sequence[str], work: Mapping[str, Any], log: Any, cache: str):
        file = pathlib.Path(log.name).with_suffix(".json")
        file.write_text(json.dumps(work))
        # Limits on threads in this shell are not meant for the systems.
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in limits}
        environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
        self._log, self._ragged = log, bool(work["end_token_ids"])
        self._process = subprocess.Popen(
            [*command, str(file)],
            cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self.about = self._read()
        if sorted(self.about["prompt_tokens"]) != sorted(work["prompt_lengths"]):
            raise SystemExit(f"{command}: prompts of {self.about['prompt_tokens']} tokens")

    def step(self) -> dict[str, Any]:
        """One step: what the system reports, and what is measured from outside."""
        session = self._process.pid
        machine_before, own_before = machine.cpu_seconds(session)
        began = time.perf_counter()
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        row = self._read()
        row["step_s"] = time.perf_counter() - began
        machine_after, own_after = machine.cpu_seconds(session)
        row["cpu_s"] = own_after - own_before
        others = machine_after - machine_before - row["cpu_s"]
        row["others"] = max(others, 0.0) / row["step_s"]
        row["peak_mib"] = machine.peak_mib(self._process.pid)
        if not self._ragged and row["num_tokens"] != NUM_TOKENS:
            raise SystemExit(f"{row['num_tokens']} tokens were sampled instead of {NUM_TOKENS}")
        return row

    def close(self) -> None:
        """Ends the process, which ends when its input does."""
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):  # not what a library prints while it is imported
                return json.loads(line)
        said = pathlib.Path(self._log.name).read_text().strip().splitlines() or [""]
        raise SystemExit(f"a process ended, see {self._log.name}: {said[-1]}")


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each system that was asked for."""
    found = {
        name: [sys.executable, "-m", "benchmarks.peers.ours"]
        for name in (OURS, PLAIN)
        if name in arguments.systems
    }
    peers = (
        (TUNIX, arguments.tunix, "tunix_grpo"), (TRL, arguments.trl, "trl_grpo"),
        (GENERATE, arguments.trl, "transformers_generate"),
    )  # fmt: skip
    for name, directory, script in peers:
        if directory.exists() and name in arguments.systems:
            python = directory.absolute() / "bin" / "python"
            found[name] = [str(python), str(ROOT / "benchmarks" / "peers" / f"{script}.py")]
    if FLOORS in arguments.systems:
        found[FLOORS] = [sys.executable, "-m", "benchmarks.floors"]
    return found


def measure(
    arguments: argparse.Namespace, directory: pathlib.Path
) -> tuple[dict[str, list[Row]], dict[str, Row]]:
    """The rows of the rounds, and what each system says about itself."""
    work = real_work(arguments) if arguments.model else random_work(directory / "model")
    work |= {
        "group_size": GROUP,
        "prompt_tokens": max(work["prompt_lengths"]),
        "learning_rate": 1e-6,
    }
    work["ours"] |= dict(overridden(text) for text in arguments.set)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        systems = {}
        for name, command in commands(arguments).items():
            log = stack.enter_context((directory / f"{name}.log").open("w"))
            cache = str((directory / f"xla_{name}").absolute())
            system = System(command, work | {"shaping": name == OURS}, log, cache)
            stack.callback(system.close)
            systems[name] = system
            for _ in range(arguments.warmup):
                system.step()
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", file=sys.stderr)
        rows: dict[str, list[Row]] = {name: [] for name in systems}
        for index in range(arguments.pairs):
            for name in list(systems)[:: 1 if index % 2 else -1]:
                rows[name].append(systems[name].step())
            line = ", ".join(f"{name} {rows[name][-1]['step_s']:.2f}" for name in systems)
            print(f"round {index + 1}/{arguments.pairs}: {line}", file=sys.stderr, flush=True)
            if arguments.max_s and time.monotonic() - began > arguments.max_s:
                break
        return rows, {name: system.about for name, system in systems.items()}


def overridden(text: str) -> tuple[str, Any]:
    """A setting of ours and its value, from "training.micro_batch_size=8"."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def median(rows: Sequence[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def share(a: Row, b: Row) -> float:
    """Response tokens of b per one of a."""
    return b["num_tokens"] / a["num_tokens"]


def ratios(rows: Mapping[str, Sequence[Row]], per_token: bool = False) -> str:
    """Times of the others, or those per response token, divided by ours, within rounds."""
    pairs = [(name, OURS) for name in (TUNIX, TRL, GENERATE)] + [(OURS, PLAIN)]
    lines = []
    for over, under in pairs:
        if over in rows and under in rows:
            cells = []
            for key in ("step_s", "rollout_s", "update_s", "cpu_s"):
                if over == GENERATE and key != "rollout_s":
                    cells.append("")
                    continue
                both = zip(rows[over], rows[under])
                found = [a[key] / b[key] * (share(a, b) if per_token else 1.0) for a, b in both]
                low, high, level = median_interval(found)
                cells.append(f"{statistics.median(found):.3f} [{low:.3f}, {high:.3f}]")
            lines.append([f"{TITLES[over]} / {TITLES[under]}", *cells])
    if not lines:
        return ""
    title = "Ratio of seconds per response token" if per_token else "Time ratio"
    return (
        table((title, "whole step", "rollout", "update", "CPU seconds"), lines)
        + f"\n\nBrackets: {100 * level:.0f} % intervals of the medians of {len(found)} rounds.\n"
    )


def absolutes(rows: Mapping[str, Sequence[Row]], ragged: bool = False) -> str:
    """Medians of each system; if responses are ragged, with the number of their tokens."""
    lines = []
    for name, own in rows.items():
        if "rollout_s" not in own[0]:  # products alone
            continue
        own = [{"update_s": 0.0} | row for row in own]  # transformers' generate has none
        step_s, rollout_s, update_s, cpu_s, num_tokens = (
            median(own, key) for key in ("step_s", "rollout_s", "update_s", "cpu_s", "num_tokens")
        )
        whole = name != FLOORS  # a step of the floors has products in addition
        lines.append([
            TITLES[name],
            f"{step_s:.2f}" if whole else f"{rollout_s + update_s:.2f}",
            f"{rollout_s:.2f}",
            f"{update_s:.2f}",
            f"{step_s - rollout_s - update_s:.2f}" if whole else "",
            f"{cpu_s:.2f}" if whole else "",
            f"{num_tokens / rollout_s:.0f}",
            f"{num_tokens / (step_s if whole else rollout_s + update_s):.0f}",
            f"{max(row['peak_mib'] for row in own):.0f}",
            f"{median(own, 'others'):.2f}",
            *([f"{num_tokens:.0f}"] if ragged else []),
        ])  # fmt: skip
    header = (
        "Medians", "step s", "rollout s", "update s", "rest s", "CPU s", "sampled tokens/s",
        "tokens/s of the step", "peak MiB", "cores of other programs",
        *(["response tokens"] if ragged else []),
    )  # fmt: skip
    return table(header, lines) + "\n"


def floor_s(key: str, row: Row, floor: Row, about: Row) -> float:
    """Seconds of the floor in the round of a row: measured, or products for the row's tokens."""
    if key in floor:
        return floor[key]
    flops = about["fixed_flops"] + row["num_tokens"] * about["token_flops"]
    return PASSES[key] * flops / floor["gflops"] / 1e9


def stages(rows: Mapping[str, Sequence[Row]], about: Mapping[str, Row]) -> str:
    """Seconds, CPU seconds and floors of the phases of our log."""
    own = [name for name in (OURS, PLAIN) if name in rows]
    if not own:
        return ""
    keys = dict.fromkeys(key for name in own for row in rows[name] for key in row["stages"])
    floors = {}
    if FLOORS in rows:
        for stage, key in (("sample", "rollout_s"), ("update", "update_s")):
            both = zip(rows[own[0]], rows[FLOORS])
            floors[stage] = statistics.median(floor_s(key, *pair, about[FLOORS]) for pair in both)
        floors["step"] = sum(floors.values())
    lines = []
    for stage in [key[5:-2] for key in keys if key.startswith("time/")]:
        cells = [f"`time/{stage}_s`"]
        for name in own:
            for unit in ("time", "cpu"):
                key = f"{unit}/{stage}_s"
                found = [row["stages"][key] for row in rows[name] if key in row["stages"]]
                cells.append(f"{statistics.median(found):.3f}" if found else "")
        floor = floors.get(stage)
        distance = float(cells[1]) / floor if floor and cells[1] else None
        cells.append(f"{floor:.3f}" if floor else "")
        cells.append(f"{distance:.2f}" if distance else "")
        lines.append(cells)
    header = ["Stage", *(f"{TITLES[name]}, {unit}" for name in own for unit in ("s", "CPU s"))]
    return (
        table((*header, "floor, s", f"{TITLES[own[0]]} / floor"), lines)
        + "\n\n`sample` contains `generate`, the wait for responses, and what is done with each. "
        "CPU seconds count the trainer with its replica, without the verifiers.\n"
    )


def distances(rows: Mapping[str, Sequence[Row]], about: Mapping[str, Row]) -> str:
    """Generation and update of every system compared with the floors, and the rates of products."""
    if FLOORS not in rows:
        return ""
    gflops, lines = median(rows[FLOORS], "gflops"), []
    flops = about[FLOORS].get("update_flops")
    for name, own in rows.items():
        cells = []
        for key in ("rollout_s", "update_s"):
            pairs = [pair for pair in zip(own, rows[FLOORS]) if key in pair[0]]
            found = [pair[0][key] / floor_s(key, *pair, about[FLOORS]) for pair in pairs]
            cells.append(f"{statistics.median(found):.2f}" if found else "")
        if flops is None:
            lines += [[TITLES[name], *cells]] if any(cells) else []
            continue
        rates = [flops / row["update_s"] / 1e9 for row in own]
        shares = [rate / floor["gflops"] for rate, floor in zip(rates, rows[FLOORS])]
        cells += [f"{statistics.median(rates):.0f}", f"{100 * statistics.median(shares):.0f} %"]
        lines.append([TITLES[name], *cells])
    if flops is None:
        return (
            table(("Times the floor", "rollout", "update"), lines) + "\n\nThe floor is the "
            "arithmetic of the products for the tokens of the system, each prompt once, without "
            f"attention, at the rate of large products: {gflops:.0f} GFLOP/s.\n"
        )
    header = (
        "Times the floor", "rollout", "update", "update, GFLOP/s", "share of the rate of products",
    )  # fmt: skip
    return (
        table(header, lines) + f"\n\nProducts of the update's sizes alone: {gflops:.0f} GFLOP/s. "
        f"An update has {flops / 1e9:.0f} GFLOP, nothing recomputed.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, help="Hugging Face directory, real prompts")
    parser.add_argument(
        "--problems", type=pathlib.Path, help="of --model: JSONL with question or problem; or sums"
    )
    parser.add_argument(
        "--response-tokens", type=int, default=RESPONSE_TOKENS, help="of --model: the limit"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=8, choices=(8, 16, 32, 64), help="responses of a pass"
    )
    parser.add_argument("--pairs", type=int, help="rounds; 15, or 7 with --model")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these, not counted")
    for name in (TUNIX, TRL):
        parser.add_argument(
            f"--{name}",
            type=pathlib.Path,
            default=ROOT / f".venv-{name}",
            help=f"environment of make_env.sh; without it, {TITLES[name]} is left out",
        )
    parser.add_argument("--systems", nargs="+", choices=NAMES)
    parser.add_argument(
        "--set", nargs="+", default=[], help="of ours, such as training.micro_batch_size=8"
    )
    parser.add_argument("--directory", type=pathlib.Path, help="keeps model, programs and logs")
    parser.add_argument("--max_s", type=float, default=0, help="begin no round after this time")
    results.add_option(parser)
    arguments = parser.parse_args()
    for option, path in (("model", arguments.model), ("problems", arguments.problems)):
        if path and not path.exists():
            parser.error(f"--{option}: {path} does not exist.")
    ragged = bool(arguments.model)
    arguments.pairs = arguments.pairs or (7 if ragged else 15)
    arguments.systems = arguments.systems or [n for n in NAMES if ragged or n != GENERATE]
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        directory.mkdir(parents=True, exist_ok=True)
        rows, about = measure(arguments, directory)
    versions = {name: v for own in about.values() for name, v in own["versions"].items()}
    num_params = {own["num_params"] for own in about.values() if "num_params" in own}
    parts = [ratios(rows, per_token=True)] if ragged else []
    parts += [ratios(rows), absolutes(rows, ragged), distances(rows, about), stages(rows, about)]
    parts.append(f"{' and '.join(f'{n / 1e6:.2f}' for n in num_params)} M parameters.")
    title = "A training step and other libraries"
    if ragged:
        title += f": {arguments.model.name}"
        lengths = next(iter(about.values()))["prompt_tokens"]
        parts.append(
            f"{PROMPTS} prompts of {min(lengths)} to {max(lengths)} tokens, {GROUP} responses of "
            f"at most {arguments.response_tokens} to each, {arguments.micro_batch} responses per "
            "backward pass."
        )
    results.show(title, "\n".join(filter(None, parts)),
                 arguments.json, versions)  # fmt: skip


if __name__ == "__main__":
    main()
