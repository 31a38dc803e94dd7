"""launch.generate and launch.score: files, numbers against transformers, resuming to the bit."""

import json
import re
import signal
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors import safe_open

from configs import default
from tests.fixtures import save_model
from tests.launch.conftest import ROOT, start, succeed
from tests.launch.test_bad_input import assert_each_is_one_line
from tests.old_formats import GENERATION, make_old

pytestmark = pytest.mark.slow
STUDY_PAGE = (ROOT / "docs" / "study.md").read_text()
TEMPERATURE = 0.8
NUM_PROMPTS, N, PER_CALL = 48, 2, 8
NUM_CALLS = NUM_PROMPTS * N // PER_CALL
FILES = ("responses.parquet", "states.index.json", "conversations.jsonl")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory with a random model and a file of prompts."""
    path = tmp_path_factory.mktemp("generate")
    save_model(path / "model", num_layers=2)
    rows = [{"question": f"{n}+{n}=", "answer": 2 * n, "level": n} for n in range(NUM_PROMPTS)]
    (path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(inputs, output, *more):
    return (
        f"--policy={inputs / 'model'}", f"--prompts={inputs / 'q.jsonl'}", f"--output={output}",
        "--max_prompt_tokens=16", "--max_response_tokens=24", f"--n={N}",
        f"--temperature={TEMPERATURE}", *more,
    )  # fmt: skip


EVERYTHING = (
    "--logprobs", "--metrics", "--hidden_states=1,-1", "--states=decode,prefill",
    "--states_dtype=float32", "--verifier=tests.verifiers:by_parity", "--conversations=correct",
    f"--config.evaluation.responses_per_call={PER_CALL}",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """The directory of a generation with everything that can be asked for."""
    output = tmp_path_factory.mktemp("generate") / "out"
    done = succeed("launch.generate", *command(inputs, output, *EVERYTHING))
    assert f"{NUM_PROMPTS * N} responses to {NUM_PROMPTS} prompts" in done.stdout
    return output


def read(output):
    return pq.read_table(output / "responses.parquet").to_pylist()


def states_of(output):
    """All tensors by name, through the index."""
    index = json.loads((output / "states.index.json").read_text())["weight_map"]
    found = {}
    for name, shard in index.items():
        with safe_open(output / shard, "np") as tensors:
            found[name] = tensors.get_tensor(name)
    return found


def test_every_prompt_has_its_responses_and_columns(undisturbed):
    rows = read(undisturbed)
    places = [(row["group_id"], row["sample_index"]) for row in rows]
    assert places == [(prompt, sample) for prompt in range(NUM_PROMPTS) for sample in range(N)]
    for row in rows:
        n = row["group_id"]
        assert (row["question"], row["reference"]) == (f"{n}+{n}=", str(2 * n))
        assert json.loads(row["row"])["level"] == n
        assert len(row["response_ids"]) == len(row["rollout_logprobs"]) == row["num_tokens"]
        assert row["finish_reason"] == ("eos" if row["num_tokens"] < 24 else row["finish_reason"])
        assert row["correct"] == ((len(row["response"]) + 2 * n) % 2 == 0)
    assert len({tuple(row["response_ids"]) for row in rows}) > NUM_PROMPTS
    assert np.isfinite([row["metrics/effective_rank"] for row in rows]).sum() > NUM_PROMPTS
    ended = [row for row in rows if row["finish_reason"] == "eos" and row["response"].strip()]
    chosen = [row for row in ended if row["correct"]]
    lines = (undisturbed / "conversations.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion"] for line in lines] == [row["response"] for row in chosen]
    assert 0 < len(chosen) < len(rows)
    record = json.loads((undisturbed / "generation.json").read_text())
    assert record["settings"]["evaluation.temperature"] == TEMPERATURE and record["versions"]["jax"]
    assert not (undisturbed / "parts").exists()
    assert len(list(undisturbed.glob("states-*.safetensors"))) == NUM_CALLS


def test_numbers_are_those_of_transformers(inputs, undisturbed):
    """Float32 is compared with float64; the engine's own tests have the same tolerance."""
    model = transformers.AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float64)
    states = states_of(undisturbed)
    assert len(states) == NUM_PROMPTS * (N + 1)
    for row in read(undisturbed)[:6]:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            out = model(torch.tensor([prompt + response]), output_hidden_states=True)
        logits = out.logits[0, len(prompt) - 1 : -1]
        for column, scale in (("rollout_raw_logprobs", 1.0), ("rollout_logprobs", TEMPERATURE)):
            expected = torch.log_softmax(logits / scale, -1)[torch.arange(len(response)), response]
            np.testing.assert_allclose(row[column], expected, atol=5e-5)
        assert row["mean_logprob"] == pytest.approx(np.mean(row["rollout_logprobs"]), abs=1e-6)
        both = torch.stack([out.hidden_states[1][0], out.hidden_states[-1][0]], dim=1)
        name = f"{row['group_id']}/{row['sample_index']}/decode"
        np.testing.assert_allclose(states[name], both[len(prompt) - 1 : -1], atol=5e-5)
        prefill = states[f"{row['group_id']}/prefill"]
        np.testing.assert_allclose(prefill, both[: len(prompt)], atol=5e-5)


@pytest.mark.soak
def test_a_generation_that_is_killed_and_stopped_has_the_same_files(inputs, undisturbed, tmp_path):
    output = tmp_path / "out"
    arguments = command(inputs, output, *EVERYTHING)
    kept: dict[str, int] = {}
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = start("launch.generate", *arguments)
        deadline = time.monotonic() + 100
        while len(parts_of(output)) <= len(kept) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert kept.items() <= parts_of(output).items()  # nothing is sampled twice
        kept = parts_of(output)
        assert 0 < len(kept) < NUM_CALLS
        if number == signal.SIGTERM:
            assert process.returncode == 75, err
            assert "SIGTERM: stopped; the same command continues" in out
    make_old(min((output / "parts").glob("*.parquet")), GENERATION)  # of an earlier release
    done = succeed("launch.generate", *arguments)
    assert f"{PER_CALL * len(kept)} of {NUM_PROMPTS * N} responses are there" in done.stdout
    shards = [file.name for file in sorted(undisturbed.glob("states-*"))]
    for name in (*FILES, *shards):
        assert (output / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert {file.name for file in output.iterdir()} == {file.name for file in undisturbed.iterdir()}


def parts_of(output):
    """Time of the last change of each part."""
    return {file.name: file.stat().st_mtime_ns for file in (output / "parts").glob("*.parquet")}


def test_offline_verdicts_are_those_of_the_generation(undisturbed, tmp_path):
    output = tmp_path / "graded.parquet"
    done = succeed(
        "launch.score", f"--samples={undisturbed / 'responses.parquet'}", f"--output={output}",
        "--verifier=tests.verifiers:by_parity", "--prefix=again_",
    )  # fmt: skip
    rows = pq.read_table(output).to_pylist()
    for name in ("correct", "score", "extracted", "boxed", "verifier_error"):
        assert [row[name] for row in rows] == [row[f"again_{name}"] for row in rows]
    correct = sum(row["correct"] for row in rows)
    assert f"{correct} ({100 * correct / len(rows):.2f}%)" in done.stdout
    kept, given = pq.read_table(output), pq.read_table(undisturbed / "responses.parquet")
    for name in given.column_names:
        if name.startswith("metrics/"):  # NaN where not valid
            np.testing.assert_array_equal(kept[name].to_numpy(), given[name].to_numpy())
        else:
            assert kept[name].equals(given[name]), name


def test_a_study_of_the_recorded_states(inputs, undisturbed, tmp_path):
    """The page's command. Entropies are those of transformers, in float64."""
    flags = re.search(r"python -m launch.analyze study --input=states (.*)\n", STUDY_PAGE)[1]
    flags = flags.replace("=POLICY", f"={inputs / 'model'}").replace("=study", f"={tmp_path}")
    done = succeed(
        "launch.analyze", "study", f"--input={undisturbed}", "--stride=4", *flags.split()
    )
    summary = " ".join(done.stdout.split())  # a long path wraps the line
    assert f"{NUM_PROMPTS * N} responses to {NUM_PROMPTS} prompts" in summary
    table = pq.read_table(tmp_path / "responses.parquet").to_pylist()
    model = transformers.AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float64)
    for row, measured in list(zip(read(undisturbed), table))[:6]:
        assert (row["group_id"], row["sample_index"]) == (
            measured["group_id"],
            measured["sample_index"],
        )
        with torch.no_grad():
            logits = model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits
        logprobs = torch.log_softmax(logits[0, len(row["prompt_ids"]) - 1 : -1], -1)
        expected = {
            "token_entropy": -(logprobs.exp() * logprobs).sum(-1).mean(),
            "confidence": -logprobs.topk(20).values.mean(),
            "mean_logprob": np.mean(row["rollout_raw_logprobs"]),
            "length": row["num_tokens"],
            "correct": row["correct"],
        }
        for name, value in expected.items():
            np.testing.assert_allclose(measured[name], value, atol=1e-4, err_msg=name)
    assert (tmp_path / "figure1.png").stat().st_size > 10_000
    prompts = pq.read_table(tmp_path / "prompts.parquet")
    assert len(prompts) == NUM_PROMPTS and "lidar" in prompts.column_names


def test_prompts_need_no_solutions_after_a_run_with_hints(inputs, tmp_path):
    config = default.get_config()
    config.rollout.hint_rounds = 3
    record = tmp_path / "config.json"
    record.write_text(json.dumps({"run_id": "a", "config": config.to_dict()}))
    of_run = f"--config={ROOT / 'configs' / 'recorded.py'}:{record}"
    done = succeed("launch.generate", of_run, *command(inputs, tmp_path / "out"), "--dry_run")
    assert "all checks passed" in done.stdout


def test_mistakes_are_named(inputs, undisturbed, tmp_path):
    given = command(inputs, tmp_path / "out")
    assert_each_is_one_line(
        "launch.generate",
        ((*given, "--conversations=correct"), "--conversations=correct needs --verifier"),
        ((*given, "--temperature=0"), "gives evaluation.n=2 equal responses"),
        ((*given, "--n=0"), "evaluation.n=0 must be"),
        ((*given, "--prompts=/no.jsonl"), "--prompts: prompt file '/no.jsonl' does not exist"),
        ((*given, "--states=prefill"), "--states needs layers"),
        ((*given, "--config.data.task=arithmetic"), "--config.data.task has no meaning"),
        ((*given, "--verifier=nobody"), "'nobody' must be 'package.module:name'"),
        (
            command(inputs, undisturbed, *EVERYTHING, "--top_k=3"),
            "holds responses with other evaluation.top_k (0, now 3)",
        ),
        imports=["semrl_jax.jobs.generate"],
    )
