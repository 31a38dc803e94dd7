"""Commands of the pages run as they stand, if a fresh clone and seconds are enough.

tests/launch/test_pages.py parses all of them. Here a command runs unless `ELSEWHERE` matches it, so
a new one that needs a download, an accelerator or minutes gets its words there.
"""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from docs import check_commands
from tests.launch.conftest import ROOT, environment

ELSEWHERE = re.compile(
    # what trains, serves or waits
    r"launch\.(train(?!.*(--explain|--dry_run))|sft|sweep|local|rollout|plan|prepare_\w+) |--serve|"
    # models, data and runs that take a download, minutes or an accelerator
    r"Qwen/|vllm|smollm2|gemma3|0_5b|runs/calculator|runs/grpo_|_lora|adapter|environment:|"
    # a log with several evaluations
    r"launch\.analyze curve|"
    # re-runs that end with exit code 1, for a difference
    r"launch\.replay.*--(?!bisect |from=0 )|"
    # what stands for something of the reader's
    r"\.\.\.|POLICY|--input=states "
)
# What makes a command short. All runs have these settings.
FEWER = {
    "launch.train": [
        "--config.training.num_steps=1", "--config.training.micro_batch_size=8",
        "--config.training.prompts_per_minibatch=4", "--config.data.prompts_per_step=4",
        "--config.warm_start.num_steps=1", "--config.warm_start.num_demonstrations=64",
        "--config.evaluation.num_problems=4",
    ],
    "launch.evaluate": ["--num_problems=2"],
}  # fmt: skip
QUESTIONS = [{"question": f"{n}+{n}=", "answer": f"#### {2 * n}"} for n in range(20, 24)]


@pytest.fixture
def home(tmp_path):
    """A directory with a run of the quickstart, and the files that pages tell to have."""
    (main,) = (c for c in check_commands.commands_of(ROOT / "README.md") if "runs/q" in str(c))
    assert not run(tmp_path, main.words)
    for name in ("first", "second"):
        shutil.copytree(tmp_path / "runs/quickstart", tmp_path / "runs" / name)
    (tmp_path / "data").mkdir()
    for name in ("questions", "data/gsm8k", "data/mine"):
        text = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
        (tmp_path / f"{name}.jsonl").write_text(text)
    states = np.random.default_rng(0).normal(size=(2, 160, 8)).astype(np.float32)
    np.savez(tmp_path / "states.npz", hidden_states=states)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/grading.py").write_text(
        "def strict(response, reference):\n    return float(response == reference)\n"
    )
    return tmp_path


def run(home, words) -> str:
    """Runs a command of a page in a directory; what is wrong, "" if nothing is."""
    command = [sys.executable, *words[1:], *FEWER.get(words[2], [])]
    done = subprocess.run(
        command, cwd=home, env=environment() | {"PYTHONPATH": str(ROOT)}, text=True,
        input="11+12\n", capture_output=True, timeout=900,
    )  # fmt: skip
    wrong = done.returncode or "Traceback" in done.stderr
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}" if wrong else ""


@pytest.mark.soak
def test_commands_of_the_pages_run(home):
    problems, ran, kept = [], set(), set(home.rglob("*"))
    for page in check_commands.pages():
        for command in check_commands.commands_of(page):
            line = " ".join(command.words)
            is_ours = re.match(r"\S*python -m launch\.", line) and not ELSEWHERE.search(f"{line} ")
            if is_ours and line not in ran:
                ran.add(line)
                if problem := run(home, command.words):
                    problems.append(f"{command.place}: {line}\n{problem}")
        for path in set(home.iterdir()) - kept:  # what the page has written
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not problems, "\n\n".join(problems)
    assert {line.split()[2].removeprefix("launch.") for line in ran} == {
        "analyze", "chat", "convert", "env", "evaluate", "generate", "mismatch", "problems",
        "random_model", "replay", "report", "score", "train", "view",
    }  # fmt: skip
