"""The code of docs/metrics.md does what the page says, and its tables name what there is."""

import pathlib
import re

import jax
import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from semrl_jax import metrics, models
from tests.oracles import metrics as oracle

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
CODE, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROMPT, RESPONSE = [5, 9, 2], [7, 30, 1, 1, 8, 19, 4, 22, 3, 11, 28, 6]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():  # a norm of ones would be hard to tell from none
        model.model.norm.weight.uniform_(0.2, 3.0)
    return model


@pytest.fixture(scope="module")
def measure():
    namespace = {}
    exec(CODE, namespace)
    return namespace["measure"]


@torch.no_grad()
def expected_rows(model):
    """The states whose logits produced the response, from the hidden layers by hand."""
    ids = torch.tensor([PROMPT + RESPONSE])
    seen = {}
    handle = model.model.norm.register_forward_hook(lambda _, __, out: seen.update(normed=out))
    logits = model(ids).logits
    handle.remove()
    rows = seen["normed"][0, len(PROMPT) - 1 : len(PROMPT) - 1 + len(RESPONSE)]
    # Only what went through the final norm, at these positions, gives these logits.
    torch.testing.assert_close(
        model.lm_head(rows), logits[0, len(PROMPT) - 1 : -1], rtol=1e-4, atol=1e-4
    )
    return rows.numpy()


def test_the_code_measures_the_states_that_produced_the_response(model, measure):
    assert len([line for line in CODE.splitlines() if line]) <= 10
    measured = measure(model, PROMPT, RESPONSE, stride=3, method="svd")
    rows = expected_rows(model)
    for name, metric in oracle.METRICS.items():
        np.testing.assert_allclose(measured[name], metric(rows), rtol=1e-4, err_msg=name)
    velocity, acceleration = oracle.orders(oracle.series(oracle.effective_rank, rows, 3, "exact"))
    # 1e-3: differences of ranks near 5 lose a digit.
    np.testing.assert_allclose(measured["effective_rank_velocity"], velocity, rtol=1e-3)
    np.testing.assert_allclose(measured["effective_rank_acceleration"], acceleration, rtol=1e-3)
    assert measured["effective_rank_acceleration_valid"] is True


def test_the_policy_of_this_project_has_the_same_states(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = models.load_config(tmp_path)
    ids = np.array([PROMPT + RESPONSE], np.int32)
    states = jax.jit(models.Policy(config).final_states)(
        models.load_params(tmp_path, config),
        ids,
        np.arange(ids.shape[1], dtype=np.int32)[None],
        np.ones_like(ids),
    )
    rows = np.asarray(states)[0, len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(rows, expected_rows(model), rtol=1e-3, atol=1e-4)


def test_every_public_name_is_on_the_page():
    documented = set(re.findall(r"`(\w+)", PAGE))
    missing = set(metrics.__all__) - documented - {"METHODS", "WINDOWS"}
    assert not missing
    for choice in (*metrics.METHODS, *metrics.WINDOWS, *metrics.METRICS):
        assert f"`{choice}`" in PAGE, choice
