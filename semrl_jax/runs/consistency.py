"""Checks that all processes of a run have the same settings, code, packages and devices."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import itertools
import json
import pathlib
import platform

import jax
import ml_collections

import semrl_jax
from semrl_jax.cluster.agreement import run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs.workdir import versions
from semrl_jax.settings.rewards import reward_functions
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import jsonable

# Packages that results and files depend on, in addition to those that a run directory records.
MORE_PACKAGES = (
    "latex2sympy2_extended", "ml_collections", "ml_dtypes", "protobuf", "pyarrow", "safetensors",
    "sympy", "tensorstore", "tokenizers",
)  # fmt: skip


def check_same(peers: Peers, config: ml_collections.ConfigDict) -> None:
    """Raises UserError in all processes if two of them differ."""
    own = {
        **{f"config.{name}": value for name, value in jsonable(flatten(config)).items()},
        **{f"version of {name}": value for name, value in versions().items()},
        **{f"version of {name}": importlib.metadata.version(name) for name in MORE_PACKAGES},
        "version of Python": platform.python_version(),
        "code": code_hash(),
        "code of rewards.function": function_hash(config.rewards.function),
        "code of rewards.functions": [
            function_hash(function.function)
            for function in reward_functions(config.rewards.functions)
        ],
        "devices": f"{jax.local_device_count()} {jax.devices()[0].device_kind}",
    }
    del own["config.distributed.process_id"]  # different in every process
    found = peers.gather("compare", own)

    def compare() -> None:
        for process, other in enumerate(found):
            for name in sorted(own.keys() | other.keys()):
                if own.get(name) != other.get(name):
                    raise UserError(
                        f"process {process} has {name}={other.get(name)!r}, process {peers.index} "
                        f"{own.get(name)!r}; start all with the same command and environment."
                    )

    run_phase(peers, "compare", compare)


def code_hash() -> str:
    """Hex SHA-256 of this package's Python files; an installed package has no git revision."""
    root = pathlib.Path(semrl_jax.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(json.dumps([str(file.relative_to(root)), content]).encode())
    return digest.hexdigest()


def function_hash(path: str) -> str:
    """Hex SHA-256 of the file of 'package.module:name', which is not imported; "" without one."""
    places = None
    for name in itertools.accumulate(path.partition(":")[0].split("."), "{}.{}".format):
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None:
            return ""
        places = spec.submodule_search_locations
    file = pathlib.Path(spec.origin or "")
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
