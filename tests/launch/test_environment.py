"""A run with an environment, killed between and inside turns, and in two processes."""

import re
import subprocess

import numpy as np
import pytest

from semrl_jax import data
from tests.environments.test_verifiers import PYTHON, TASKSETS
from tests.fixtures import read_rows, save_chat_model, save_model
from tests.launch.comparison import assert_same_run
from tests.launch.conftest import ROOT, TINY, succeed, xla_flags
from tests.launch.conftest import environment as plain
from tests.launch.processes import finish, start_processes
from tests.launch.test_kills import CONFIG, assert_no_orphans, environment, kill_once
from tests.launch.test_processes import assert_close_rows

NUM_STEPS = 3
FLAGS = (
    "--config.data.task=environment", "--config.environment.name=tests.environments.users:Vowels",
    "--config.rollout.max_prompt_tokens=64", "--config.rollout.max_response_tokens=96",
    "--config.evaluation.num_problems=4", f"--config.training.num_steps={NUM_STEPS}",
    "--config.warm_start.num_steps=0",
    # An untrained policy never writes the end token: one token in seven ends a turn.
    *(f"--config.rollout.stop_token_ids={token}" for token in range(0, 280, 7)),
)  # fmt: skip
AHEAD = (
    "--config.rollout.max_staleness=2",
    "--config.algorithms.batch_rules.max_sampling_rounds=8",
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags of a run with a random Qwen2 and a trained tokenizer."""
    directory = save_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    return (*FLAGS, f"--config.model.path={directory}")


def finished(workdir, flags, config=CONFIG, **options):
    arguments = (f"--config={config}", f"--workdir={workdir}", *flags)
    succeed("launch.train", *arguments, timeout=600, **options)


def lines(*files):
    return sum(file.read_text().strip().count("\n") + 1 for file in files)


@pytest.mark.soak
@pytest.mark.parametrize("more", [(), AHEAD], ids=["now", "ahead"])
def test_a_run_that_is_killed_plays_the_episodes_again(flags, more, tmp_path):
    """The same rows, tokens and weights, and no process of an environment is left."""
    flags, mark = (*flags, *more), "environments"
    finished(tmp_path / "whole", flags, env=environment("none"))
    random = np.random.default_rng(len(more))
    for kill in ("turn:30 0.02", "turn:80 0.02"):  # in the first step, and in the second
        kill_once(kill, tmp_path / "run", flags, random, mark)
    finished(tmp_path / "run", flags, env=environment(mark))
    assert_same_run(tmp_path / "run", tmp_path / "whole", NUM_STEPS)
    assert_no_orphans(mark)
    assert not (tmp_path / "run" / "answers").exists()


@pytest.mark.soak
@pytest.mark.parametrize("more", [(), AHEAD], ids=["now", "ahead"])
def test_what_was_answered_before_a_kill_is_not_asked_again(flags, more, tmp_path):
    """Without a checkpoint, all begins again: only calls that a kill interrupted are repeated."""
    flags, mark = (*flags, *more, "--config.checkpoints.every_steps=100"), "answers"
    random, repeated, answered = np.random.default_rng(len(more)), 0, 0

    def logging_to(log):
        name = f"tests.environments.logged:RecallingVowels:path={log}"
        return (*flags, f"--config.environment.name={name}")

    whole, log, run_ = tmp_path / "whole.log", tmp_path / "log", tmp_path / "run"
    finished(tmp_path / "whole", logging_to(whole), env=environment("none"))
    for kill in ("turn:30 0.02", "turn:80 0.02"):
        kill_once(kill, run_, logging_to(log), random, mark)
        answers = lines(*(run_ / "answers").iterdir())
        repeated = lines(log) - answers  # with the first call of each start, which tries it
        assert answers > answered
        answered = answers
    assert answered > 40 and repeated < 40
    finished(run_, logging_to(log), env=environment(mark))
    assert_same_run(run_, tmp_path / "whole", NUM_STEPS)
    assert lines(log) == lines(whole) + repeated


BY_TURN = (*AHEAD, "--config.algorithms.advantage.credit=turn")


@pytest.mark.parametrize(
    "more",
    [pytest.param((), marks=pytest.mark.soak), pytest.param(BY_TURN, marks=pytest.mark.soak)],
    ids=["now", "ahead"],
)
def test_two_processes_play_the_episodes_of_one(flags, more, tmp_path):
    flags = (*flags, *more)
    for code, _, err in finish(start_processes(tmp_path / "two", 2, *flags)):
        assert code == 0, err
    finished(tmp_path / "one", flags, TINY, env={"XLA_FLAGS": xla_flags(4)})
    assert_close_rows(tmp_path / "two", tmp_path / "one")


AGENT = """
import json, os, urllib.request

messages = [{"role": "user", "content": json.loads(os.environ["TASK"])["question"]}]

def ask():
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps({"messages": messages}).encode())
    with urllib.request.urlopen(request) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    return messages[-1]["content"]

first = ask()
messages.append({"role": "user", "content": "More!"})
print(len(set(first + ask())) / 30)
"""


@pytest.mark.soak
def test_an_agent_that_knows_a_url_is_trained_on(flags, tmp_path):
    """Two turns an episode, rewards that differ, and the same rows after a kill."""
    (tmp_path / "agent.py").write_text(AGENT)
    rows = "\n".join(f'{{"question": "Write about w{number}."}}' for number in range(12))
    (tmp_path / "tasks.jsonl").write_text(rows)
    name = f"agent:program={tmp_path}/agent.py:tasks={tmp_path}/tasks.jsonl"
    flags, mark = (*flags, f"--config.environment.name={name}"), "agents"
    finished(tmp_path / "whole", flags, env=environment("none"))
    kill_once("turn:30 0.02", tmp_path / "run", flags, np.random.default_rng(0), mark)
    finished(tmp_path / "run", flags, env=environment(mark))
    assert_same_run(tmp_path / "run", tmp_path / "whole", NUM_STEPS)
    assert_no_orphans(mark)
    rows = [row for row in read_rows(tmp_path / "whole") if "episode/turns/mean" in row]
    assert len(rows) == NUM_STEPS and all(1 < row["episode/turns/mean"] <= 2 for row in rows)
    assert all(row["reward/max"] > row["reward/min"] for row in rows)
    assert all(row["episode/failed_fraction"] == 0 for row in rows)


@pytest.mark.soak
def test_verifiers_is_trained_on_through_its_own_client(tmp_path):
    """The program of the page, with a renderer that keeps the tokens of two turns."""
    tokenizer = data.train_tokenizer(["Write about w12. More! user assistant"], 280)
    tokenizer.unk_token = None  # the renderer wants all tokens of Qwen3's
    names = "think", "tool_call", "tool_response"
    tokenizer.add_tokens([f"<{end}{name}>" for name in names for end in ("", "/")])
    model, rows = tmp_path / "model", tmp_path / "tasks.jsonl"
    save_model(model, tokenizer, tie_embeddings=True)
    page = (ROOT / "docs" / "clients.md").read_text()
    (program,) = re.findall(r"```python\n(# verifiers_agent.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "agent.py").write_text(program.replace("models/Qwen3-0.6B", str(model)))
    rows.write_text("\n".join(f'{{"id": "vf-distinct", "index": {n}}}' for n in range(6)))
    arguments = (
        *FLAGS, "--config.environment.timeout_s=300", "--config.evaluation.num_problems=1",
        f"--config.environment.name=agent:program={tmp_path}/agent.py:tasks={rows}",
        f"--config.model.path={model}", "--config.training.num_steps=2",
        "--config.data.num_prompts=3", "--config.data.prompts_per_step=2",
        "--config.evaluation.every_steps=100",
    )  # fmt: skip
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run benchmarks/peers/make_env.sh verifiers")
    done = subprocess.run(
        [PYTHON, "-m", "launch.train", f"--config={TINY}", f"--workdir={tmp_path}/run", *arguments],
        cwd=ROOT, env=plain() | {"PYTHONPATH": f"{ROOT}:{TASKSETS}"}, timeout=3000,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = [row for row in read_rows(tmp_path / "run") if "episode/turns/mean" in row]
    assert len(found) == 2 and all(1 < row["episode/turns/mean"] <= 2 for row in found)
    assert all(row["reward/max"] > row["reward/min"] >= 0 for row in found)
    assert all(row["episode/failed_fraction"] <= 0.25 for row in found)
