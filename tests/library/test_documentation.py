"""The examples of docs/library.md run, in their order, with a small random model."""

import pathlib
import re

import numpy as np
import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "library.md").read_text()
TRAIN, POLICY, EVALUATE, BY_HAND = re.findall(
    r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.mark.slow
def test_the_examples_of_the_page_run(chat_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smaller = {"runs/models/smollm2": str(chat_model), '"num_steps": 20': '"num_steps": 2'}

    def run(text, names):
        for whole, small in smaller.items():
            text = text.replace(whole, small)
        exec(compile(text, "page", "exec"), names)

    names = {}
    run(TRAIN, names)
    assert re.search(r"^1 [\d.]+$", capsys.readouterr().out, re.MULTILINE)
    run(POLICY, names)
    assert (tmp_path / "runs" / "sums-model" / "model.safetensors").exists()
    run(EVALUATE, names)
    assert (tmp_path / "runs" / "sums-evaluation" / "page.html").exists()


@pytest.mark.slow
def test_the_update_by_hand_raises_what_was_rewarded(chat_model):
    text = BY_HAND.replace("runs/models/smollm2", str(chat_model))
    text = text.replace('"68" in response.text', "response is responses[0]")  # one is right
    before, _, update = text.partition("optimizer = optax")
    names = {}
    exec(compile(before, "page", "exec"), names)
    model, responses = names["lm"], names["responses"]
    logprobs = [model.logprobs(names["question"], r.token_ids) for r in responses]
    _, scalars = names["loss"](model.params)
    assert float(scalars["policy/approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    exec(compile(f"optimizer = optax{update}".replace("1e-5", "1e-3"), "page", "exec"), names)
    changes = [
        float(np.mean(model.logprobs(names["question"], r.token_ids) - old))
        for r, old in zip(responses, logprobs)
    ]
    assert changes[0] > 0 > max(changes[1:])
    assert len([line for line in BY_HAND.splitlines() if line.strip()]) <= 46
