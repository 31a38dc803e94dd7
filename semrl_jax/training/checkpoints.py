"""Checkpoints: written by Orbax in the background, trusted only with a matching manifest.

`checkpoints/<step>/` holds the state, `meta` (format version, step, data position) and, once all of
it is on disk, `manifest.<process>.json` with size and SHA-256 of every file. Orbax alone restores
flipped bits without a word; a checkpoint without its manifest is a torn one.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import threading
import warnings
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from semrl_jax.training.state import DataPosition, TrainState

FORMAT_VERSION = 1


class Checkpoints:
    """Saves and restores the train state of one run.

    Args:
      directory: made if missing.
      keep: checkpoints kept; older ones are removed after a newer one is complete.
      warn: called with one line for each checkpoint that cannot be trusted.
    """

    def __init__(
        self, directory: pathlib.Path, *, keep: int, warn: Callable[[str], None] = warnings.warn
    ):
        self._directory = directory
        self._warn = warn
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
            item_names=("state", "meta"),
        )
        self._sound: set[int] = set()  # steps sealed, or restored, by this attempt
        self._sealing: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, state: TrainState) -> None:
        """Starts writing the state; arrays may be donated as soon as this returns."""
        self.wait()
        step = int(state.step)
        if step in self._sound:
            return
        if step in self._manager.all_steps():
            # Left unsealed by a kill, or altered since: sealing it now would vouch for its files.
            self._manager.delete(step)
        meta = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "position": {"epoch": state.position.epoch, "cursor": state.position.cursor},
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._replace(position=None)),
                meta=ocp.args.JsonSave(meta),
            ),
        )
        self._sealing = threading.Thread(target=self._seal, args=(step,), name="seal-checkpoint")
        self._sealing.start()

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest checkpoint whose files match their manifest, or None.

        Args:
          like: a state with the shapes, dtypes and shardings to restore into.

        Raises:
          RuntimeError: if a sound checkpoint was written by a newer format.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            problem = self._problem(step)
            if problem:
                self._warn(f"checkpoint {step} is not used: {problem}.")
                continue
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
                like._replace(position=None),
            )
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
                ),
            )
            if restored.meta["format_version"] > FORMAT_VERSION:
                raise RuntimeError(
                    f"checkpoint {step} has format_version={restored.meta['format_version']}, but "
                    f"this version of semrl_jax reads up to {FORMAT_VERSION}; update semrl_jax."
                )
            self._sound.add(step)
            return restored.state._replace(position=DataPosition(**restored.meta["position"]))
        return None

    def wait(self) -> None:
        """Returns when the last save is complete on disk; raises what it failed with."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _seal(self, step: int) -> None:
        try:
            self._manager.wait_until_finished()
            folder = self._directory / str(step)
            manifest = self._manifest_file(step)
            staging = manifest.with_suffix(".writing")
            staging.write_text(json.dumps(file_checksums(folder), indent=1) + "\n")
            staging.rename(manifest)
            self._sound.add(step)
        except Exception as error:  # handed to the thread that asked, by wait()
            self._failure = error

    def _manifest_file(self, step: int) -> pathlib.Path:
        return self._directory / str(step) / f"manifest.{jax.process_index()}.json"

    def _problem(self, step: int) -> str:
        """What is wrong with a checkpoint, "" if nothing."""
        try:
            recorded = json.loads(self._manifest_file(step).read_text())
        except (OSError, ValueError):
            return f"{self._manifest_file(step)} is missing or unreadable, so it was not completed"
        found = file_checksums(self._directory / str(step))
        for name in sorted(recorded.keys() | found.keys()):
            if name not in found:
                return f"{name} is missing"
            if name not in recorded:
                return f"{name} is not in its manifest"
            if found[name] != recorded[name]:
                return f"{name} has been altered"
        return ""


def file_checksums(folder: pathlib.Path) -> dict[str, list]:
    """[size in bytes, hex SHA-256] of every file below a folder, manifests left out."""
    return {
        str(file.relative_to(folder)): [
            file.stat().st_size,
            hashlib.file_digest(file.open("rb"), "sha256").hexdigest(),
        ]
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith("manifest.")
    }
