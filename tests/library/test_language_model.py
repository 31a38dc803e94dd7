"""`LanguageModel`: samples, and what is computed of texts agrees with what sampling reports."""

import jax
import numpy as np
import pytest

import semrl_jax
from tests.cases import refused

QUESTION = "1+2="


@pytest.fixture(scope="module")
def model(chat_model):
    with semrl_jax.LanguageModel(chat_model) as found:
        yield found


def test_logprobs_and_states_are_those_of_the_sampling(model):
    found = model.generate([QUESTION, "7"], n=3, max_tokens=9, states=True)
    assert [len(responses) for responses in found] == [3, 3]
    for question, responses in zip([QUESTION, "7"], found):
        for response in responses:
            # Float32 sums in another order; states have a root mean square of 1.
            np.testing.assert_allclose(
                model.logprobs(question, response.token_ids), response.logprobs, atol=1e-5
            )
            states = model.hidden_states(question, response.token_ids)
            np.testing.assert_allclose(states, response.hidden_states, atol=5e-5)


def test_equal_calls_give_equal_responses(model):
    first, again, other = (
        [r.text for r in model.generate(QUESTION, n=4, max_tokens=8, seed=seed)[0]]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    greedy = model.generate(QUESTION, n=2, max_tokens=8, temperature=0)[0]
    assert greedy[0].text == greedy[1].text


def test_messages_are_rendered_by_the_chat_template(model):
    as_messages = model.encode([{"role": "user", "content": QUESTION}])
    np.testing.assert_array_equal(as_messages, model.encode(QUESTION))
    one = model.generate([{"role": "user", "content": QUESTION}], max_tokens=4)
    assert len(one) == 1 and one[0][0].text == model.generate(QUESTION, max_tokens=4)[0][0].text


def test_saved_and_changed_weights(model, tmp_path):
    model.save(tmp_path / "saved")
    with semrl_jax.LanguageModel(tmp_path / "saved") as other:
        before = other.logprobs(QUESTION, "34")
        np.testing.assert_array_equal(before, model.logprobs(QUESTION, "34"))
        (one,) = other.generate(QUESTION, max_tokens=6)
        other.params = jax.tree.map(lambda leaf: leaf * 1.5, other.params)
        assert (other.logprobs(QUESTION, "34") != before).any()
        (changed,) = other.generate(QUESTION, max_tokens=6)
        assert list(changed[0].logprobs) != list(one[0].logprobs)
        np.testing.assert_allclose(
            other.logprobs(QUESTION, changed[0].token_ids), changed[0].logprobs, atol=1e-5
        )


def test_a_wrong_prompt_is_one_line(model):
    refused(r"a prompt of [0-9]+ tokens; max_prompt_tokens=2048", model.generate, "1" * 3000)
    refused("model=nowhere is no run", semrl_jax.LanguageModel, "nowhere")
