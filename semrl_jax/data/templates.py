"""Prompt templates: the text around a question, in training and evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.data.chat_templates import TemplateError, render_chat
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.end_markers import END_MARKERS
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import check_regular

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_QUESTION = "{input}"


class Format(NamedTuple):
    """The text around questions and, in few-shot prompts, around answers."""

    turn: str = _QUESTION  # text of one question, which replaces {input}
    answer: str = ""  # text between the turn of an example and its answer
    separator: str = "\n\n"  # text after the answer of each example
    before: str = ""  # text around all turns
    after: str = ""

    def text(self, question: str, shots: Sequence[tuple[str, str]] = ()) -> str:
        """The prompt; `shots` are examples, pairs of question and answer."""
        turns = [
            f"{self.turn.replace(_QUESTION, shot, 1)}{self.answer}{answer}{self.separator}"
            for shot, answer in shots
        ]
        turn = self.turn.replace(_QUESTION, question, 1)
        return f"{self.before}{''.join(turns)}{turn}{self.after}"


_PYTHON_GUIDELINES = (
    "Integrate step-by-step reasoning and Python code to solve math problems using the following "
    "guidelines:\n\n- Analyze the question and write functions to solve the problem; the function "
    "should not take any arguments.\n- Present the final result in LaTeX using a `\\boxed{}` "
    "without any units.\n- Utilize the `pi` symbol and `Rational`` from Sympy for $\\pi$ and "
    "fractions, and simplify all fractions and square roots without converting them to decimal "
    "values.\n\nHere are some examples you may refer to:\n\n---\n\n"
)
_LONG = "\n\n\n"

# Source: the prompt formats of the evaluation of Qwen2.5-Math and of hf618/VERL (3de68f1). Unlike
# there, spaces at the end of a prompt stay, and \boxed in the guidelines is not a backspace.
FORMATS = {
    "plain": Format(answer="\n"),
    "abel": Format("Question:\n{input}\nAnswer:\nLet's think step by step.\n"),
    "qwen-boxed": Format(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{{input}}\n{_BOXED}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "qwen25-math-cot": Format(  # all examples are in the one user message
        answer="\n",
        before=f"<|im_start|>system\n{_BOXED}<|im_end|>\n<|im_start|>user\n",
        after="<|im_end|>\n<|im_start|>assistant\n",
    ),
    "mathstral": Format(f"{{input}}\n{_BOXED}"),
    "direct": Format("Question: {input}\nAnswer: "),
    "cot": Format("Question: {input}\nAnswer: ", separator=_LONG),
    "deepseek-math": Format(f"User: {{input}}\n{_BOXED}\n\nAssistant:", separator=_LONG),
    "deepseek-r1": Format(
        "A conversation between User and Assistant. The user asks a question, and the Assistant "
        "solves it. The assistant first thinks about the reasoning process in the mind and then "
        "provides the user with the answer. The reasoning process and answer are enclosed within "
        "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning "
        "process here </think> <answer> answer here </answer>. User: {input}. Assistant:"
    ),
    "mistral": Format("[INST] {input}[/INST]"),
    "numina": Format("### Problem: {input}\n### Solution:", answer=" "),
    "pal": Format("Question: {input}\n\n", separator="\n---\n"),
    "tool-integrated": Format(
        "Question: {input}\n\nSolution:\n", separator="\n---\n", before=_PYTHON_GUIDELINES
    ),
    "tora": Format("<|user|>\n{input}\n<|assistant|>\n", separator="\n", before=_PYTHON_GUIDELINES),
    "self-instruct": Format("<|user|>\n{input}\n<|assistant|>\n", separator="\n"),
    "wizard_zs": Format(
        "### Instruction:\n{input}\n\n### Response: Let's think step by step.", separator=_LONG
    ),
    "platypus_fs": Format(
        "### Instruction:\n{input}\n\n### Response:\n",
        separator=_LONG,
        before="Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.\n\n### Instruction:\n",
        after="\n\n### Response:\n",
    ),
    "kpmath": Format(  # published without a separator
        "User: Please reason step by step and put your final answer at the end with "
        '"The answer is: ".\n\n{input}\n\nAssistant:'
    ),
    "jiuzhang": Format("## Question\n{input}\n\n## Solution\n", separator=_LONG),
    "jiuzhang_tora": Format("## Question\n{input}\n\n## Code Solution\n", separator=_LONG),
    "jiuzhang_nl": Format(
        "## Question\n{input}\n\n## Natural Language Solution\n", separator=_LONG
    ),
    "mmiqc": Format(
        "Please solve the following problem and put your answer at the end with "
        '"The answer is: ".\n\n{input}\n\n',
        separator=_LONG,
    ),
    "shepherd": Format("{input}\n", separator=_LONG),
    "internlm-math-fs": Format("Question:{input}\nAnswer:", separator="\n"),
    "internlm-math-chat": Format("<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n"),
    "o1_cot": Format(f"[Round 0] USER:\n{{input}}\n{_BOXED} ASSISTANT:\n"),
}
TEMPLATES = {name: form.text(_QUESTION) for name, form in FORMATS.items()}

# Texts that end a response: the beginning of another question, in the words of the template, and
# the marks that end a response in every template. The published evaluation also stops at words that
# are in ordinary answers: "user" and "assistant" (qwen*), "Question:" and "Answer:" (abel),
# "Instruction" and "Response" (wizard_zs, platypus_fs), "Problem" at the beginning of a line
# (deepseek*). Here the marks are long enough not to cut an answer. It also stops at "</answer>"
# (deepseek-r1), which would remove the end of the answer.
_MARKS = {
    "abel": ("\nQuestion:",),
    "qwen-boxed": ("<|im_start|>",),
    "qwen25-math-cot": ("<|im_start|>",),
    "mathstral": ("[INST]",),
    "direct": ("\nQuestion:",),
    "cot": ("\nQuestion:",),
    "deepseek-math": ("\nUser:", "\nAssistant:"),
    "deepseek-r1": ("\nUser:", "\nAssistant:"),
    "mistral": ("[INST]",),
    "numina": ("\n### Problem",),
    "pal": ("\n\n---", "```output", "\nQuestion:"),
    "tool-integrated": ("\n\n---", "```output", "\nQuestion:"),
    "tora": ("<|user|>", "```output"),
    "self-instruct": ("<|user|>",),
    "wizard_zs": ("\n### Instruction", "\n### Response"),
    "platypus_fs": ("\n### Instruction", "\n### Response"),
    "kpmath": ("\nUser:", "\nAssistant:"),
    "jiuzhang": ("\n## Question",),
    "jiuzhang_tora": ("\n## Question", "\n\n---", "```output"),
    "jiuzhang_nl": ("\n## Question",),
    "mmiqc": ("\nPlease solve the following problem",),
    "internlm-math-fs": ("\nQuestion:",),
    "internlm-math-chat": ("<|im_start|>",),
    "o1_cot": ("\n[Round",),
}
STOP_STRINGS = {name: (*END_MARKERS, *marks) for name, marks in _MARKS.items()}

CHAT = "chat"
AUTO = "auto"
MAX_TEMPLATE_CHARS = 2**20

# Replaces the function with which some chat templates write today's date. With another date, a
# resumed run would have other prompts. This is the default date of Llama 3's template.
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    "|replace('%d', '26')|replace('%m', '07')|replace('%b', 'Jul')|replace('%B', 'July')"
    "|replace('%Y', '2024')|replace('%y', '24')|replace('%A', 'Friday')|replace('%a', 'Fri') }}"
    "{%- endmacro -%}"
)


def _format(template: str, field: str) -> Format:
    """The format of a name in `TEMPLATES`, a text with {input} or a file of one; or UserError.

    One line break at the end of the file is not part of the text. The answer of an example follows
    a text of the user after a space.
    """
    if template in FORMATS:
        return FORMATS[template]
    if _QUESTION in template:
        return _own_format(template)
    if not os.path.isfile(template):
        raise UserError(
            f"{field} is unknown; choose from {sorted([*TEMPLATES, CHAT, AUTO])}, or give a text "
            "that contains {input} or the path of a file with such a text."
        )
    text = _read_text(template, field)
    if _QUESTION not in text:
        raise UserError(f"{field}: the file must contain {{input}}.")
    return _own_format(text.removesuffix("\n"))


def _own_format(text: str) -> Format:
    return Format(text, answer="" if text[-1].isspace() else " ")


def _read_text(path: str, field: str) -> str:
    """The text of a template file; UserError, beginning with the field, if it has none."""
    try:
        check_regular(path)
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{field} cannot be read: {str(error).rstrip('.')}.") from None
    if not text or len(text) > MAX_TEMPLATE_CHARS:
        raise UserError(f"{field}: the file must have 1 to {MAX_TEMPLATE_CHARS} characters.")
    return text


def chosen_template(template: str, tokenizer: Tokenizer) -> str:
    """The template; for "auto", the tokenizer's chat template if it has one, else "plain"."""
    if template != AUTO:
        return template
    return CHAT if getattr(tokenizer, "chat_template", None) else "plain"


def is_chat(template: str) -> bool:
    """Whether the template is the tokenizer's chat template, which writes all special tokens."""
    return template == CHAT or template.startswith(f"{CHAT}:")


def chat_message(template: str, field: str = "data.template") -> Format:
    """The message of the user for a template that `is_chat`; UserError as `prompt_renderer`."""
    if template == CHAT:
        return Format()
    return _format(template.removeprefix(f"{CHAT}:"), f"{field}: what follows '{CHAT}:'")


def chat_template_text(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The tokenizer's chat template, maybe that for tools; today's date in it is 26 July 2024."""
    text = tokenizer.get_chat_template(tools=list(tools) or None)
    return _FIXED_DATE + text if "strftime_now" in text else text


def set_chat_template(tokenizer: Tokenizer, path: str, field: str) -> None:
    """Gives the tokenizer the chat template of a UTF-8 file, and saves it with it; or UserError."""
    tokenizer.chat_template = _read_text(path, f"{field}={path!r:.200}")


def prompt_renderer(
    template: str,
    tokenizer: Tokenizer,
    *,
    system_prompt: str = "",
    shots: Sequence[tuple[str, str]] = (),
    field_prefix: str = "data.",
) -> Callable[[Sequence[str]], list[str]]:
    """Makes the function from questions to prompt texts; UserError for a template that fails.

    Args:
      template: see `chosen_template` and `_format`; or "chat", the tokenizer's chat template with
        the question as the user's message, up to the place where the assistant's message begins; or
        "chat:TEXT", the same with TEXT, another template, as the message.
      system_prompt: the message before the user's, for "chat" only; "" is no message.
      shots: examples before the question, pairs of question and answer. With "chat" they are
        messages of user and assistant.
      field_prefix: stands before "template" in error messages.
    """
    field = f"{field_prefix}template={template!r:.200}"
    template = chosen_template(template, tokenizer)
    if not is_chat(template):
        form = _format(template, field)
        if system_prompt:
            raise UserError(
                f"{field} takes no data.system_prompt={system_prompt!r:.200}; choose 'chat'."
            )
        return lambda questions: [form.text(question, shots) for question in questions]
    form = chat_message(template, field)
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{field}, but the tokenizer has no chat template; choose from "
            f"{sorted(TEMPLATES)}, or give a text that contains {{input}}."
        )
    first = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for question, answer in shots:
        first.append({"role": "user", "content": form.text(question)})
        first.append({"role": "assistant", "content": answer})

    def render(questions: Sequence[str]) -> list[str]:
        if not questions:
            return []
        messages = [
            [*first, {"role": "user", "content": form.text(question)}] for question in questions
        ]
        try:
            rendered = render_chat(
                tokenizer, chat_template_text(tokenizer), [(each, True) for each in messages]
            )
            return [each.text for each in rendered]
        except TemplateError as e:
            reason = " ".join(str(e).split())[:200]
            roles = "a system and a user message" if system_prompt else "one user message"
            if shots:
                roles += f" after {len(shots)} examples"
            raise UserError(
                f"{field}: the tokenizer's chat template refuses {roles} ({reason}); choose "
                f"another template{' or no system prompt' if system_prompt else ''}."
            ) from e

    render(["1"])  # so that a template that refuses is named before any file is read
    return render
