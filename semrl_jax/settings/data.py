"""Settings of `config.data`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting

TASKS = ("arithmetic", "files", "reasoning_gym", "environment")


@dataclasses.dataclass(frozen=True)
class Data:
    task: str = setting(
        "arithmetic",
        "arithmetic, generated; files: data.files; reasoning_gym; environment: environment.name",
        choices=TASKS,
    )
    num_prompts: int = setting(4096, "training prompts from a generator", "prompts", above=0)
    reasoning_gym: tuple[str, ...] = setting(
        (), "sets of reasoning-gym, NAME or NAME:option=value:weight=2; docs/data.md", items=str
    )
    shuffle: bool = setting(True, "another order in each epoch; False: their own")
    curriculum: str = setting(
        "",
        'learnability, window, replay, mixture, lessons, or "my_package.my_module", with '
        ":option=value; empty: in the order of epochs. docs/data.md",
    )
    prompts_per_step: int = setting(48, "Prompts of a step", "prompts", above=0)
    # A resumed run may have other paths: `check_inputs` compares the contents.
    files: tuple[str, ...] = setting(
        (),
        "training prompts, .jsonl or .parquet, repeat the flag; docs/data.md",
        items=str,
        may_change=True,
    )
    row_format: str = setting("question_answer", "rows of the files: question_answer or simplerl")
    question_fields: tuple[str, ...] = setting(
        ("question",), "fields of the question, joined by a space", items=str
    )
    answer_field: str = setting("answer", "field with the reference answer")
    given_field: str = setting(
        "",
        "field with a given response, or a list of them, for rollout.given_responses and "
        "rollout.hint_rounds; empty: none. docs/data.md",
    )
    answer_after: str = setting("", "mark before the answer, #### in GSM8K; empty: none")
    # "auto" is another name of the template, so the prompts are compared instead.
    template: str = setting(
        "auto",
        "auto (the tokenizer's chat template, else plain), plain, abel, ..., chat, a text "
        "with {input}, or its file; docs/data.md",
        may_change=True,
    )
    teacher_input: str = setting(
        "",
        "Text with {input} and {answer} that the reference, as a teacher, reads in place of the "
        "question; empty: it reads what the policy reads. docs/algorithms.md",
    )
    hint_input: str = setting(
        "{input}\n The following text is the beginning part of the answer, which you can refer to "
        "for solving the problem:\n{hint}",
        "text in place of the question with rollout.hint_rounds",
    )
    system_prompt: str = setting("", "system prompt for the template chat")
    # Without effect for many tokenizers, so a resumed run compares the prompts instead.
    add_special_tokens: bool = setting(
        True, "prompts begin with the tokenizer's special tokens", may_change=True
    )
    skip_bad_rows: bool = setting(False, "count and skip bad rows; False: stop")


def check(data: Section) -> None:
    # Imported here, because the default config is read before every command.
    from semrl_jax.data.curricula import find_curriculum
    from semrl_jax.data.procedural import sources
    from semrl_jax.data.prompt_rows import check_row_format

    check_row_format(data["row_format"])
    if (text := data["teacher_input"]) and not ("{input}" in text and "{answer}" in text):
        raise UserError(
            f"data.teacher_input={text!r:.200} must contain {{input}} and {{answer}}, or be empty."
        )
    sources(data["reasoning_gym"])
    if find_curriculum(data["curriculum"]) and not data["shuffle"]:
        raise UserError(
            "data.shuffle=False reads prompts in their own order, which data.curriculum="
            f"{data['curriculum']!r} replaces; remove one of them."
        )


def check_training_data(data: Section) -> None:
    """Rules of the prompts of a training run; other commands have prompts of their own."""
    if data["task"] == "files" and not data["files"]:
        raise UserError("data.task='files' needs data.files; name a .jsonl or .parquet file.")
    if (data["task"] == "reasoning_gym") != bool(data["reasoning_gym"]):
        raise UserError(
            f"data.task={data['task']!r} and data.reasoning_gym={tuple(data['reasoning_gym'])}: "
            "the task 'reasoning_gym' needs data sets, such as chain_sum, and no other reads them."
        )
    if data["task"] != "files" and data["num_prompts"] < data["prompts_per_step"]:
        raise UserError(
            f"data.num_prompts={data['num_prompts']} must be at least data.prompts_per_step="
            f"{data['prompts_per_step']}, the prompts of one step; change one of them."
        )
