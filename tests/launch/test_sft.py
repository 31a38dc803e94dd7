"""launch.sft on conversations: interrupted runs give the same model, which launch.train accepts."""

import json
import signal

import jax
import numpy as np
import pytest
import transformers

from configs import default, sft
from semrl_jax import data, models
from semrl_jax.runs.sft_run import next_commands
from tests.fixtures import read_rows, save_chat_model, stable
from tests.launch.conftest import read_until, run, start, succeed
from tests.launch.processes import finish, free_port
from tests.launch.test_bad_input import assert_each_is_one_line, assert_one_line

slow = pytest.mark.slow
NUM_STEPS = 6


def write_problems(file, count):
    rows = [
        {"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with a random Qwen2 model and two files of conversations."""
    path = tmp_path_factory.mktemp("sft")
    write_problems(path / "held.jsonl", 5)
    texts = write_problems(path / "train.jsonl", 16).read_text().splitlines()
    save_chat_model(path / "model", texts, head_dim=8)
    return path


def arguments(files, workdir, *flags):
    return (
        "launch.sft", "--config=configs/sft.py", f"--workdir={workdir}",
        f"--config.model.path={files / 'model'}", f"--config.sft.files={files / 'train.jsonl'}",
        f"--config.sft.evaluation_files={files / 'held.jsonl'}", "--config.sft.max_tokens=256",
        f"--config.sft.num_steps={NUM_STEPS}", "--config.sft.batch_size=4",
        "--config.sft.evaluation_every_steps=3", *flags,
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    result = succeed(*arguments(files, workdir))
    assert "files: 16 conversations, " in result.stdout and "eval 6  held  loss " in result.stdout
    assert f"step    6/{NUM_STEPS}  loss " in result.stdout and " tokens/s  left " in result.stdout
    assert f"{workdir}/model/, for transformers" in result.stdout
    following = "python -m launch.train --config=configs/sft.py --workdir=DIR --config.model.path="
    assert f"{following}{workdir}/model\n" in result.stdout
    return workdir


def test_the_next_command_has_the_config_that_was_given():
    _, train = next_commands("mine.py", sft.get_config(), "runs/sft/model")
    assert train[1:] == ["--config=mine.py", "--workdir=DIR", "--config.model.path=runs/sft/model"]
    _, train = next_commands("mine.py", default.get_config(), "runs/sft/model")
    assert train[-2:] == ["--config.data.task=files", "--config.data.files=FILE"]


@slow
def test_the_log_and_the_model(files, uninterrupted):
    rows = read_rows(uninterrupted)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    held_out = {row["step"]: row["eval/held/loss"] for row in rows if "eval/held/loss" in row}
    assert list(held_out) == [0, 3, 6] and held_out[6] < held_out[3] < held_out[0]
    assert all(row["sft/num_learned_tokens"] < row["sft/num_tokens"] for row in rows[:-1])
    assert rows[3]["sft/epoch"] == 1.0  # 4 batches of 4
    assert "<html" in (uninterrupted / "report.html").read_text()[:500]
    model = transformers.AutoModelForCausalLM.from_pretrained(uninterrupted / "model")
    before = transformers.AutoModelForCausalLM.from_pretrained(files / "model")
    assert not np.allclose(model.model.norm.weight.detach(), before.model.norm.weight.detach())
    tokenizers = [data.load_tokenizer(path / "model") for path in (uninterrupted, files)]
    assert len({data.tokenizer_hash(one) for one in tokenizers}) == 1
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


@pytest.mark.soak
@slow
def test_signals_and_kills_change_nothing(files, uninterrupted, tmp_path):
    command = arguments(files, tmp_path / "run")
    process = start(*command)
    read_until(process, f"step    1/{NUM_STEPS}")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command resumes" in out, err
    process = start(*command)
    read_until(process, f"step    5/{NUM_STEPS}")  # the last checkpoint is the signal's
    process.kill()
    process.communicate()
    result = run(*command)
    assert result.returncode == 0 and "resumed" in result.stdout, result.stderr
    assert stable(read_rows(tmp_path / "run")) == stable(read_rows(uninterrupted))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        paths = (path / "model" / name for path in (tmp_path / "run", uninterrupted))
        assert len({path.read_bytes() for path in paths}) == 1


@pytest.mark.soak
@slow
def test_launch_train_goes_on_from_the_model(files, uninterrupted, tmp_path):
    succeed(
        "launch.train", "--config=configs/gsm8k.py", f"--workdir={tmp_path / 'run'}",
        f"--config.model.path={uninterrupted / 'model'}",
        f"--config.data.files={files / 'train.jsonl'}", "--config.data.prompts_per_step=2",
        "--config.training.prompts_per_minibatch=2", "--config.rollout.group_size=2",
        "--config.rollout.max_prompt_tokens=192", "--config.rollout.max_response_tokens=16",
        "--config.training.micro_batch_size=4", "--config.training.num_steps=1",
        f"--config.evaluation.files={files / 'held.jsonl'}", "--config.evaluation.every_steps=0",
        "--config.shaping.target=none", "--config.hidden_states.source=none",
    )  # fmt: skip
    # A directory of a fine-tuning holds no run of launch.train, and the other way round.
    other = run(*arguments(files, tmp_path / "run"))
    assert_one_line(other, "holds a run with another config")


@pytest.mark.soak
def test_two_processes_train_the_same_model(files, uninterrupted, tmp_path):
    port = free_port()
    place = (
        "--config.distributed.num_processes=2",
        f"--config.distributed.coordinator=127.0.0.1:{port}",
    )
    found = finish(
        [
            start(
                *arguments(files, tmp_path / "run", *place),
                f"--config.distributed.process_id={index}",
            )
            for index in range(2)
        ]
    )
    assert [code for code, _, _ in found] == [0, 0], found
    params = [
        models.load_params(path / "model", models.load_config(path / "model"))
        for path in (tmp_path / "run", uninterrupted)
    ]
    # The sums over two data shards round differently, in six steps of AdamW.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), *params)


@slow
def test_a_command_with_nothing_to_train_is_named(tmp_path):
    place, plain = f"--workdir={tmp_path / 'run'}", "--config=configs/default.py"
    assert_each_is_one_line(
        "launch.sft",
        ([place, "--config=configs/gsm8k.py"], "nothing to train: name sft.files"),
        ([place, plain, "--config.sft.files=chats.jsonl"], "sft.files needs model.path; python"),
        imports=["semrl_jax.training.optimizer"],  # which the check of a config loads
    )
    assert not (tmp_path / "run").exists()
