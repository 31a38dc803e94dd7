"""Prompt templates: the text around a question, in training and evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.errors import UserError

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

TEMPLATES = {
    "plain": "{input}",
    "abel": "Question:\n{input}\nAnswer:\nLet's think step by step.\n",
    "qwen-boxed": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{{input}}\n{_BOXED}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "qwen25-math-cot": (
        f"<|im_start|>system\n{_BOXED}<|im_end|>\n"
        "<|im_start|>user\n{input}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "mathstral": f"{{input}}\n{_BOXED}",
    "direct": "Question: {input}\nAnswer: ",
    "cot": "Question: {input}\nAnswer: ",
    "deepseek-math": f"User: {{input}}\n{_BOXED}\n\nAssistant:",
    "mistral": "[INST] {input}[/INST]",
    "numina": "### Problem: {input}\n### Solution:",
}

CHAT = "chat"
MAX_TEMPLATE_CHARS = 2**20
_QUESTION = "{input}"

# Replaces the function with which some chat templates write today's date. With another date, a
# resumed run would have other prompts. This is the default date of Llama 3's template.
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    "|replace('%d', '26')|replace('%m', '07')|replace('%b', 'Jul')|replace('%B', 'July')"
    "|replace('%Y', '2024')|replace('%y', '24')|replace('%A', 'Friday')|replace('%a', 'Fri') }}"
    "{%- endmacro -%}"
)


def _template_text(template: str, field: str) -> str:
    """The text of a template; the question replaces the first {input} in it.

    Args:
      template: a name from `TEMPLATES`; a text that contains {input}; or the path of a UTF-8 file
        with such a text. One line break at the end of the file is not part of the text.
      field: the beginning of error messages.

    Raises:
      UserError: if it is none of these.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    if _QUESTION in template:
        return template
    if not os.path.isfile(template):
        raise UserError(
            f"{field} is unknown; choose from {sorted([*TEMPLATES, CHAT])}, or give a text that "
            "contains {input} or the path of a file with such a text."
        )
    text = _read_text(template, field)
    if _QUESTION not in text:
        raise UserError(f"{field}: the file must contain {{input}}.")
    return text.removesuffix("\n")


def _read_text(path: str, field: str) -> str:
    """The text of a template file; UserError, beginning with the field, if it has none."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{field} cannot be read: {error}.") from None
    if not text or len(text) > MAX_TEMPLATE_CHARS:
        raise UserError(f"{field}: the file must have 1 to {MAX_TEMPLATE_CHARS} characters.")
    return text


def is_chat(template: str) -> bool:
    """Whether the template is the tokenizer's chat template, which writes all special tokens."""
    return template == CHAT or template.startswith(f"{CHAT}:")


def chat_template_text(tokenizer: Tokenizer) -> str:
    """The tokenizer's chat template, which must exist; today's date in it is 26 July 2024."""
    text = tokenizer.get_chat_template()
    return _FIXED_DATE + text if "strftime_now" in text else text


def set_chat_template(tokenizer: Tokenizer, path: str, field: str) -> None:
    """Gives the tokenizer the chat template of a UTF-8 file, a Jinja template.

    Args:
      tokenizer: changed; a directory that it is saved to has the template.
      path: of the file.
      field: the setting that names the file, for error messages.

    Raises:
      UserError: if the file cannot be read, or is empty or too long.
    """
    tokenizer.chat_template = _read_text(path, f"{field}={path!r:.200}")


def prompt_renderer(
    template: str, tokenizer: Tokenizer, *, system_prompt: str = "", field_prefix: str = "data."
) -> Callable[[Sequence[str]], list[str]]:
    """Makes the function from questions to prompt texts.

    Args:
      template: see `_template_text`; or "chat", the tokenizer's chat template with the question as
        the user's message, up to the place where the assistant's message begins; or "chat:TEXT",
        the same with TEXT, another template, as the message. A chat template that asks for today's
        date gets 26 July 2024.
      tokenizer: only its chat template is used.
      system_prompt: the message before the user's, for "chat" only; "" is no message.
      field_prefix: stands before "template" in error messages.

    Raises:
      UserError: if the template is unknown, if the tokenizer has no chat template or its template
        refuses these messages, or for a system prompt without "chat".
    """
    field = f"{field_prefix}template={template!r:.200}"
    if not is_chat(template):
        text = _template_text(template, field)
        if system_prompt:
            raise UserError(
                f"{field} takes no data.system_prompt={system_prompt!r:.200}; choose the template "
                "'chat', or leave the system prompt out."
            )
        return lambda questions: [text.replace(_QUESTION, question, 1) for question in questions]
    text = _QUESTION
    if template != CHAT:
        text = _template_text(template.removeprefix(f"{CHAT}:"), f"{field}: what follows '{CHAT}:'")
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{field}, but the tokenizer has no chat template; choose from "
            f"{sorted(TEMPLATES)}, or give a text that contains {{input}}."
        )
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def render(questions: Sequence[str]) -> list[str]:
        if not questions:
            return []
        messages = [
            [*system, {"role": "user", "content": text.replace(_QUESTION, question, 1)}]
            for question in questions
        ]
        try:
            return tokenizer.apply_chat_template(
                messages,
                chat_template=chat_template_text(tokenizer),
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as e:  # a chat template is a program, which may fail in any way
            reason = " ".join(str(e).split())[:200]
            roles = "a system and a user message" if system else "one user message"
            raise UserError(
                f"{field}: the tokenizer's chat template refuses {roles} ({reason}); choose "
                f"another template{' or no system prompt' if system else ''}."
            ) from e

    render(["1"])  # so that a template that refuses is named before any file is read
    return render
