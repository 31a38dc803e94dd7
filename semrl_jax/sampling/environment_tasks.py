"""The tasks of an environment as prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.data.procedural import HELD_OUT_SEED
from semrl_jax.data.templates import chat_template_text
from semrl_jax.data.turns import ChatTurns
from semrl_jax.environments.pool import EnvironmentPool, EnvironmentPools, Opening
from semrl_jax.support.errors import UserError

COLUMN = "environment"  # of a prompt's row


def chat_turns(
    tokenizer: Any, environments: EnvironmentPool, end_token_ids: Sequence[int] = ()
) -> ChatTurns:
    """The turns of episodes; UserError if the chat template writes no calls that are known."""
    tools: Sequence[Mapping[str, Any]] = ()
    if (schemas := environments.schemas) and getattr(tokenizer, "chat_template", None):
        tools = environments.speak(chat_template_text(tokenizer, schemas))
    return ChatTurns(tokenizer, end_token_ids, tools)


def training_tasks(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    environments: EnvironmentPool,
    report: Callable[[str], None],
) -> data.PromptDataset:
    """Prompts of up to `data.num_prompts` tasks that are not held out; UserError for too few."""
    count, least = config.data.num_prompts, config.data.prompts_per_step
    turns = chat_turns(tokenizer, environments)
    held_out = environments.openings(HELD_OUT_SEED, config.evaluation.num_problems)
    openings = environments.openings(config.seed, count + len(held_out))
    excluded = {_key(opening) for opening in held_out}
    found = [opening for opening in openings if _key(opening) not in excluded][:count]
    examples = _examples(found, turns, environments.named.label)
    report(f"{len(examples)} tasks of environment {environments.named.label} to train on")
    limit = config.rollout.max_prompt_tokens
    short = tuple(example for example in examples if len(example.prompt_ids) <= limit)
    if len(short) < least:
        shortest = min((len(example.prompt_ids) for example in examples), default=0)
        lengths = f" (at least {shortest}, with the descriptions of tools)" if shortest else ""
        raise UserError(
            f"environment.name: {environments.named.label} made {len(openings)} tasks, of which "
            f"{len(openings) - len(found)} are held out and {len(examples) - len(short)} have more "
            f"than rollout.max_prompt_tokens={limit} tokens{lengths}; "
            f"data.prompts_per_step={least} are needed. Change one of these, or "
            "evaluation.num_problems."
        )
    if len(short) < len(examples):
        report(
            f"{len(examples) - len(short)} of {len(examples)} prompts have more than "
            f"rollout.max_prompt_tokens={limit} tokens and are left out."
        )
    return data.PromptDataset(short)


def held_out_tasks(
    environments: EnvironmentPool,
    count: int,
    tokenizer: Any,
    report: Callable[[str], None],
    name: str = "",
) -> Sequence[data.PromptExample]:
    """The prompts of up to `count` tasks, the same for every seed; `name` is the benchmark's."""
    turns = chat_turns(tokenizer, environments)
    openings = environments.openings(HELD_OUT_SEED, count)
    examples = _examples(openings, turns, name or environments.named.label)
    report(f"{len(examples)} held-out tasks of environment {name or environments.named.label}")
    return examples


def first_answers(
    examples: Sequence[data.PromptExample], tokenizer: Any, environments: EnvironmentPools
) -> list[str]:
    """Plays an empty message to a task of each environment, so that mistakes are found early.

    Examples of one data source are of one environment, or of none. Returns lines that a user should
    see. UserError: an environment fails, or the chat template does not fit.
    """
    first = {example.data_source: example for example in reversed(examples)}
    openings = [opening_of(example.columns) for example in first.values()]
    found = [
        _first_answer(opening, tokenizer, environments[opening.environment])
        for opening in openings
        if opening is not None
    ]
    return list(dict.fromkeys(line for lines in found for line in lines))


def _first_answer(opening: Opening, tokenizer: Any, environments: EnvironmentPool) -> list[str]:
    episode = environments.open(opening)
    try:
        answer = episode.step("").result()
    finally:
        episode.end()
    if answer.error:
        raise UserError(
            f"environment.name: {environments.named.label} failed on an empty message of the "
            f"policy: {answer.error}; it must answer every text with a Turn, within "
            f"environment.timeout_s={environments.limits.timeout_s:g}."
        )
    replies = [each for each in (answer.turn.messages, environments.tool_reply()) if each]
    turns = chat_turns(tokenizer, environments)
    lines = [
        line
        for reply in replies or [[{"role": "user", "content": "1"}]]
        for line in turns.check(opening.messages, reply)
    ]
    return list(dict.fromkeys(lines))


def opening_of(row: str) -> Opening | None:
    """What an episode begins with, of a prompt's row; None for a row of another prompt."""
    found = json.loads(row or "{}").get(COLUMN)
    is_one = isinstance(found, dict) and found.keys() == set(Opening._fields)
    return Opening(**found) if is_one else None


def _key(opening: Opening) -> str:
    return json.dumps(opening.task.get("question", opening.task), sort_keys=True)


def _examples(
    openings: Sequence[Opening], turns: ChatTurns, name: str
) -> tuple[data.PromptExample, ...]:
    """Prompts in the order of their tasks; UserError if the chat template refuses one."""
    examples = []
    begun = turns.begun([opening.messages for opening in openings])
    for index, (opening, prompt) in enumerate(zip(openings, begun, strict=True)):
        if prompt.error or not prompt.token_ids:
            raise UserError(
                f"environment.name: {name}: the tokenizer's chat template refuses the messages of "
                f"task {index} ({prompt.error or 'they have no token'}); give the directory of "
                "model.path another chat_template.jinja, or change the messages of reset."
            )
        answer, text = opening.task.get("answer", ""), prompt.transcript.text
        is_of_ids = prompt.transcript.is_of_ids
        examples.append(
            data.PromptExample(
                prompt=text,
                prompt_ids=np.array(prompt.token_ids, np.int32),
                answer=answer if isinstance(answer, str) else json.dumps(answer),
                data_source=name,
                index=index,
                columns=json.dumps({COLUMN: opening._asdict()}),
                question=text if is_of_ids else opening.messages[-1]["content"],
                template=data.templates.CHAT,
            )
        )
    return tuple(examples)
