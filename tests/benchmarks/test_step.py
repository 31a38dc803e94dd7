"""The benchmark of a step: its floors compute the right thing, and its rounds run to a table."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import floors, real_model, step
from tests.cases import raised

SIZES = floors.Sizes(
    layers=2, width=16, inner=24, heads=4, kv_heads=2, vocab=50, theta=1e4, epsilon=1e-6,
    responses=4, prompt=3, response=11, micro=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def rank_promotion():
    """The floors run in a process of their own, in which it is allowed."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
def test_the_floor_of_generation_returns_the_log_probabilities_of_its_tokens():
    params = floors.init(SIZES)
    params = jax.tree.map(lambda leaf: 10 * leaf, params)  # otherwise nearly uniform
    prompts = jax.random.randint(jax.random.key(1), (4, 3), 0, 50)
    tokens, logprobs = floors.generate(params, prompts, jax.random.key(0), SIZES)
    ids = jnp.concatenate([prompts, tokens.T], axis=1)
    assert ids.shape == (4, 14)
    x = params["embed"][ids]
    for layer in params["layers"]:
        x, _, _ = floors.layer(layer, x, SIZES)
    states = floors.normed(x[:, 2:-1], params["norm"], SIZES)
    expected = jax.nn.log_softmax(states @ params["embed"].T)
    expected = jnp.take_along_axis(expected, tokens.T[..., None], -1)[..., 0]
    assert np.std(expected) > 0.3
    # float32 rounding of about 50 exponentials and two layers
    np.testing.assert_allclose(logprobs.T, expected, atol=2e-5)


@pytest.mark.slow
def test_the_floor_samples_every_token_as_often_as_its_probability():
    logits = 2 * jax.random.normal(jax.random.key(0), (1, 50))
    draws = 20_000
    rows = jnp.broadcast_to(logits, (draws, 50))
    tokens, _ = jax.jit(floors.sample)(rows, jax.random.key(1))
    counts = np.bincount(tokens, minlength=50)
    expected = draws * np.asarray(jax.nn.softmax(logits[0]), np.float64)
    # Chi-square with 49 degrees of freedom has mean 49 and standard deviation 9.9; five of them.
    assert np.sum((counts - expected) ** 2 / expected) < 49 + 50


def test_ratios_per_token_divide_by_the_tokens_of_each_system():
    ours = {"step_s": 2.0, "rollout_s": 1.0, "update_s": 1.0, "cpu_s": 4.0, "num_tokens": 100}
    rows = {"ours": [ours], "generate": [{"rollout_s": 3.0, "num_tokens": 200}]}
    assert "| transformers' generate / ours |  | 3.000 [3.000, 3.000] |  |  |" in step.ratios(rows)
    assert "|  | 1.500 [1.500, 1.500] |  |  |" in step.ratios(rows, per_token=True)


def test_the_floor_of_a_real_model_is_its_products_at_the_measured_rate(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 4, "intermediate_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10, "rope_theta": 1e4,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 64,
        "hidden_act": "silu",
    }))  # fmt: skip
    about = real_model.floor_flops(str(tmp_path), [3, 5], 4)
    layer = 4 * (2 * 4 + 2 * 2 + 3 * 8)  # queries and outputs, keys and values, feed-forward
    assert about == {"fixed_flops": 2 * 3 * layer * 4, "token_flops": 2 * 3 * layer + 2 * 40}
    flops = about["fixed_flops"] + 7 * about["token_flops"]
    row, rate = {"num_tokens": 7}, {"gflops": 1e-9}
    assert step.floor_s("rollout_s", row, rate, about) == flops
    assert step.floor_s("update_s", row, rate, about) == 3 * flops


def test_problems_of_a_file_are_read_in_order_and_must_suffice(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "1?", "answer": "1"}\n{"problem": "2?"}\n{"problem": "3?"}\n')
    assert real_model.questions(file, 2) == ["1?", "2?"]
    raised(SystemExit, "has 3 problems; 4 are needed", real_model.questions, file, 4)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the tests: 8 devices
    monkeypatch.setattr(step, "MODEL", {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1,
        "num_heads": 2, "num_kv_heads": 1, "context": 256,
    })  # fmt: skip


@pytest.mark.soak
def test_a_model_of_a_directory_is_measured_per_token(small, monkeypatch, tmp_path, capsys):
    model = tmp_path / "mine"
    step.make_model(model)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.argv", [
        "step", f"--model={model}", "--systems", "ours", "plain", "floors", "--pairs=1",
        "--warmup=1", "--response-tokens=24", f"--directory={tmp_path / 'kept'}",
    ])  # fmt: skip
    step.main()
    text = capsys.readouterr().out
    for row in ("| Ratio of seconds per response token | ", "at most 24 to each", "| ours | "):
        assert row in text, row


@pytest.mark.soak
def test_rounds_of_ours_and_the_floors_become_a_result(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step, "RESPONSE_TOKENS", 24)
    monkeypatch.setattr(step, "NUM_TOKENS", 8 * 8 * 24)
    file = tmp_path / "step.json"
    monkeypatch.setattr("sys.argv", [
        "step", "--systems", "ours", "floors", "--pairs=1", "--warmup=1", f"--json={file}",
        f"--directory={tmp_path / 'kept'}", "--set", "metrics.stride=6",
    ])  # fmt: skip
    step.main()
    text = json.loads(file.read_text())["text"]
    for row in ("| ours | ", "| plain JAX | ", "| `time/update_s` | ", "rate of products"):
        assert row in text, row
