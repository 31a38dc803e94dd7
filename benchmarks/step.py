"""Training steps of this project beside google-tunix and TRL, and beside their floors.

    benchmarks/peers/make_env.sh tunix
    benchmarks/peers/make_env.sh trl
    python -m benchmarks.step

All train the same random Qwen2 of 4.0 M parameters in float32 on the same prompts, with the same
reward: GRPO with 8 prompts of 16 tokens, 8 responses to each, no KL, and one update per step. Every
response has all 128 tokens. Ours is measured with hidden states, metrics and VERL shaping, and
without them.

Each system is a process that stays alive, and one works at a time. A round takes one step of each.
Rounds alternate in order. The first steps, which compile, are not counted. Ratios are taken within
rounds. The median comes first, with an interval from order statistics. CPU seconds are those of the
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

from benchmarks import machine, results
from benchmarks.results import median_interval, table

ROOT = pathlib.Path(__file__).parents[1]
OURS, PLAIN, TUNIX, TRL, FLOORS = NAMES = ("ours", "plain", "tunix", "trl", "floors")
TITLES = {
    OURS: "ours", PLAIN: "ours without states and VERL", TUNIX: "google-tunix", TRL: "TRL",
    FLOORS: "plain JAX",
}  # fmt: skip
MODEL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_layers": 4,
    "num_heads": 4, "num_kv_heads": 2, "context": 2048,
}  # fmt: skip
PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8, 16, 128
NUM_TOKENS = PROMPTS * GROUP * RESPONSE_TOKENS

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


class System:
    """A process that takes training steps when told to."""

    def __init__(self, command: Sequence[str], work: Mapping[str, Any], log: Any, cache: str):
        file = pathlib.Path(log.name).with_suffix(".json")
        file.write_text(json.dumps(work))
        # Limits on threads in this shell are not meant for the systems.
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in limits}
        environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
        self._log = log
        self._process = subprocess.Popen(
            [*command, str(file)],
            cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self.about = self._read()
        if set(self.about["prompt_tokens"]) != {PROMPT_TOKENS}:
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
        if row["num_tokens"] != NUM_TOKENS:
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
    for name, directory in ((TUNIX, arguments.tunix), (TRL, arguments.trl)):
        if directory.exists() and name in arguments.systems:
            script = ROOT / "benchmarks" / "peers" / f"{name}_grpo.py"
            found[name] = [str(directory.absolute() / "bin" / "python"), str(script)]
    if FLOORS in arguments.systems:
        found[FLOORS] = [sys.executable, "-m", "benchmarks.floors"]
    return found


def measure(
    arguments: argparse.Namespace, directory: pathlib.Path
) -> tuple[dict[str, list[Row]], dict[str, Row]]:
    """The rows of the rounds, and what each system says about itself."""
    work = {
        "model": str((directory / "model").absolute()),
        "prompts": make_model(directory / "model"),
        "group_size": GROUP,
        "prompt_tokens": PROMPT_TOKENS,
        "response_tokens": RESPONSE_TOKENS,
        "learning_rate": 1e-6,
        "micro_batch_size": 4,
        "ours": dict(overridden(text) for text in arguments.set),
    }
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


def ratios(rows: Mapping[str, Sequence[Row]]) -> str:
    """Times of the others divided by ours, within rounds."""
    pairs = [(name, OURS) for name in (TUNIX, TRL)] + [(OURS, PLAIN)]
    lines = []
    for over, under in pairs:
        if over in rows and under in rows:
            cells = []
            for key in ("step_s", "rollout_s", "update_s", "cpu_s"):
                found = [a[key] / b[key] for a, b in zip(rows[over], rows[under])]
                low, high, level = median_interval(found)
                cells.append(f"{statistics.median(found):.3f} [{low:.3f}, {high:.3f}]")
            lines.append([f"{TITLES[over]} / {TITLES[under]}", *cells])
    if not lines:
        return ""
    return (
        table(("Time ratio", "whole step", "rollout", "update", "CPU seconds"), lines)
        + f"\n\nBrackets: {100 * level:.0f} % intervals of the medians of {len(found)} rounds.\n"
    )


def absolutes(rows: Mapping[str, Sequence[Row]]) -> str:
    """Medians of each system."""
    lines = []
    for name, own in rows.items():
        step_s, rollout_s, update_s, cpu_s = (
            median(own, key) for key in ("step_s", "rollout_s", "update_s", "cpu_s")
        )
        whole = name != FLOORS  # a step of the floors has products in addition
        lines.append([
            TITLES[name],
            f"{step_s:.2f}" if whole else f"{rollout_s + update_s:.2f}",
            f"{rollout_s:.2f}",
            f"{update_s:.2f}",
            f"{step_s - rollout_s - update_s:.2f}" if whole else "",
            f"{cpu_s:.2f}" if whole else "",
            f"{NUM_TOKENS / rollout_s:.0f}",
            f"{NUM_TOKENS / (step_s if whole else rollout_s + update_s):.0f}",
            f"{max(row['peak_mib'] for row in own):.0f}",
            f"{median(own, 'others'):.2f}",
        ])  # fmt: skip
    header = (
        "Medians", "step s", "rollout s", "update s", "rest s", "CPU s", "sampled tokens/s",
        "tokens/s of the step", "peak MiB", "cores of other programs",
    )  # fmt: skip
    return table(header, lines) + "\n"


def stages(rows: Mapping[str, Sequence[Row]]) -> str:
    """Seconds, CPU seconds and floors of the phases of our log."""
    own = [name for name in (OURS, PLAIN) if name in rows]
    if not own:
        return ""
    keys = dict.fromkeys(key for name in own for row in rows[name] for key in row["stages"])
    floors = {}
    if FLOORS in rows:
        floors = {"sample": median(rows[FLOORS], "rollout_s")}
        floors["update"] = median(rows[FLOORS], "update_s")
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
        "CPU seconds are those of the trainer with its replica, without the verifiers.\n"
    )


def distances(rows: Mapping[str, Sequence[Row]], about: Mapping[str, Row]) -> str:
    """Generation and update of every system beside the floors, and the rates of products."""
    if FLOORS not in rows:
        return ""
    flops = about[FLOORS]["update_flops"]
    gflops = median(rows[FLOORS], "gflops")
    lines = []
    for name, own in rows.items():
        cells = []
        for key in ("rollout_s", "update_s"):
            found = [row[key] / floor[key] for row, floor in zip(own, rows[FLOORS])]
            cells.append(f"{statistics.median(found):.2f}")
        rates = [flops / row["update_s"] / 1e9 for row in own]
        shares = [rate / floor["gflops"] for rate, floor in zip(rates, rows[FLOORS])]
        cells += [f"{statistics.median(rates):.0f}", f"{100 * statistics.median(shares):.0f} %"]
        lines.append([TITLES[name], *cells])
    header = (
        "Times the floor", "rollout", "update", "update, GFLOP/s", "share of the rate of products",
    )  # fmt: skip
    return (
        table(header, lines) + f"\n\nProducts of the update's sizes alone: {gflops:.0f} GFLOP/s. "
        f"An update has {flops / 1e9:.0f} GFLOP, nothing recomputed.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="rounds")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these, not counted")
    for name in (TUNIX, TRL):
        parser.add_argument(
            f"--{name}",
            type=pathlib.Path,
            default=ROOT / f".venv-{name}",
            help=f"environment of make_env.sh; without it, {TITLES[name]} is left out",
        )
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--set", nargs="+", default=[], help="of ours, such as training.micro_batch_size=8"
    )
    parser.add_argument("--directory", type=pathlib.Path, help="keeps model, programs and logs")
    parser.add_argument("--max_s", type=float, default=0, help="begin no round after this time")
    results.add_option(parser)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        directory.mkdir(parents=True, exist_ok=True)
        rows, about = measure(arguments, directory)
    versions = {name: v for own in about.values() for name, v in own["versions"].items()}
    num_params = {own["num_params"] for own in about.values()}
    parts = [ratios(rows), absolutes(rows), distances(rows, about), stages(rows)]
    parts.append(f"{' and '.join(f'{n / 1e6:.2f}' for n in num_params)} M parameters.")
    results.show("A training step beside other libraries", "\n".join(filter(None, parts)),
                 arguments.json, versions)  # fmt: skip


if __name__ == "__main__":
    main()
