"""Settings of `config.rewards`; `VerifierPool` checks them too."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from semrl_jax.settings.rules import Section, split_entry
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import check_fields, section, setting
from semrl_jax.support.modules import module_names

VERIFIERS = "semrl_jax.rewards.verifiers"
MODES = ("independent", "mix")
MAX_SCORE = 1e9  # sums of squares of rewards, and of gradients that they scale, fit float32
SCORES = f"[{-MAX_SCORE:g}, {MAX_SCORE:g}]"
FUNCTION_SETTINGS = ("weight", "name")  # that an entry of rewards.functions may have
MODEL = "model"  # the entry of rewards.functions that stands for rewards.model
TAKEN_NAMES = ("shaped",)  # the log has reward/shaped/mean of its own


@dataclasses.dataclass(frozen=True)
class RewardModel:
    path: str = setting("", "directory or hub id of a sequence classifier")
    dtype: str = setting("float32", "float32 or bfloat16", choices=DTYPES)
    tokenizer: str = setting(
        "policy",
        "policy: it reads the policy's token ids; own: the text, through its own chat "
        "template and tokenizer",
        choices=("policy", "own"),
    )
    chat_template: str = setting("", "own: Jinja file in place of its chat template")
    max_tokens: int = setting(
        0, "own: longer sequences are truncated; 0: its context", at_least=0, at_most=2**31 - 1
    )
    truncation: str = setting(
        "right",
        "own: which end of a long sequence goes: right, the response's, or left, the question's",
        choices=("right", "left"),
    )


@dataclasses.dataclass(frozen=True)
class Rewards:
    function: str = setting(
        "", 'A built-in verifier or "package.module:name"; empty: math. docs/verifiers.md'
    )
    functions: tuple[str, ...] = setting(
        (),
        "Several, summed: FUNCTION, or FUNCTION:weight=0.5:name=NAME; repeat the flag. model: "
        "the score of rewards.model; if alone, rewards.function decides what is correct",
        items=str,
    )
    model: RewardModel = section(RewardModel)
    failure_score: float = setting(
        0.0, "score if a function raises, hangs or returns no verdict", within=SCORES
    )
    memory_limit_gib: float = setting(
        2.0, "limit of a worker, on Linux; 0: none", at_least=0, at_most=2**20
    )
    mode: str = setting(
        "independent",
        "independent: correctness and the box count; mix: only correctness",
        choices=MODES,
    )
    unboxed_penalty: float = setting(
        -1.0, "independent: score of wrong, unboxed responses", within=SCORES
    )
    timeout_s: float = setting(10.0, "limit of one call of a verifier", above=0, at_most=2**31)
    num_workers: int = setting(
        2, "processes that run verifiers", "processes", above=0, at_most=1024, may_change=True
    )
    probability_after: str = setting(
        "",
        "A mark such as <answer>: the reward is the probability that the policy gives to the "
        "reference answer after the last mark of a response (RLPR); empty: the verifier's score",
    )
    majority: bool = setting(
        False,
        "True: reward 1 for the answer of most of its group, else 0 (TTRL); references count "
        "in the log, for a curriculum and keep_groups_by",
    )
    shuffle: bool = setting(False, "True: permute rewards over the batch, as a control")


class RewardFunction(NamedTuple):
    """An entry of `rewards.functions`: `FUNCTION`, or `FUNCTION:weight=WEIGHT:name=NAME`."""

    entry: str  # as in the config
    function: str  # as `rewards.function`, or "model" for the reward model
    weight: float  # of its score in the reward
    name: str  # in the log


def check(rewards: Section) -> None:
    check_verifiers(rewards)
    model = rewards["model"]
    if rewards["majority"] and model["path"]:
        raise UserError(
            "rewards.majority=True rewards the answers alone, so rewards.model.path="
            f"{model['path']!r} would not count; remove one of them."
        )
    others = rewards["majority"] or model["path"] or len(rewards["functions"]) > 1
    if (mark := rewards["probability_after"]) and others:
        raise UserError(
            f"rewards.probability_after={mark!r:.100} gives the rewards alone; remove it, or "
            "rewards.majority, rewards.model.path and all but one of rewards.functions."
        )
    if model["tokenizer"] == "policy" and (model["chat_template"] or model["max_tokens"]):
        name = "chat_template" if model["chat_template"] else "max_tokens"
        raise UserError(
            f"rewards.model.{name}={model[name]!r} needs rewards.model.tokenizer='own': with the "
            "policy's tokenizer, the model reads the token ids as they are."
        )
    if model["max_tokens"] == 1:
        raise UserError("rewards.model.max_tokens=1 must be 2 or more, or 0 for the context.")
    _, function = split_functions(reward_functions(rewards["functions"]))
    if function and not model["path"]:
        raise UserError(
            f"rewards.functions has {function.entry!r}, but rewards.model.path is empty; name one."
        )
    if model["path"] and not function:
        raise UserError(
            f"rewards.model.path={model['path']!r} needs an entry {MODEL!r} in rewards.functions."
        )


def check_verifiers(rewards: Section) -> None:
    """Everything but the reward model."""
    check_fields("rewards", rewards, Rewards)
    if rewards["function"]:
        check_function("rewards.function", rewards["function"])
    verifiers, _ = split_functions(reward_functions(rewards["functions"]))
    if verifiers and rewards["function"]:
        raise UserError(
            "rewards.function and rewards.functions are both set; name all in rewards.functions."
        )


def split_functions(
    functions: Sequence[RewardFunction],
) -> tuple[list[RewardFunction], RewardFunction | None]:
    """The verifiers, and the reward model if it is among the functions."""
    verifiers = [function for function in functions if function.function != MODEL]
    return verifiers, next((f for f in functions if f.function == MODEL), None)


def is_reward_name(name: Any) -> bool:
    """Whether reward/NAME/mean in the log can have this name."""
    return (
        isinstance(name, str) and bool(re.fullmatch(r"[\w.-]+", name)) and name not in TAKEN_NAMES
    )


def reward_functions(entries: Sequence[str]) -> list[RewardFunction]:
    """Splits entries of `rewards.functions`; UserError for a wrong one, or two of one name."""
    functions: list[RewardFunction] = []
    for entry in entries:
        field = f"rewards.functions={entry!r}"
        function, found = split_entry("rewards.functions", entry, "reward", FUNCTION_SETTINGS)
        settings = {name: value for name, (value,) in found.items()}
        if function != MODEL:
            check_function("rewards.functions", function)
        elif split_functions(functions)[1]:
            raise UserError(f"{field}: another entry is {MODEL!r} too; there is one reward model.")
        name = settings.get("name", function.rpartition(":")[2])
        if not is_reward_name(name):
            raise UserError(
                f"{field}: name={name!r} must be letters, digits, '_', '.' and '-', because it "
                f"names reward/NAME/mean in the log, and not one of {TAKEN_NAMES}."
            )
        if name in (other.name for other in functions):
            raise UserError(
                f"{field}: another entry is named {name!r} too; add :name=NAME to one of them."
            )
        weight = _weight(field, settings.get("weight", "1"))
        functions.append(RewardFunction(entry, function, weight, name))
    return functions


def _weight(field: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < abs(weight) <= MAX_SCORE:  # NaN is not
        raise UserError(
            f"{field}: weight={text!r} must be a number other than 0 from {-MAX_SCORE:g} to "
            f"{MAX_SCORE:g}; leave the entry out if it must not count."
        )
    return weight


def check_function(field: str, function: str) -> None:
    module, _, name = function.partition(":")
    is_users = module.strip() and name.strip()
    if not is_users and function not in module_names(VERIFIERS):
        other = f"{MODEL!r}, " if field == "rewards.functions" else ""
        raise UserError(
            f"{field}={function!r} must be 'package.module:name', with the module's name as "
            f"Python imports it, {other}or a built-in verifier: "
            f"{', '.join(module_names(VERIFIERS))}."
        )
