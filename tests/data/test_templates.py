"""Templates, spelled out."""

import pytest

from semrl_jax.data import apply_template
from semrl_jax.errors import UserError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "What is {1}+{input}?"),
        ("abel", "Question:\nWhat is {1}+{input}?\nAnswer:\nLet's think step by step.\n"),
        (
            "qwen-boxed",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            "What is {1}+{input}?\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("Problem: {input}\\boxed{}", "Problem: What is {1}+{input}?\\boxed{}"),
    ],
)
def test_question_is_inserted_as_it_is(name, text):
    assert apply_template(name, "What is {1}+{input}?") == text


def test_unknown_name_is_the_users_error():
    with pytest.raises(UserError, match=r"data\.template='chat' is unknown; choose from \['abel'"):
        apply_template("chat", "1")
