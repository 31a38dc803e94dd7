"""Entries of `evaluation.benchmarks`: names, groups, files, environments and modules."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections

from semrl_jax import data
from semrl_jax.evaluation import catalogue
from semrl_jax.sampling.prompt_sources import FILE_SETTINGS, setting_values
from semrl_jax.settings.environment import PREFIX, named
from semrl_jax.settings.environment import check as check_environment
from semrl_jax.settings.rewards import check_function
from semrl_jax.settings.rules import Section, split_entry
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.types import DISTRIBUTION

FIELD = "evaluation.benchmarks"
GRADER = "benchmark"  # verifier of named sets
# Settings of the evaluator; the others say how problems are read.
EVALUATOR_SETTINGS = ("n", *DISTRIBUTION, "verifier")
SET_SETTINGS = ("num_problems", "template", "name", "shots", *EVALUATOR_SETTINGS)
# All others of an entry are options of the environment, which grades its episodes itself.
ENVIRONMENT_SETTINGS = ("num_problems", "name", "n", *DISTRIBUTION)


class Entry(NamedTuple):
    """A benchmark that `evaluation.benchmarks` names."""

    entry: str  # as in the config
    kind: str  # "set" (one of `catalogue.names()`), "file", "environment" or "module"
    target: str  # the set, the path, the environment as `environment.name`, or the module
    name: str  # of its results; "" for a module, whose problems have it
    settings: Mapping[str, Any]  # those given, as values of their types


def benchmark_entries(evaluation: Section) -> list[Entry]:
    """The benchmarks of `evaluation.benchmarks`, those of groups one by one; UserError if wrong.

    A set that is in a group and in another entry counts once, with the settings of the later entry.
    """
    found: dict[str, Entry] = {}
    grouped: set[str] = set()
    modules: list[Entry] = []
    for text in evaluation["benchmarks"]:
        target = re.split(r":(?=\w+=)", text, maxsplit=1)[0]
        kind = _kind(target)
        if kind == "module":
            split_entry(FIELD, text, "module, which has its own", ())
            modules.append(Entry(text, kind, target, "", {}))
            continue
        allowed = (*FILE_SETTINGS, *SET_SETTINGS) if kind == "file" else SET_SETTINGS
        if kind == "environment":
            text, target, allowed = *_split_options(text), ENVIRONMENT_SETTINGS
        _, given = split_entry(
            FIELD, text, kind, tuple(dict.fromkeys(allowed)), repeatable=("question_fields",)
        )
        settings = setting_values(FIELD, text, given)
        if "verifier" in settings:
            check_function(f"{FIELD}={text!r}: verifier", settings["verifier"])
        targets = (target,) if kind != "set" else catalogue.members(FIELD, target)
        if len(targets) > 1 and "name" in settings:
            raise UserError(f"{FIELD}={text!r}: a group has no name of its own; leave name out.")
        for target in targets:
            name = settings.get("name") or _default_name(kind, target)
            if name in found and not (len(targets) > 1 or name in grouped):
                raise UserError(
                    f"{FIELD}: {found[name].entry!r} and {text!r} are {name!r}; add :name=NAME."
                )
            if len(targets) > 1:
                grouped.add(name)
            found[name] = Entry(text, kind, target, name, settings)
    return [*found.values(), *modules]


def benchmark_settings(config: ml_collections.ConfigDict) -> dict[str, dict[str, Any]]:
    """The settings of `EVALUATOR_SETTINGS` of each entry of `evaluation.benchmarks`, by its name.

    Such as {"gsm8k": {"verifier": "benchmark", "n": 4}, "mine": {}}. A named set has a verifier.
    """
    return {
        entry.name: ({"verifier": GRADER} if entry.kind == "set" else {})
        | {name: value for name, value in entry.settings.items() if name in EVALUATOR_SETTINGS}
        for entry in benchmark_entries(config.evaluation)
        if entry.kind != "module"
    }


def check_benchmarks(config: ml_collections.ConfigDict) -> None:
    """Raises UserError if a file does not exist; called before anything slow."""
    entries = benchmark_entries(config.evaluation)
    wanted = tuple(dict.fromkeys(entry.target for entry in entries if entry.kind == "set"))
    catalogue.check_files_of(FIELD, wanted, config.evaluation.data_dir)
    for entry in entries:
        if entry.kind == "file":
            with prefixed(FIELD):
                data.check_file(entry.target)
    is_remote = config.evaluation.metric_options.placement == "rollout"
    if config.evaluation.metrics and is_remote and environment_names(config):
        raise UserError(
            "evaluation.metric_options.placement must be 'trainer': a replica sees one turn alone."
        )
    num_shots = [entry.settings.get("shots", config.evaluation.shots) for entry in entries]
    if any(num_shots) and not config.evaluation.shots_file:
        raise UserError(
            f"{FIELD} asks for examples, but evaluation.shots_file is empty; name a file of them."
        )


def environment_names(config: ml_collections.ConfigDict) -> list[str]:
    """The environments that a config trains or evaluates on, as `environment.name`."""
    found = [entry for entry in benchmark_entries(config.evaluation) if entry.kind == "environment"]
    own = config.environment.name
    return [own] * bool(own) + [entry.target for entry in found]


def _split_options(text: str) -> tuple[str, str]:
    """The entry of an environment without its options, and its name with them."""
    first, *parts = re.split(r":(?=\w+=)", text)
    is_ours = [part.partition("=")[0] in ENVIRONMENT_SETTINGS for part in parts]
    ours = [part for part, is_one in zip(parts, is_ours) if is_one]
    options = [part for part, is_one in zip(parts, is_ours) if not is_one]
    name = ":".join([first.removeprefix(PREFIX), *options])
    if not name:
        raise UserError(f"{FIELD}={text!r} names no environment; write {PREFIX}NAME.")
    with prefixed(f"{FIELD}={text!r}"):
        check_environment({"name": name})
    return ":".join([first, *ours]), name


def _default_name(kind: str, target: str) -> str:
    if kind == "environment":
        return named(target).label
    return pathlib.Path(target).stem if kind == "file" else target


def _kind(target: str) -> str:
    if target.startswith(PREFIX):
        return "environment"
    if "/" in target or target.endswith((".jsonl", ".parquet")):
        return "file"
    known = target in catalogue.GROUPS or target in catalogue.names()
    return "module" if "." in target and not known else "set"
