"""The prompts a config names: what to train on, and what to evaluate with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from semrl_jax import data
from semrl_jax.errors import UserError


def training_prompts(
    config: ml_collections.ConfigDict, tokenizer: Any, report: Callable[[str], None]
) -> data.PromptDataset:
    """Prompts of the generator or of `data.files`; `report` hears what was left out of those.

    Raises:
      UserError: for a file, row or template that cannot be used.
    """
    if config.data.task == "arithmetic":
        return data.arithmetic_prompts(tokenizer, config.seed, config.data.num_prompts)
    prompts = data.load_prompts(
        config.data.files,
        tokenizer,
        **_row_options(config, config.data),
        skip_bad_rows=config.data.skip_bad_rows,
        report=report,
    )
    report(f"{len(prompts)} training prompts")
    return prompts


def held_out_problems(
    config: ml_collections.ConfigDict, tokenizer: Any
) -> Sequence[data.PromptExample]:
    """Problems to evaluate with; those of one data source are one benchmark.

    Raises:
      UserError: as above, for a problem over the token limit (a benchmark must not shrink
        silently), and for two files with one data source.
    """
    options = config.evaluation
    if config.data.task == "arithmetic":
        return data.arithmetic_held_out_prompts(tokenizer, options.num_problems).examples
    problems: list[data.PromptExample] = []
    for file in options.files:
        loaded = data.load_prompts(
            (file,),
            tokenizer,
            **_row_options(config, options),
            too_long="refuse",
            num_rows=options.num_problems,
        )
        seen = {problem.data_source for problem in problems}
        for example in loaded.examples:
            if example.data_source in seen:
                raise UserError(
                    f"evaluation.files={tuple(options.files)}: two of them hold the data source "
                    f"{example.data_source!r}; results are kept by that name, so rename one file."
                )
        problems += loaded.examples
    return problems


def _row_options(
    config: ml_collections.ConfigDict, rows: ml_collections.ConfigDict
) -> dict[str, Any]:
    return {
        "row_format": rows.row_format,
        "question_fields": tuple(rows.question_fields),
        "answer_field": rows.answer_field,
        "answer_after": rows.answer_after,
        "template": rows.template,
        "system_prompt": config.data.system_prompt,
        "add_special_tokens": config.data.add_special_tokens,
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
    }
