"""Settings of `config.environment`; the pool of environments checks them too."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting
from semrl_jax.support.modules import module_names

BUILT_IN = "semrl_jax.environments.kinds"
PREFIX = "environment:"  # of an entry of evaluation.benchmarks


@dataclasses.dataclass(frozen=True)
class Environment:
    name: str = setting(
        "",
        'A built-in environment or "package.module:Class", with :option=value; empty: a '
        "single turn",
    )
    max_turns: int = setting(8, "messages of the policy before the episode ends", "turns", above=0)
    num_lanes: int = setting(
        1, "parts of a batch that take turns; 2 or 3 for slow tools", "parts", above=0, at_most=64
    )
    max_observation_chars: int = setting(
        8192, "an answer of the environment is truncated there", "characters", above=0
    )
    tool_format: str = setting(
        "auto",
        "auto, as the chat template writes calls, or json",
        choices=("auto", "hermes", "llama3", "json"),
    )
    timeout_s: float = setting(30.0, "limit of one call of the environment", above=0, at_most=2**31)
    memory_limit_gib: float = setting(
        2.0, "limit of an episode's process, on Linux; 0: none", at_least=0, at_most=2**20
    )
    num_workers: int = setting(
        16, "environments that compute at the same time", "processes", above=0, at_most=1024,
        may_change=True,
    )  # fmt: skip


class Named(NamedTuple):
    """What `environment.name` says."""

    target: str  # the name of a built-in environment, or "package.module:Class"
    options: dict[str, Any]  # keyword arguments of the class
    label: str  # in the log and in results


def check(environment: Section) -> None:
    if not environment["name"]:
        return
    target, _, _ = named(environment["name"])
    module, _, class_name = target.partition(":")
    if not (module.strip() and class_name.strip()) and target not in names():
        raise UserError(
            f"environment.name={environment['name']!r} must be 'package.module:Class', with the "
            f"module's name as Python imports it, or a built-in environment: {', '.join(names())}."
        )


def named(name: str) -> Named:
    """Splits `NAME:option=value:option=value`; UserError for an option that is set twice.

    A value ends before the next `:option=` that is not in double quotes, as of a list in JSON.
    """
    from semrl_jax.data.procedural import option_value  # see settings.data

    target, *parts = re.split(r':(?=\w+=)(?=[^"]*(?:"[^"]*"[^"]*)*$)', name)
    options = {}
    for option, _, value in (part.partition("=") for part in parts):
        if option in options:
            raise UserError(f"environment.name={name!r}: {option} is set twice; keep one.")
        options[option] = option_value(value)
    return Named(target, options, target.rpartition(":")[2])


def names() -> tuple[str, ...]:
    """The built-in environments."""
    return module_names(BUILT_IN)
