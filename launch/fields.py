"""Flags of commands on a policy: its run gives the config, and short flags set fields of it."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags

import configs
from launch import cli
from semrl_jax.data.arithmetic import QUESTION_TEMPLATE
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import run_of
from semrl_jax.types import DISTRIBUTION, HiddenStateParams, SamplingParams, distribution_of

STATE_KINDS = ("decode", "prefill")
Fields = Mapping[str, tuple[str, str, str]]  # field of the config, kind and help, by flag
# Flags of every command that samples.
OF_SAMPLING: Fields = {
    "top_k": ("evaluation.top_k", "integer", "default 0: all tokens"),
    "min_p": ("evaluation.min_p", "float", "default 0: all tokens"),
    "max_response_tokens": ("rollout.max_response_tokens", "integer", "limit of a response"),
    "engine": ("rollout.engine", "string", "jax or vllm"),
    "seed": ("seed", "integer", "of the sampling"),
}
# The model's own distribution.
UNMODIFIED = {
    f"evaluation.{name}": value for name, value in distribution_of(SamplingParams(1)).items()
}
flags.disclaim_key_flags()  # those that `define_flags` defines are of the command


def define_flags(fields: Fields) -> dict[str, flags.FlagHolder]:
    """Defines a flag for each of these fields of the config."""
    return {
        name: getattr(flags, f"DEFINE_{kind}")(name, None, f"{text} (config.{field})")
        for name, (field, kind, text) in fields.items()
    }


def config_of_policy() -> bool:
    """Adds --config unless it is given, by the run or the default; returns whether it was."""
    given = bool(cli.given_values("config"))
    if not given:
        root, run = pathlib.Path(configs.__file__).parent, first_run()
        default = f"{root / 'recorded.py'}:{run / 'config.json'}" if run else root / "default.py"
        sys.argv.insert(1, f"--config={default}")
    return given


def template_of_run(config: ml_collections.ConfigDict, file: str) -> str:
    """The built-in task's template if `file`, the value of --config, is a record of such a run."""
    is_record = pathlib.Path(file.partition(":")[0]).name == "recorded.py"
    if is_record and config.data.task == "arithmetic":
        return QUESTION_TEMPLATE
    return config.data.template


def first_run() -> pathlib.Path | None:
    """The run of the first policy; None if it is no run."""
    paths = cli.given_values("policy")
    return run_of(pathlib.Path(paths[0])) if paths else None


def fields_of_flags(
    fields: Fields, values: Mapping[str, Any], overridden: Collection[str]
) -> dict[str, Any]:
    """Values by field of the config; UserError if two flags set one. None: it was not given."""
    found = {}
    for name, (field, kind, _) in fields.items():
        if values[name] is None:
            continue
        if field in overridden:
            raise UserError(f"--{name} and --config.{field} set the same field; give one of them.")
        found[field] = tuple(values[name]) if kind == "list" else values[name]
    return found


def chosen_fields(
    fields: Fields,
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Values by field of the config: of the flags, else the defaults of the command.

    UserError if two flags set one field, or one a `fixed` field, which the command sets itself.
    """
    overridden = flags.FLAGS["config"].override_values
    if wrong := sorted(fixed.keys() & overridden.keys()):
        command = sys.modules["__main__"].__spec__.name
        raise UserError(f"--config.{wrong[0]} has no meaning in {command}; leave it out.")
    found = {field: value for field, value in defaults.items() if field not in overridden}
    given = fields_of_flags(fields, values, overridden)
    for name in DISTRIBUTION:
        field, of_training = f"evaluation.{name}", f"rollout.{name}"
        if of_training not in overridden:
            continue
        if field in given or field in overridden:
            raise UserError(f"--config.{of_training} and another flag set {field}; give one.")
        given[field] = overridden[of_training]
    return found | given | fixed


def values_of(holders: Mapping[str, flags.FlagHolder]) -> dict[str, Any]:
    """The values of flags; None if not given."""
    return {name: holder.value for name, holder in holders.items()}


def short_flags(fields: Fields, values: Mapping[str, Any]) -> dict[str, str]:
    """The flag that was given, by the field of the config that it sets; as `fields_of_flags`."""
    return {fields[name][0]: name for name, value in values.items() if value is not None}


def chosen_states(
    layers: Sequence[str], kinds: Sequence[str] | None, dtype: str
) -> HiddenStateParams | None:
    """The hidden states that flags ask for, by default of the response; UserError if wrong."""
    given, kinds = kinds, kinds if kinds is not None else STATE_KINDS[:1]
    for layer in layers:
        if not re.fullmatch(r"-1|[0-9]{1,6}", layer.strip()):
            raise UserError(
                f"--hidden_states has {layer!r}; -1 is the final layer, i the input of layer i."
            )
    if len(set(map(int, layers))) < len(layers):
        raise UserError(f"--hidden_states={','.join(layers)} names a layer twice; name each once.")
    if wrong := [kind for kind in kinds if kind not in STATE_KINDS]:
        raise UserError(f"--states has {wrong[0]!r}; choose from {', '.join(STATE_KINDS)}.")
    if not kinds or len(set(kinds)) < len(kinds):
        raise UserError(f"--states={','.join(kinds)} must name decode, prefill or both, once each.")
    if not layers:
        if given is not None:
            raise UserError("--states needs layers; add --hidden_states=-1, or leave it out.")
        return None
    return HiddenStateParams(tuple(map(int, layers)), dtype, tuple(kinds))
