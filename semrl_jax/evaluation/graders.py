"""Verifiers of held-out problems, where they differ from the verifier of the rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from semrl_jax import data
from semrl_jax.rewards import VerifierPool
from semrl_jax.settings.rewards import reward_functions

TIMEOUT_S = 3.0  # of one verdict


def open_graders(
    stack: contextlib.ExitStack,
    config: ml_collections.ConfigDict,
    problems: Sequence[data.PromptExample],
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, VerifierPool]:
    """The verifier of each benchmark that has one of its own; equal ones share a pool.

    It is `evaluation.verifier`, or the setting `verifier` of the benchmark. The stack closes it.
    """
    graders: dict[str, VerifierPool] = {}
    pools: dict[str, VerifierPool] = {}
    for name in dict.fromkeys(problem.data_source for problem in problems):
        verifier = config.evaluation.verifier or settings.get(name, {}).get("verifier", "")
        if not verifier:
            continue
        if verifier not in pools:
            pools[verifier] = stack.enter_context(
                VerifierPool(
                    function=verifier,
                    timeout_s=min(TIMEOUT_S, config.rewards.timeout_s),
                    num_workers=config.rewards.num_workers,
                    memory_limit_gib=config.rewards.memory_limit_gib,
                )
            )
        graders[name] = pools[verifier]
    return graders


def takes_rows(
    config: ml_collections.ConfigDict, settings: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Whether a verifier of the evaluation may take the rows of the files, as a user's may."""
    names = [config.evaluation.verifier, config.rewards.function]
    names += [entry.function for entry in reward_functions(config.rewards.functions)]
    names += [own.get("verifier", "") for own in settings.values()]
    return any(":" in name for name in names)
