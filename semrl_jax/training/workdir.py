"""The directory of one run: who owns it, what it was started with, what is in it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import pathlib
import re
import secrets
import subprocess
from typing import Any

import ml_collections

from semrl_jax.cluster.agreement import on_first, together
from semrl_jax.cluster.peers import Peers
from semrl_jax.errors import UserError

# A resumed run may change these; anything else would make it another run.
MAY_DIFFER = (
    "training.num_steps",
    "training.grace_s",
    "rollout.addresses",
    "rollout.vllm_",
    "rollout.token_file",
    "rollout.tls_ca_file",
    "rollout.connect_timeout_s",
    "rollout.call_timeout_s",
    "rollout.stall_timeout_s",
    "data.files",  # wherever they lie: `check_inputs` holds their contents
    "evaluation.",
    "checkpoints.",
    "logging.",
    "distributed.",
    "mesh.",
    # On what a step is done, and how it is split; its numbers stay the same but for rounding.
    "rollout.jax_tensor_parallelism",
    "rollout.jax_data_parallelism",
    "rewards.num_workers",
    "metrics.num_threads",
    "training.micro_batch_size",
    "training.micro_batch_tokens",
    "training.pack_sequences",
    "training.balance_lengths",
    "model.remat",
)
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy", "grpcio")


@dataclasses.dataclass(frozen=True)
class Workdir:
    """An owned run directory.

    Attributes:
      path: the directory.
      run_id: fixed when the directory was made.
      attempt_id: fresh for every start.
      resumed: whether an earlier attempt made the directory.
      changed: settings that differ from the first attempt's, as "field: old -> new".
    """

    path: pathlib.Path
    run_id: str
    attempt_id: str
    resumed: bool
    changed: tuple[str, ...]
    lock: Any

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def warm_start(self) -> pathlib.Path:
        return self.path / "warm_start"

    @property
    def rollouts(self) -> pathlib.Path:
        return self.path / "rollouts"

    @property
    def metrics_file(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    def check_inputs(self, hashes: dict[str, str]) -> None:
        """Records what the run reads from elsewhere, or compares it with what it began with.

        Args:
          hashes: by what they are of.

        Raises:
          UserError: if one has changed since.
        """
        file = self.path / "inputs.json"
        if not file.exists():
            write_json(file, hashes)
            return
        recorded = json.loads(file.read_text())
        for name, value in hashes.items():
            if recorded.get(name, value) != value:
                raise UserError(
                    f"the run in {self.path} began with other {name} (see {file.name}); restore "
                    "what was there or name a new workdir."
                )

    def discard(self) -> None:
        """Removes the record of a run that a wrong setting stopped before it had anything."""
        if not any(
            path.exists() for path in (self.checkpoints, self.metrics_file, self.warm_start)
        ):
            for name in ("config.json", "inputs.json", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: what else is there is not ours
                self.path.rmdir()

    def close(self) -> None:
        """Lets another process have the directory."""
        self.lock.close()


def open_workdir(path: str, config: ml_collections.ConfigDict) -> Workdir:
    """Makes or reopens a run directory and locks it for this process.

    Raises:
      UserError: if it cannot be written, belongs to something else, to a run with another config,
        or to a run that is going on.
    """
    directory = pathlib.Path(path).absolute()
    config_file = directory / "config.json"
    try:
        if directory.exists() and not directory.is_dir():
            raise UserError(f"workdir={path} is a file; name a directory.")
        contents = {entry.name for entry in directory.iterdir()} if directory.exists() else set()
        if "config.json" not in contents and not all(map(_is_left_by_a_start, contents)):
            raise UserError(
                f"workdir={path} is not empty and holds no run (config.json is missing); name a "
                "new directory."
            )
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")  # noqa: SIM115 - held for the life of the run
    except OSError as error:
        raise UserError(f"workdir={path} cannot be used: {error.strerror or error}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UserError(
            f"workdir={path} belongs to a run that is going on; stop it or name another directory."
        ) from None
    settings = jsonable(config.to_dict())
    if config_file.exists():
        try:
            record = json.loads(config_file.read_text())
            run_id, recorded = record["run_id"], record["config"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{config_file} is not the record of a run; name another workdir."
            ) from None
        changed = _compare(path, recorded, settings)
    else:
        run_id, changed = secrets.token_hex(8), ()
        record = {"run_id": run_id, "config": settings, "versions": versions()}
        write_json(config_file, record)
    return Workdir(
        path=directory,
        run_id=run_id,
        attempt_id=secrets.token_hex(8),
        resumed="config.json" in contents,
        changed=changed,
        lock=lock,
    )


def open_workdir_together(peers: Peers, path: str, config: ml_collections.ConfigDict) -> Workdir:
    """The run directory in every process; process 0 alone makes it, locks it and writes to it.

    Raises:
      UserError: as `open_workdir`, or where a process does not see what process 0 made.
    """
    opened: list[Workdir] = []

    def lead() -> dict[str, Any]:
        workdir = open_workdir(path, config)
        opened.append(workdir)
        return {
            name: getattr(workdir, name) for name in ("run_id", "attempt_id", "resumed", "changed")
        }

    record = on_first(peers, "open_workdir", lead)
    if opened:
        workdir = opened[0]
    else:
        record["changed"] = tuple(record["changed"])
        workdir = Workdir(pathlib.Path(path).absolute(), lock=contextlib.ExitStack(), **record)
    try:
        together(peers, "open_workdir", lambda: _check_shared(workdir))
    except BaseException:
        if opened:
            workdir.discard()
            workdir.close()
        raise
    return workdir


def _is_left_by_a_start(name: str) -> bool:
    """Whether a start that came to nothing leaves this in a run directory.

    A kill in the first write leaves its staging file, a replica that did not start what it printed.
    """
    return name in (".lock", "config.writing") or re.fullmatch(r"replica\d+", name) is not None


def _check_shared(workdir: Workdir) -> None:
    try:
        run_id = json.loads((workdir.path / "config.json").read_text())["run_id"]
    except (OSError, ValueError, KeyError):
        run_id = None
    if run_id != workdir.run_id:
        raise UserError(
            f"workdir={workdir.path} does not show what process 0 wrote there; name a directory "
            "that all processes share."
        )


def write_json(file: pathlib.Path, content: Any) -> None:
    """Writes a file that appears whole or not at all."""
    staging = file.with_suffix(".writing")
    staging.write_text(json.dumps(content, indent=2) + "\n")
    staging.rename(file)


def versions() -> dict[str, str]:
    """Package versions and the git revision of the code, "" outside a checkout."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found | {"git": revision.stdout.strip()}


def flatten_settings(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Every field under its full name, as JSON holds it."""
    return _flatten(jsonable(config.to_dict()))


def _compare(path: str, recorded: Any, settings: Any) -> tuple[str, ...]:
    old, new = _flatten(recorded), _flatten(settings)
    changed = []
    for field in sorted(old.keys() | new.keys()):
        if old.get(field) == new.get(field):
            continue
        line = f"{field}: {old.get(field)!r} -> {new.get(field)!r}"
        # A setting that did not exist when the run began is at most named.
        if field in old and not field.startswith(MAY_DIFFER):
            raise UserError(
                f"workdir={path} holds a run with another config ({line}); restore the setting or "
                "name a new directory."
            )
        changed.append(line)
    return tuple(changed)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def jsonable(tree: Any) -> Any:
    return json.loads(json.dumps(tree))  # tuples become lists, as in the recorded file
