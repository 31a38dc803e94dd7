"""launch.random_model: a small model made from a user's own text."""

import functools
import json

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from tests.launch.conftest import run, succeed
from tests.launch.test_bad_input import assert_each_is_one_line, assert_one_line


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [
        {"question": f"What is {n}\u2028plus {n}?", "answer": {"steps": ["#### 2"]}} for n in "12"
    ]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_the_directory_holds_a_working_model(text, tmp_path):
    output = tmp_path / "model"
    succeed("launch.random_model", f"--text={text}", f"--output={output}", "--vocab_size=270")
    config, tokenizer = models.load_config(output), data.load_tokenizer(output)
    assert config.vocab_size == len(tokenizer) <= 270
    params = models.load_params(output, config)
    expected = models.Policy(config).init(jax.random.key(0))
    # Equal up to rounding, because the two processes compile with different options.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, params, jax.device_get(expected))
    again = run("launch.random_model", f"--text={text}", f"--output={output}")
    assert_one_line(again, "is there already; name a new directory")
    (tmp_path / "empty.jsonl").write_text("")
    empty = run("launch.random_model", f"--text={tmp_path}/empty.jsonl", f"--output={tmp_path}/no")
    assert_one_line(empty, "/empty.jsonl has no text to train the tokenizer on")
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_mistakes_are_named(text, tmp_path):
    output, given = f"--output={tmp_path / 'model'}", f"--text={text}"
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n{')
    assert_each_is_one_line(
        "launch.random_model",
        ([output], "--text is needed"),
        ([given], "--output is needed"),
        ([output, "--text=/nowhere.jsonl"], "/nowhere.jsonl"),
        ([output, given, "--num_heads=3"], "--num_heads=3 must divide --hidden_size=64"),
        ([output, given, "--num_heads=0"], "--num_heads=0 must divide"),
        ([output, given, "--seed=99999999999999999999"], "--seed=99999999999999999999"),
        ([output, given, "--context=0"], "max_position_embeddings=0 must be"),
        ([output, f"--text={tmp_path}/bad.jsonl"], "line 2: not valid JSON"),
        imports=["semrl_jax.models", "semrl_jax.data"],
    )
    assert not (tmp_path / "model").exists()
