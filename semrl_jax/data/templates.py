"""Prompt templates: the text around a question, the same in training and evaluation."""

from __future__ import annotations

from semrl_jax.errors import UserError

TEMPLATES = {
    "plain": "{input}",
    "abel": "Question:\n{input}\nAnswer:\nLet's think step by step.\n",
    "qwen-boxed": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n{input}\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
}


def apply_template(name: str, question: str) -> str:
    """Puts a question into a template.

    Args:
      name: a name from `TEMPLATES`, or a text of one's own that contains {input}.
      question: inserted as it is; braces in it mean nothing.

    Raises:
      UserError: if there is no template of that name.
    """
    template = TEMPLATES.get(name, name)
    if "{input}" not in template:
        raise UserError(
            f"data.template={name!r} is unknown; choose from {sorted(TEMPLATES)}, or give a text "
            "that contains {input}."
        )
    before, _, after = template.partition("{input}")
    return before + question + after
