"""Training with prompt files, a model directory and a user's verifier; mistakes are named."""

import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file, save_file

from semrl_jax.runs import train
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.fixtures import read_rows, save_chat_model, stable
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")

QUESTIONS = [f"Tom has {n} apples and buys {n + 3} more. How many are there?" for n in range(6)]


def write_problems(file, questions=QUESTIONS):
    """Rows in the format of GSM8K."""
    rows = [{"question": q, "answer": f"He has <<1+2=3>>so many.\n#### {3}"} for q in questions]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory with a random Qwen2 and a trained tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return save_chat_model(directory, QUESTIONS, max_position_embeddings=128)


@pytest.fixture
def problems(tmp_path):
    return write_problems(tmp_path / "apples.jsonl")


@pytest.fixture
def config(model, problems):
    config = tiny_config()
    config.model.path = str(model)
    config.data.task = "files"
    config.data.files = (str(problems),)
    config.data.answer_after = "####"
    config.data.template = "abel"
    config.evaluation.files = (str(problems),)
    config.evaluation.num_problems = 4
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_response_tokens = 32
    config.rewards.function = "tests.verifiers:by_length"
    config.rewards.timeout_s = 2.0
    return config


@pytest.mark.slow
def test_a_resumed_run_on_files_equals_an_uninterrupted_run(config, problems, tmp_path, capsys):
    config.training.num_steps = 2
    config.evaluation.metrics = True
    config.metrics.dataset_stride = 4
    # A too long problem is left out of training, and counts as wrong in the benchmark.
    write_problems(problems, ["why? " * 200, *QUESTIONS])
    config.evaluation.num_problems = 5
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert train(config, str(straight)) == 0
    named = [line for line in capsys.readouterr().out.splitlines() if "counts as wrong" in line]
    assert len(named) == 1 and "benchmark apples: " in named[0] and "line 1: " in named[0]
    config.training.num_steps = 1
    assert train(config, str(resumed)) == 0
    (tmp_path / "moved").mkdir()
    moved = problems.rename(tmp_path / "moved" / problems.name)  # only the content counts
    config.data.files = config.evaluation.files = (str(moved),)
    config.training.num_steps = 2
    assert train(config, str(resumed)) == 0
    assert "resumed" in capsys.readouterr().out
    # The last row of the first attempt has the last evaluation of a run.
    expected, actual = stable(read_rows(straight)), stable(read_rows(resumed))
    assert [row["step"] for row in actual] == [0, 1, 2]
    assert actual == expected
    first = expected[0]
    assert first["eval/apples/num_problems"] == 5
    assert 0 < first["reward/correct"] < 1  # by the user's verifier
    assert first["policy/grad_norm"] > 0
    for key in (
        "metrics/global/effective_rank", "metrics/cumulative/effective_rank_velocity",
        "metrics/cumulative/effective_rank_acceleration", "eval/apples/metrics/effective_rank/mean",
        "eval/apples/metrics/global/effective_rank", "eval/apples/mean_score", "advantage/max",
        "advantage/shaped/max", "prompt/length/max", "response/length_fraction/correct",
        "metrics/effective_rank/correct_max",
    ):  # fmt: skip
        assert np.isfinite(first[key]), key
    # Five warm-up updates, two per step; the rate is of the first mini-batch.
    rates = [row["policy/learning_rate"] for row in expected[:2]]
    np.testing.assert_allclose(rates, [1e-2 * 1 / 5, 1e-2 * 3 / 5], rtol=1e-6)


@pytest.mark.slow
def test_the_reference_may_be_bfloat16(config, tmp_path):
    config.training.num_steps = 1
    config.evaluation.every_steps = 0
    losses = {}
    for dtype in ("float32", "bfloat16"):
        config.model.reference_dtype = dtype
        assert train(config, str(tmp_path / dtype)) == 0
        losses[dtype] = read_rows(tmp_path / dtype)[0]
    # Only the reference is rounded to 8 bits: the results are close, but not equal.
    assert losses["bfloat16"]["policy/grad_norm"] == pytest.approx(
        losses["float32"]["policy/grad_norm"], rel=1e-2
    )
    assert losses["bfloat16"]["policy/kl"] != losses["float32"]["policy/kl"]


@pytest.mark.slow
def test_bad_rows_are_skipped_and_counted_if_configured(config, problems, tmp_path, capsys):
    with problems.open("a") as file:
        file.write('{"question": "no answer"}\n')
    with pytest.raises(UserError, match=r"apples.jsonl, line 7: field 'answer' is missing"):
        train(config, str(tmp_path / "run"))
    config.data.skip_bad_rows = True
    config.training.num_steps = 0
    config.evaluation.every_steps = 0
    assert train(config, str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "1 of 7 rows are bad and left out" in out and "line 7" in out
    assert "6 training prompts" in out


def spoil_model(model, tmp_path, tensors=None, **fields):
    """A copy of the model with other tensors (None removes) or config fields."""
    copy = tmp_path / f"spoilt{len(list(tmp_path.iterdir()))}"
    shutil.copytree(model, copy)
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content | fields))
    weights = load_file(copy / "model.safetensors") | (tensors or {})
    kept = {name: array for name, array in weights.items() if array is not None}
    save_file(kept, copy / "model.safetensors")
    return str(copy)


def test_a_model_that_cannot_be_used_is_named(config, model, tmp_path):
    without_norm = spoil_model(model, tmp_path, {"model.norm.weight": None})
    for kl_coefficient, path, message in (
        (0.001, without_norm, "model.norm.weight is missing"),
        (0.0, without_norm, "model.norm.weight is missing"),  # there is no reference to load
        (0.0, spoil_model(model, tmp_path, vocab_size=100), "do not belong together"),
        (
            0.0,
            spoil_model(model, tmp_path, max_position_embeddings=127),
            "must be at most the model's context of 127 tokens",
        ),
    ):
        config.algorithms.loss.kl_coefficient, config.model.path = kl_coefficient, path
        refused(message, train, config, str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def test_files_and_verifiers_that_cannot_be_used_are_named(config, problems, tmp_path):
    right = config.rewards.function
    for name, message in (
        ("missing", "cannot be imported"),
        ("nonsense", "invalid: score must be a number from"),
    ):
        config.rewards.function = f"tests.verifiers:{name}"
        refused(f"rewards.function=.*{message}", train, config, str(tmp_path / "run"))
    config.rewards.function = right
    long = json.dumps({"question": "x" * 500, "answer": "#### 1"})
    for text, message in (
        ('{"frage": "?"}', "line 1: field 'question' is missing"), (long, "max_prompt_tokens"),
    ):  # fmt: skip
        problems.write_text(text + "\n")
        refused(message, train, config, str(tmp_path / "run"))
    problems.unlink()
    refused(r"apples.jsonl.* does not exist", train, config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_changed_data_or_weights_of_another_shape_do_not_resume(config, model, tmp_path):
    config.training.num_steps = 0
    config.evaluation.every_steps = 0
    workdir = tmp_path / "run"
    assert train(config, str(workdir)) == 0
    config.data.files = (str(write_problems(tmp_path / "apples.jsonl", QUESTIONS[:5])),)
    refused("began with other data", train, config, str(workdir))
    assert (workdir / "config.json").exists()  # an existing run is kept


@pytest.mark.slow
def test_a_verifier_gets_the_rows_in_training_evaluation_and_a_resumed_run(
    config, tmp_path, capsys
):
    def write_rows(bonus=100.0):
        rows = [
            {"question": q, "answer": "#### 3", "bonus": bonus, "solvable": index < 2}
            for index, q in enumerate(QUESTIONS)
        ]
        path = tmp_path / "apples.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return (str(path),)

    config.data.files = config.evaluation.files = write_rows()
    # The difference of the two is the row's bonus, exactly.
    config.rewards.function = ""
    config.rewards.functions = ("tests.verifiers:by_row", "tests.verifiers:by_length:weight=-1")
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "run")) == 0
    first = read_rows(tmp_path / "run")[0]
    assert first["reward/min"] == first["reward/max"] == 100
    assert first["reward/by_row/mean"] == first["reward/by_length/mean"] + 100 > 100
    assert first["eval/apples/greedy_accuracy"] == 2 / 4
    config.training.num_steps = 2
    write_rows(bonus=200.0)
    refused("began with other columns of the data", train, config, str(tmp_path / "run"))
    write_rows()
    assert train(config, str(tmp_path / "run")) == 0
    assert read_rows(tmp_path / "run")[1]["reward/min"] == 100
    # Columns that no verifier takes may change.
    config.rewards.functions = ()
    config.rewards.function = "tests.verifiers:by_length"
    for num_steps, bonus in ((0, 1.0), (1, 2.0)):
        config.training.num_steps = num_steps
        write_rows(bonus)
        assert train(config, str(tmp_path / "plain")) == 0
    assert "columns of the data" not in (tmp_path / "plain" / "inputs.json").read_text()
