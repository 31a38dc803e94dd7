"""Learning curves in environments: a real model learns to call a tool, a tiny one a game.

    python -m benchmarks.environment_learning calculator --model=runs/models/smollm2 --seeds 0 1 2
    python -m benchmarks.environment_learning tictactoe --seeds 0 1 2

Demonstrations are written first: of the calculator, episodes that answer at once, and a tenth
that call it and repeat its result; of the game, plays of random legal moves on both sides.
SmolLM2-135M, or a random model of 0.5 M parameters, is fine-tuned on them and trained from there
with configs/SUBJECT.py: with each seed, and with shuffled rewards as a control. Prints the share of
correct episodes on held-out tasks. Every part goes on where it was stopped.
"""

import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import ml_collections

from benchmarks.results import table
from configs import calculator, tictactoe
from semrl_jax import data
from semrl_jax.environments.interface import Message
from semrl_jax.environments.pool import EnvironmentPool, Opening
from semrl_jax.runs.records import read_rows

DEMONSTRATIONS_SEED = 10**6  # no seed of a run
CALL_FRACTION = 0.1
SIZES = (
    "--vocab_size=512", "--hidden_size=128", "--intermediate_size=256", "--num_layers=3",
    "--num_heads=4", "--num_kv_heads=2",
)  # fmt: skip


def call_and_repeat(opening: Opening, messages: list[Message], draw: random.Random) -> str:
    """Calls the calculator in a tenth of the episodes; then, or at once, gives the answer."""
    if len(messages) > len(opening.messages) or draw.random() > CALL_FRACTION:
        return opening.task["answer"]
    arguments = {"expression": opening.task["expression"]}
    return f"```json\n{json.dumps({'name': 'calculate', 'arguments': arguments})}\n```"


def random_move(opening: Opening, messages: list[Message], draw: random.Random) -> str:
    """One of the moves that the last message offers."""
    offered = messages[-1]["content"].partition("Available Moves:")[2]
    return draw.choice(re.findall(r"\[\d\]", offered))


class Subject(NamedTuple):
    """What is learned.

    Attributes:
      speak: the next message of a demonstration.
      count: of demonstrations.
      tuning: flags of launch.sft.
    """

    config: ml_collections.ConfigDict
    speak: Callable[[Opening, list[Message], random.Random], str]
    count: int
    tuning: tuple[str, ...]


SUBJECTS = {
    "calculator": Subject(
        calculator.get_config(), call_and_repeat, 128,
        ("--config.sft.learning_rate=5e-5", "--config.sft.batch_size=8"),
    ),
    "tictactoe": Subject(
        tictactoe.get_config(), random_move, 3000,
        # In the second pass it learns which moves are legal.
        (
            "--config.sft.learning_rate=3e-3", "--config.sft.batch_size=32",
            "--config.sft.num_epochs=4",
        ),
    ),
}  # fmt: skip


def write_demonstrations(path: pathlib.Path, subject: Subject, model: str) -> None:
    """Episodes as conversations of launch.sft."""
    draw = random.Random(DEMONSTRATIONS_SEED)
    with EnvironmentPool(subject.config.environment) as environments, path.open("w") as file:
        if model:
            environments.speak(data.load_tokenizer(model).chat_template)
        for opening in environments.openings(DEMONSTRATIONS_SEED, subject.count):
            messages, is_over = list(opening.messages), False
            episode = environments.open(opening)
            while not is_over:
                content = subject.speak(opening, messages, draw)
                turn = episode.step(content).result().turn
                messages += [{"role": "assistant", "content": content}, *turn.messages]
                is_over = turn.done
            episode.end()
            file.write(json.dumps({"messages": messages}) + "\n")


def command(module: str, *flags: str) -> None:
    """Runs a command of the package to its end; with the same arguments it goes on."""
    subprocess.run([sys.executable, "-m", module, *flags], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--model", default="", help="to begin with; empty: a random one")
    parser.add_argument("--directory", type=pathlib.Path, help="runs/SUBJECT if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--control", action="store_true", help="shuffled rewards, with seed 0")
    parser.add_argument("--set", nargs="+", default=[], help="such as training.num_steps=10")
    arguments = parser.parse_args()
    subject, model = SUBJECTS[arguments.subject], arguments.model
    directory = arguments.directory or pathlib.Path("runs") / arguments.subject
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "demonstrations.jsonl"
    if not file.exists():
        write_demonstrations(file, subject, model)
    if not model:
        model = str(directory / "random")
        if not pathlib.Path(model).exists():
            command("launch.random_model", f"--text={file}", f"--output={model}", *SIZES)
    config = f"--config=configs/{arguments.subject}.py"
    command(
        "launch.sft", config, f"--workdir={directory / 'demonstrations'}", *subject.tuning,
        f"--config.model.path={model}", f"--config.sft.files={file}",
        "--config.sft.max_tokens=768",
    )  # fmt: skip
    plan = [(f"seed{seed}", (f"--config.seed={seed}",)) for seed in arguments.seeds]
    if arguments.control:
        plan.append(("shuffled", ("--config.rewards.shuffle=True",)))
    rows = []
    for name, flags in plan:
        command(
            "launch.train", config, f"--workdir={directory / name}",
            f"--config.model.path={directory / 'demonstrations' / 'model'}", *flags,
            *(f"--config.{setting}" for setting in arguments.set),
        )  # fmt: skip
        found = read_rows(directory / name / "metrics.jsonl")
        accuracy = re.compile(r"eval/\w+/greedy_accuracy")
        curve = {
            row["step"]: value for row in found for key, value in row.items()
            if accuracy.fullmatch(key) and value is not None
        }  # fmt: skip
        rows.append([name, *(f"{curve[step]:.2f}" for step in sorted(curve))])
    print(table(("run", *map(str, sorted(curve))), rows))


if __name__ == "__main__":
    main()
