"""Prompts in which another text takes the place of the question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax.data.encoding import encode, special_prefix
from semrl_jax.data.prompts import PromptExample
from semrl_jax.data.templates import prompt_renderer
from semrl_jax.data.tokenizer import Tokenizer


def reworded(
    text: str,
    examples: Sequence[PromptExample],
    values: Sequence[Mapping[str, str]],
    tokenizer: Tokenizer,
    settings: ml_collections.ConfigDict,
) -> list[Int[np.ndarray, " _"]]:
    """Int32 ids of prompts of one template, in which the text replaces the question.

    Where only the prompt is known, it replaces the prompt.

    Args:
      text: with {input}, which is the question or else the prompt, and with names of `values`.
      examples: at least one.
      values: for each example, texts by name; they may hold {name} themselves.
      settings: `config.data`.
    """
    first = examples[0]
    template = first.template if first.question else "plain"  # else the prompt has it already
    render = prompt_renderer(template, tokenizer, system_prompt=settings.system_prompt)
    prefix = special_prefix(tokenizer, template, settings.add_special_tokens)
    texts = []
    for example, of_example in zip(examples, values, strict=True):
        known = {"input": example.question or example.prompt, **of_example}
        name = re.compile(rf"\{{({'|'.join(known)})\}}")
        texts.append(name.sub(lambda found, known=known: known[found[1]], text))
    return [np.array(ids, np.int32) for ids in encode(tokenizer, render(texts), prefix)]
