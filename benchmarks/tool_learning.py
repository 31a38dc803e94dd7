"""Learning curves of a real model that learns to call a tool.

    python -m benchmarks.tool_learning --seeds 0 1 2

Writes demonstrations, in which the calculator of configs/calculator.py is called and its result
repeated, fine-tunes SmolLM2-135M on them, and trains it from there, with each seed, and with
shuffled rewards as a control. Prints the accuracy of episodes on held-out problems. Every part goes
on where it was stopped.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from benchmarks.results import table
from configs import calculator
from semrl_jax import data
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.runs.records import read_rows

DEMONSTRATIONS_SEED = 10**6  # no seed of a run
KEY = "eval/calculator/greedy_accuracy"


def write_demonstrations(path: pathlib.Path, model: str, count: int) -> None:
    """Episodes that call the tool once and give its answer, as conversations of launch.sft."""
    template = data.load_tokenizer(model).chat_template
    with (
        EnvironmentPool(calculator.get_config().environment) as environments,
        path.open("w") as file,
    ):
        environments.speak(template)
        for opening in environments.openings(DEMONSTRATIONS_SEED, count):
            arguments = {"expression": opening.task["expression"]}
            call = json.dumps({"name": "calculate", "arguments": arguments})
            call = f"```json\n{call}\n```"
            episode = environments.open(opening)
            turn = episode.step(call).result().turn
            episode.end()
            messages = [
                *opening.messages, {"role": "assistant", "content": call}, *turn.messages,
                {"role": "assistant", "content": opening.task["answer"]},
            ]  # fmt: skip
            file.write(json.dumps({"messages": messages}) + "\n")


def command(module: str, workdir: pathlib.Path, *flags: str) -> None:
    """Runs a command of the package to its end; with the same arguments it goes on."""
    config = "--config=configs/calculator.py"
    arguments = [sys.executable, "-m", module, config, f"--workdir={workdir}", *flags]
    subprocess.run(arguments, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="runs/models/smollm2")
    parser.add_argument("--directory", type=pathlib.Path, default="runs/tool_learning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--demonstrations", type=int, default=64)
    parser.add_argument("--control", action="store_true", help="shuffled rewards, with seed 0")
    arguments = parser.parse_args()
    directory = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "demonstrations.jsonl"
    if not file.exists():
        write_demonstrations(file, arguments.model, arguments.demonstrations)
    command(
        "launch.sft", directory / "demonstrations", f"--config.model.path={arguments.model}",
        f"--config.sft.files={file}", "--config.sft.learning_rate=1e-5",
        "--config.sft.batch_size=16", "--config.sft.max_tokens=512",
    )  # fmt: skip
    model = f"--config.model.path={directory / 'demonstrations' / 'model'}"
    plan = [(f"seed{seed}", (f"--config.seed={seed}",)) for seed in arguments.seeds]
    if arguments.control:
        plan.append(("shuffled", ("--config.rewards.shuffle=True",)))
    rows = []
    for name, flags in plan:
        command("launch.train", directory / name, model, *flags)
        found = read_rows(directory / name / "metrics.jsonl")
        curve = {row["step"]: row[KEY] for row in found if row.get(KEY) is not None}
        rows.append([name, *(f"{curve[step]:.2f}" for step in sorted(curve))])
    print(table(("run", *map(str, sorted(curve))), rows))


if __name__ == "__main__":
    main()
