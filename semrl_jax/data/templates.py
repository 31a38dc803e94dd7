"""Prompt templates: the text around a question, the same in training and evaluation."""

from __future__ import annotations

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

# Some chat templates write today's date. Prompts must not change from one day to the next, or a
# resumed run would find other data; so it is the date that Llama 3's template falls back to.
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    "|replace('%d', '26')|replace('%m', '07')|replace('%b', 'Jul')|replace('%B', 'July')"
    "|replace('%Y', '2024')|replace('%y', '24')|replace('%A', 'Friday')|replace('%a', 'Fri') }}"
    "{%- endmacro -%}"
)


def apply_template(name: str, question: str, *, field_prefix: str = "data.") -> str:
    """Puts a question into a template of text.

    Args:
      name: a name from `TEMPLATES`, or a text of one's own that contains {input}.
      question: inserted as it is; braces in it mean nothing.
      field_prefix: goes before "template" in messages.

    Raises:
      UserError: if there is no template of that name.
    """
    template = TEMPLATES.get(name, name)
    if "{input}" not in template:
        raise UserError(
            f"{field_prefix}template={name!r:.200} is unknown; choose from "
            f"{sorted([*TEMPLATES, CHAT])}, or give a text that contains {{input}}."
        )
    before, _, after = template.partition("{input}")
    return before + question + after


def is_chat(template: str) -> bool:
    """Whether the template is the tokenizer's own; its text then holds all special tokens."""
    return template == CHAT or template.startswith(f"{CHAT}:")


def prompt_renderer(
    template: str, tokenizer: Tokenizer, *, system_prompt: str = "", field_prefix: str = "data."
) -> Callable[[Sequence[str]], list[str]]:
    """Makes the function from questions to prompt texts.

    Args:
      template: see `apply_template`; or "chat", the tokenizer's own chat template around the
        question as the user's message, up to where the assistant's begins; or "chat:TEXT", the same
        around TEXT, whose {input} is the question. A chat template that asks for today's date is
        given 26 July 2024.
      tokenizer: only its chat template is used.
      system_prompt: the message before the user's, for "chat" only; "" is no message.
      field_prefix: goes before "template" in messages.

    Raises:
      UserError: if the template is unknown, the tokenizer has no chat template or it refuses these
        messages, or a system prompt is given without "chat".
    """
    field = f"{field_prefix}template={template!r:.200}"
    if not is_chat(template):
        apply_template(template, "", field_prefix=field_prefix)
        if system_prompt:
            raise UserError(
                f"{field} takes no data.system_prompt={system_prompt!r:.200}; choose the template "
                "'chat', or leave the system prompt out."
            )
        return lambda questions: [apply_template(template, question) for question in questions]
    text = "{input}" if template == CHAT else template.removeprefix(f"{CHAT}:")
    if "{input}" not in text:
        raise UserError(f"{field} must contain {{input}} after 'chat:'.")
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
            [*system, {"role": "user", "content": apply_template(text, question)}]
            for question in questions
        ]
        try:
            chat_template = tokenizer.get_chat_template()
            if "strftime_now" in chat_template:
                chat_template = _FIXED_DATE + chat_template
            return tokenizer.apply_chat_template(
                messages,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as e:  # a template is a program: it may end in any
            reason = " ".join(str(e).split())[:200]
            roles = "a system and a user message" if system else "one user message"
            raise UserError(
                f"{field}: the tokenizer's chat template refuses {roles} ({reason}); choose "
                f"another template{' or no system prompt' if system else ''}."
            ) from e

    render(["1"])  # a template that refuses is named before any file is read
    return render
