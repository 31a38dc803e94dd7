"""launch.prepare_data: conversion of files, a local hub server, and no network."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from launch import prepare_data
from launch.prepare_data import DATASETS, with_progress, write_rows
from semrl_jax.data import load_prompts, row_reader
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.launch.conftest import ROOT, run
from tests.launch.test_bad_input import assert_each_is_one_line, assert_one_line

GSM8K = [
    {"question": "1+1?", "answer": "It is 2.\n#### 2", "idx": 0},
    {"question": "no mark", "answer": "2", "idx": 1},
    {"question": "600*2?", "answer": "#### 1,200", "idx": 2},
]
SIMPLERL = [
    {
        "data_source": "simplelr_qwen",
        "prompt": [{"role": "user", "content": f"Q:{i}\nA:"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": i, "question": "é"},
    }
    for i, truth in enumerate(["2", "", "4"])
]


@pytest.fixture(scope="module")
def tokenizer():
    from semrl_jax.data import character_tokenizer

    return character_tokenizer()


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(name, output, *flags, **env):
    flags = (f"--dataset={name}", f"--output={output}", *flags)
    return run("launch.prepare_data", *flags, env=env)


def test_gsm8k_keeps_question_and_answer_as_published(tokenizer, tmp_path):
    source = write(tmp_path / "source.jsonl", GSM8K)
    output = tmp_path / "made" / "gsm8k.parquet"
    result = prepare("gsm8k", output, f"--input={source}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    bad, summary, usage = result.stdout.splitlines()
    assert bad.startswith(f"bad row skipped: {source}, line 2: field 'answer' has no answer")
    assert summary == f"2 rows of {source} written to {output}; 1 bad rows left out."
    assert usage == (
        f"Flags: --config.data.task=files --config.data.files={output} "
        "--config.data.row_format=question_answer --config.data.answer_after='####'"
    )
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    dataset = load_prompts(output, tokenizer, row_reader(answer_after="####"))
    assert [(e.prompt, e.answer, e.data_source) for e in dataset.examples] == [
        ("1+1?", "2", "gsm8k"),
        ("600*2?", "1,200", "gsm8k"),
    ]


def test_simplerl_rows_stay_as_they_are(tokenizer, tmp_path):
    source = write(tmp_path / "train.parquet", SIMPLERL)
    output = tmp_path / "set.jsonl"
    output.write_text("older")
    result = prepare("simplelr_qwen_level3to5", output, f"--input={source}", "--split=test")
    assert result.returncode == 0, result.stderr
    flags = f"--config.evaluation.files={output} --config.data.row_format=simplerl"
    assert result.stdout.endswith(f"{flags}\n")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows == [SIMPLERL[0], SIMPLERL[2]]
    dataset = load_prompts(output, tokenizer, row_reader("simplerl"))
    assert [(e.prompt, e.answer) for e in dataset.examples] == [("Q:0\nA:", "2"), ("Q:2\nA:", "4")]


def test_parquet_has_the_columns_of_all_rows(tmp_path):
    write_rows(tmp_path / "a.parquet", [{"a": 1}, {"a": 2, "b": "x"}])
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.to_pydict() == {"a": [1, 2], "b": [None, "x"]}


def test_progress_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("launch.prepare_data.PROGRESS_S", -1.0)
    assert list(with_progress("abc", "read")) == ["a", "b", "c"]
    assert capsys.readouterr().out.splitlines()[1:] == ["1 rows read", "2 rows read"]


@pytest.mark.slow
def test_mistakes_are_one_line_and_leave_nothing(tmp_path):
    source = write(tmp_path / "source.jsonl", GSM8K)
    output = tmp_path / "made.jsonl"
    mixed = write(
        tmp_path / "mixed.jsonl", [SIMPLERL[0], {**SIMPLERL[2], "ability": {"a": 1}}]
    )  # fmt: skip
    local, long_name = f"--input={source}", tmp_path / ("x" * 300 + ".jsonl")

    def of(name, output, *flags):
        return (f"--dataset={name}", f"--output={output}", *flags)

    simplerl = "simplelr_abel_level1to4"
    assert_each_is_one_line(
        "launch.prepare_data",
        (of("gsm9k", output, local), "--dataset='gsm9k' must be one of gsm8k, sim"),
        (of("gsm8k", tmp_path / "made.csv", local), "must be a file ending in .js"),
        (of("gsm8k", output, "--split=val"), "--split=val: value should be one"),
        (of("gsm8k", source, local), "is the input; name another file"),
        (of("gsm8k", source / "a.jsonl", local), "cannot be written"),
        (of("gsm8k", output, "--input=absent.jsonl"), "'absent.jsonl' does not ex"),
        (of("gsm8k", long_name, local), "cannot be written (File name too long)"),
        (of("gsm8k", output, f"--input={long_name}"), "cannot be opened (File na"),
        (["--dataset=gsm8k"], "--output is needed"),
        (
            of(simplerl, output, local),
            "all 3 rows are bad; the first:",
            "line 1: field 'prompt' is missing",
        ),
        (
            of(simplerl, tmp_path / "made.parquet", f"--input={mixed}"),
            "made.parquet cannot hold these rows",
            "try the other format",
        ),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed.jsonl", "source.jsonl"]


def test_without_network_the_file_to_fetch_is_named(tmp_path):
    output = tmp_path / "made.jsonl"
    wanted = "run 'hf download openai/gsm8k main/test-00000-of-00001.parquet --repo-type=dataset'"
    for env in (
        {"HF_HUB_OFFLINE": "1"},
        {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    ):
        env |= {"HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*"}
        result = run(
            "launch.prepare_data", "--dataset=gsm8k", f"--output={output}", "--split=test",
            env=env, timeout=15,
        )  # fmt: skip
        assert_one_line(result, wanted, "--input=FILE")
        assert not output.exists()


@pytest.fixture
def hub(tmp_path):
    """A hub server. Yields a dict from path to bytes, which it serves, and its environment."""
    files = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            content = files.get(self.path)
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            return content or b""

        def do_GET(self):
            self.wfile.write(self.do_HEAD())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "cache"),
        "NO_PROXY": "*",
    }
    yield files, env
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_fetches_from_the_hub_and_then_from_its_cache(hub, tmp_path):
    files, env = hub
    output = tmp_path / "made.jsonl"
    missing = prepare("gsm8k", output, **env)
    assert_one_line(missing, "cannot be fetched", "404", "hf download openai/gsm8k main/train-000")
    content = write(tmp_path / "served.parquet", GSM8K).read_bytes()
    files["/datasets/openai/gsm8k/resolve/main/main/train-00000-of-00001.parquet"] = content
    result = prepare("gsm8k", output, **env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("fetching main/train-00000-of-00001.parquet of openai/gsm8k\n")
    made = output.read_text()
    assert [json.loads(line)["answer"] for line in made.splitlines()] == [
        "It is 2.\n#### 2",
        "#### 1,200",
    ]
    output.unlink()
    result = prepare("gsm8k", output, **env | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    assert "taking the copy fetched earlier" in result.stdout
    assert output.read_text() == made


AMC24 = {"exam": "2024 AMC 12A", "problem_number": 1, "problem": "1+1?", "answer": "2"}


def prepare_benchmarks(name, output, monkeypatch, given=""):
    """In this process, so that the source can be replaced."""
    values = {"INPUT": SimpleNamespace(value=given), "SPLIT": SimpleNamespace(present=False)}
    for flag, value in values.items():
        monkeypatch.setattr(prepare_data, flag, value)
    return prepare_data.prepare_benchmarks(name, output)


def test_benchmarks_are_fetched_and_keep_their_rows(hub, tmp_path, monkeypatch, capsys):
    files, env = hub
    source = f"{env['HF_ENDPOINT']}/data/{{folder}}/test.jsonl"
    monkeypatch.setattr("semrl_jax.evaluation.benchmark_spec.SOURCE", source)
    files["/data/amc24/test.jsonl"] = f"{json.dumps(AMC24)}\n{{}}\n".encode()
    olymmath = {"problem": "1+1?", "answer": "2", "subject": "代数", "unique_id": "x"}
    files["/data/OlymMATH-ZH-EASY/test.jsonl"] = json.dumps(olymmath).encode()
    assert prepare_benchmarks("amc24,olymmath_zh_easy", tmp_path, monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("bad row skipped: ") and "line 2: field 'question' is m" in lines[1]
    assert lines[2] == (
        f"amc24: 1 rows written to {tmp_path}/amc24.jsonl, 1 bad rows left out; published are 45."
    )
    assert lines[-1] == (
        "Flags: --config.evaluation.benchmarks=amc24 --config.evaluation.benchmarks="
        f"olymmath_zh_easy --config.evaluation.data_dir={tmp_path}"
    )
    assert json.loads((tmp_path / "amc24.jsonl").read_text()) == AMC24
    assert json.loads((tmp_path / "olymmath_zh_easy.jsonl").read_text()) == olymmath
    with pytest.raises(UserError, match=r"aime24/test\.jsonl cannot be fetched \(HTTP Error 404"):
        prepare_benchmarks("aime24", tmp_path, monkeypatch)


def test_a_benchmark_is_converted_from_a_local_file(tmp_path):
    source = write(tmp_path / "source.jsonl", [AMC24] * 45)
    result = prepare("amc24", tmp_path / "made" / "amc24.parquet", f"--input={source}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    written = f"amc24: 45 rows written to {tmp_path}/made/amc24.parquet."
    assert result.stdout.splitlines()[0] == written
    assert pyarrow.parquet.read_table(tmp_path / "made" / "amc24.parquet").to_pylist()[0] == AMC24


def test_wrong_names_and_outputs_of_benchmarks(tmp_path, monkeypatch):
    def assert_refused(message, name, output, given=""):
        refused(message, prepare_benchmarks, name, output, monkeypatch, given)

    assert_refused("'amc42' is unknown; did you mean 'amc24'", "aime24,amc42", tmp_path)
    assert_refused("must be amc24.jsonl or amc24.parquet", "amc24", tmp_path / "a.jsonl")
    assert_refused("must be a directory for 5 benchmarks", "tiny", tmp_path / "tiny.jsonl")
    assert_refused("x.jsonl is one file, but --dataset names 5", "tiny", tmp_path, "x.jsonl")
    source = write(tmp_path / "amc24.jsonl", [AMC24])
    assert_refused("is the input; name another file", "amc24", tmp_path, str(source))
    monkeypatch.setattr("semrl_jax.evaluation.benchmark_spec.SOURCE", "http://127.0.0.1:9/{folder}")
    assert_refused("127.0.0.1:9/amc24 cannot be fetched .* pass --input=FILE", "amc24", tmp_path)


def test_help_needs_neither_jax_nor_the_hub():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "launch.prepare_data", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "python -m launch.prepare_data" in result.stdout
    assert all(name in result.stdout for name in DATASETS)
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "ml_collections" in loaded
    assert not loaded & {"jax", "huggingface_hub", "transformers", "pyarrow"}
