"""Every command begins a prompt alike, says so, and refuses a tokenizer of another model."""

import json
import pathlib
import types

import pyarrow.parquet as pq
import pytest

from configs import default
from semrl_jax import data
from semrl_jax.evaluation.problems import load_problems
from semrl_jax.jobs import chat, evaluate, generate
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs import fine_tune, train
from semrl_jax.runs.dry_run import dry_run, dry_run_sft
from semrl_jax.runs.policies import find_policies
from semrl_jax.runs.workdir import check_workdir, open_workdir
from semrl_jax.sampling.prompt_sources import check_prompts, prompts_of_files, training_prompts
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.data.test_encoding import make_tokenizer, write
from tests.fixtures import save_model
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")

TEMPLATE = "Q: {input}\nA:"
LINE = f"template {TEMPLATE!r}, <s> before it (tokenizer's default)"
QUESTIONS = [f"1+{n}=" for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory with a random Llama whose tokenizer adds <s>."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizers"))
    save_model(directory, tokenizer, model_type="llama", max_position_embeddings=128)
    return directory


@pytest.fixture
def files(tmp_path):
    rows = [
        {"question": q, "answer": "2", "prompt": f"{q}\n", "completion": "2"} for q in QUESTIONS
    ]
    return (str(write(tmp_path / "sums.jsonl", rows)),)


@pytest.fixture
def config(model, files):
    config = tiny_config()
    config.model.path = str(model)
    config.data.task = "files"
    config.data.files = config.evaluation.files = config.sft.files = files
    config.data.template = config.sft.template = TEMPLATE
    config.sft.row_format, config.sft.max_tokens = "prompt_completion", 64
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 32, 16
    config.evaluation.num_problems, config.training.num_steps = 2, 1
    return config


@pytest.mark.parametrize("added", [True, False])
def test_every_use_of_a_prompt_has_the_same_tokens(config, added, capsys):
    config.data.add_special_tokens = config.sft.add_special_tokens = added
    policy, tokenizer = build_policy(config)
    texts = [TEMPLATE.replace("{input}", question) for question in QUESTIONS]
    expected = tokenizer(texts, add_special_tokens=added)["input_ids"]
    assert (expected[0][0] == tokenizer.bos_token_id) == added
    for prompts in (
        training_prompts(config, tokenizer, print).examples,
        prompts_of_files(config, tokenizer, print).examples,
        load_problems(config, tokenizer, print),
    ):
        found = [prompt.prompt_ids.tolist() for prompt in prompts]
        assert found == expected[: len(found)] and len(found) in (2, 6)
    parts = types.SimpleNamespace(config=config, policy=policy, tokenizer=tokenizer)
    conversation = chat.Conversation.__new__(chat.Conversation)
    conversation._inference, conversation._template, conversation._turns = parts, TEMPLATE, []
    assert conversation._prompt_ids(QUESTIONS[0]).tolist() == expected[0]
    reader = data.conversation_reader(
        tokenizer, row_format="prompt_completion", prompt_fields=("question",),
        template=TEMPLATE, add_special_tokens=added,
    )  # fmt: skip
    loaded = data.load_conversations(config.sft.files, tokenizer, reader)
    whole = tokenizer([f"{text}2" for text in texts], add_special_tokens=added)["input_ids"]
    for conversation, ids in zip(loaded.conversations, whole, strict=True):
        assert conversation.token_ids.tolist() == [*ids, tokenizer.eos_token_id]
    check_prompts("evaluation", prompts, config, tokenizer, policy.config.vocab_size, print)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"evaluation prompts: template {TEMPLATE!r}, ")
    assert ("data.add_special_tokens=False" in told) == (not added)


def damaged(model, directory, *, special):
    """The model with a token far beyond its vocabulary."""
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    if special:
        rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content["added_tokens"].append({"id": 900, "content": "<x>", "special": True} | rest)
    content["model"]["vocab"]["<x>" if special else "@"] = 900
    file.write_text(json.dumps(content))
    return directory


COMMANDS = {
    "train": lambda config, source, out: train(config, str(out)),
    "train --dry_run": lambda config, source, out: dry_run(config, str(out)),
    "sft": lambda config, source, out: fine_tune(config, str(out)),
    "sft --dry_run": lambda config, source, out: dry_run_sft(config, str(out)),
    "evaluate": lambda config, source, out: evaluate.evaluate(config, [source], out),
    "evaluate --dry_run": lambda config, source, out: evaluate.evaluate(
        config, [source], out, only_check=True
    ),
    "generate": lambda config, source, out: generate.generate(
        config, source, out, generate.Contents()
    ),
    "generate --dry_run": lambda config, source, out: generate.generate(
        config, source, out, generate.Contents(), only_check=True
    ),
}


@pytest.mark.parametrize("command", [*COMMANDS, "chat"])
def test_a_tokenizer_beyond_the_vocabulary_is_refused_at_the_start(
    command, config, model, tmp_path
):
    """A word of it before any prompt is read; a special token, with the first text that has it."""
    (tmp_path / "damaged").mkdir()
    config.model.path = str(damaged(model, tmp_path / "damaged", special=False))
    (source,) = find_policies(config.model.path, None)
    run = COMMANDS.get(command, lambda *arguments: chat.chat(config, source, chat.Options()))
    with pytest.raises(UserError, match=r"vocab_size=\d+, such as '@' with id 900") as caught:
        run(config, source, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    if command == "chat":
        return  # test_chat.py asks a question
    damaged(model, tmp_path / "damaged", special=True)
    rows = [{"question": f"1<x>{n}", "answer": "2"} for n in range(6)]
    rows = [row | {"prompt": row["question"], "completion": "2"} for row in rows]
    write(pathlib.Path(config.data.files[0]), rows)
    with pytest.raises(
        UserError, match=r"0 of .* has the token '<x>' with id 900, beyond"
    ) as caught:
        run(config, source, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_run_from_before_the_default_is_resumed_if_its_data_are_the_same(config, tmp_path):
    """The default was False. With a tokenizer that adds nothing, both mean the same."""
    config.data.add_special_tokens = False
    open_workdir(str(tmp_path / "run"), config).close()
    config.data.add_special_tokens = True
    workdir = open_workdir(str(tmp_path / "run"), config)
    assert workdir.changed == ("data.add_special_tokens: False -> True",)
    workdir.check_inputs({"data": "a"})
    since = "began with other data .*; changed since: data.add_special_tokens: False -> True"
    refused(since, workdir.check_inputs, {"special tokens before a prompt": "1", "data": "b"})
    workdir.close()
    refused(since, check_workdir, str(tmp_path / "run"), config, {"data": "b"})


@pytest.mark.slow
def test_commands_say_and_record_how_prompts_begin(config, model, tmp_path, capsys):
    bos = data.load_tokenizer(model).bos_token_id
    assert train(config, str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert f"training prompts: {LINE}" in out and f"evaluation prompts: {LINE}" in out
    recorded = json.loads((tmp_path / "run" / "inputs.json").read_text())
    assert recorded["special tokens before a prompt"] == str(bos)
    rows = [
        pq.read_table(file, columns=["prompt_ids"]).to_pylist()
        for file in (tmp_path / "run" / "rollouts").glob("*.parquet")
    ]
    assert rows and {row["prompt_ids"][0] for table in rows for row in table} == {bos}

    (source,) = find_policies(str(model), None)
    plain = default.get_config()
    plain.evaluation.files = config.evaluation.files
    plain.data.update({"task": "files", "files": config.data.files})
    plain.rollout.max_prompt_tokens, plain.rollout.max_response_tokens = 32, 8
    plain.evaluation.n = 1
    assert evaluate.evaluate(plain, [source], tmp_path / "evaluated") == 0
    assert "evaluation prompts: template 'plain', <s> before it" in (capsys.readouterr().out)
    record = json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())
    (benchmark,) = record["benchmarks"].values()
    assert benchmark["template"] == "plain"
    assert benchmark["special tokens before a prompt"] == [bos]

    generate.generate(plain, source, tmp_path / "generated", generate.Contents())
    assert "generation prompts: template 'plain', <s> before it" in (capsys.readouterr().out)
    record = json.loads((tmp_path / "generated" / "generation.json").read_text())
    assert record["template"] == "plain" and record["special_tokens_before_a_prompt"] == [bos]
    (file,) = (tmp_path / "generated").glob("responses.parquet")
    assert {ids[0] for ids in pq.read_table(file)["prompt_ids"].to_pylist()} == {bos}

    questions = iter(["1+1="])
    chat.chat(plain, source, chat.Options(), lambda: next(questions, "/quit"))
    assert "prompts: template 'plain', <s> before it" in capsys.readouterr().out

    config.sft.num_steps = 1
    assert fine_tune(config, str(tmp_path / "tuned")) == 0
    assert f"conversations: {LINE}" in capsys.readouterr().out
    recorded = json.loads((tmp_path / "tuned" / "inputs.json").read_text())
    assert recorded["special tokens before a prompt"] == str(bos)
