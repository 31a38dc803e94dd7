"""Files with one flipped byte: they are read, or refused in one line; no damage is a traceback."""

import contextlib
import functools
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax import data, models
from semrl_jax.analysis.runs import find_steps, read_responses
from semrl_jax.analysis.states import OPTIONAL, read_arrays
from semrl_jax.evaluation.samples import read_samples
from semrl_jax.jobs import score, view
from semrl_jax.models import peft
from semrl_jax.models.directory import check_params
from semrl_jax.pages.report import page, reading
from semrl_jax.pages.report.recorded_responses import samples
from semrl_jax.pages.report.several_runs import paired
from semrl_jax.sampling.replicas import read_addresses
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import KEYS
from tests.cases import refused
from tests.evaluation.making import make_sample, write_samples
from tests.fixtures import random_params
from tests.jobs.test_view import write_samples as write_responses
from tests.models.test_lora import CONFIG, LORA, POLICY, trained
from tests.pages.report.making import make_run
from tests.tiny import tiny_config

QUESTIONS = [{"question": f"What is {i} + {i}? 求和", "answer": 2 * i} for i in range(20)]


def load_conversations(file):
    tokenizer = data.character_tokenizer()
    reader = data.conversation_reader(tokenizer, row_format="prompt_completion")
    return data.load_conversations([file], tokenizer, reader)


def read_everything(file):
    """Rows of training data, with their columns and without."""
    tokenizer = data.character_tokenizer()
    for keep_columns in (False, True):
        with contextlib.suppress(UserError):
            reader = data.row_reader(keep_columns=keep_columns)
            data.load_prompts(file, tokenizer, reader, skip_bad_rows=True)
    return data.load_prompts(file, tokenizer)


def read_recorded(file):
    """Recorded responses of a step, as each command reads them."""
    run = file.parent.parent
    logs = reading.read_runs([run, run.with_name("other")])
    page.page(page.figures(logs), samples(logs))
    paired(logs)
    with contextlib.suppress(UserError):
        view.read_responses(file)
    return read_responses(file, KEYS)


def read_run(file):
    """The records of a run."""
    with contextlib.suppress(UserError):
        find_steps(file.parent)
    logs = reading.read_runs([file.parent], may_be_empty=True)
    return page.figures(logs)


def score_rows(file):
    return score.check_rows(file, score.Fields("question", "answer"), takes_row=True)


def read_model(file):
    config = models.load_config(file.parent)
    models.eos_token_ids(file.parent)
    check_params(file.parent, config)
    return models.load_params(file.parent, config)


def read_adapter(file):
    base = file.parent.parent / "base"
    return peft.load_adapter(peft.find_adapter(file.parent), CONFIG, base, "base")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pairs of a file and the function that reads it."""
    root = tmp_path_factory.mktemp("damage")
    for suffix in (".jsonl", ".parquet"):
        _write_rows(root / f"rows{suffix}", QUESTIONS)
    talk = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(9)]
    _write_rows(root / "conversations.jsonl", talk)
    config = tiny_config()
    for name in ("run", "other"):
        make_run(root / name, config)
    params = random_params(POLICY)
    models.save_directory(root / "base", params, CONFIG, data.character_tokenizer())
    peft.save_adapter(root / "adapter", trained(), LORA, CONFIG, root / "base", "base")
    write_samples(root / "samples.parquet", [make_sample(i, 0) for i in range(8)])
    states = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    np.savez(root / "states.npz", hidden_states=states)
    write_responses(root / "responses.parquet", ["12", "3 4"] * 4)
    arrays = functools.partial(read_arrays, optional=OPTIONAL)
    recorded = sorted((root / "run" / "rollouts").iterdir())
    return [
        (root / "rows.jsonl", read_everything),
        (root / "rows.parquet", read_everything),
        (root / "rows.jsonl", score_rows),
        (root / "rows.parquet", score_rows),
        (root / "conversations.jsonl", load_conversations),
        (root / "samples.parquet", read_samples),
        (root / "states.npz", arrays),
        (root / "responses.parquet", view.read_responses),
        *((file, read_recorded) for file in recorded[:1] + recorded[-1:]),
        *((root / "run" / name, read_run) for name in ("config.json", "metrics.jsonl")),
        *((root / "base" / name, read_model) for name in ("config.json", "model.safetensors")),
        (root / "base" / "generation_config.json", read_model),
        *((file, read_adapter) for file in sorted((root / "adapter").iterdir())),
        *(
            (root / "base" / name, lambda file: data.load_tokenizer(file.parent))
            for name in ("tokenizer.json", "tokenizer_config.json")
        ),
    ]  # fmt: skip


def _write_rows(file, rows):
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    rows = [row | {"prompt": [{"role": "user", "content": row["question"]}]} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), file)


def check_flips(files, numbers):
    for number in numbers:
        file, read = files[number % len(files)]
        content = file.read_bytes()
        random = np.random.default_rng(number)
        # Most of the bytes of a binary file are values; damage of its header and footer is rarer.
        place = int(random.integers(len(content)))
        if random.random() < 0.5:
            place = int(random.choice([place % 400, -1 - place % 400])) % len(content)
        damaged = bytearray(content)
        damaged[place] ^= int(random.integers(1, 256))
        file.write_bytes(damaged)
        case = f"{file.name}, byte {place} is {damaged[place]}, read by {read}"
        try:
            read(file)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, case
        except Exception as error:
            raise AssertionError(f"{case}: {error!r:.200}") from error
        finally:
            file.write_bytes(content)


def test_a_flipped_byte_is_no_traceback(files):
    for file, read in files:
        read(file)
    check_flips(files, range(100))


def test_no_command_waits_for_a_pipe(tmp_path):
    models.save_directory(tmp_path, random_params(POLICY), CONFIG, data.character_tokenizer())
    os.mkfifo(tmp_path / "more.safetensors")
    os.mkfifo(tmp_path / "chat_template.jinja")
    tokenizer = data.character_tokenizer()
    for read in (
        lambda: models.weights_hash(tmp_path),
        lambda: models.weights_sample(tmp_path),
        lambda: data.load_tokenizer(tmp_path),
        lambda: data.set_chat_template(tokenizer, str(tmp_path / "chat_template.jinja"), "f"),
        lambda: read_addresses(str(tmp_path / "chat_template.jinja")),
        lambda: view.read_responses(tmp_path / "more.safetensors"),
        lambda: read_samples(tmp_path / "more.safetensors"),
    ):
        refused(r"is no regular file|is not a file", read)


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers", [range(100, 200), pytest.param(range(200, 1600), marks=pytest.mark.soak)], ids=str
)
def test_no_flipped_byte_is_a_traceback(files, numbers):
    check_flips(files, numbers)
