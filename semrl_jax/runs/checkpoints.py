"""Checkpoints of a run: written in the background, trusted only with a matching manifest.

Orbax's CheckpointManager is not used, for two reasons. It removes old checkpoints before the new
one has its manifest. It reads the metadata of every checkpoint when it opens, also of damaged ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable

from semrl_jax.cluster.agreement import on_first, run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.models import Params
from semrl_jax.runs.adapters import AdapterRecord, check_resumed
from semrl_jax.runs.checkpoint_exchange import TIMEOUT_S as EXCHANGE_TIMEOUT_S
from semrl_jax.runs.checkpoint_exchange import TMP_MARK, CheckpointExchange
from semrl_jax.runs.checkpoint_files import (
    UnreadableError,
    check_structure,
    checkpoint_problem,
    checkpoint_steps,
    open_checkpointer,
    read_meta,
    restore_tree,
    save_args,
    write_manifest,
)
from semrl_jax.runs.copies import Copies
from semrl_jax.runs.export import MODEL, Exporter
from semrl_jax.runs.joint_save import JointSave
from semrl_jax.support.errors import UserError, disk_refusal
from semrl_jax.support.safe_files import remove
from semrl_jax.training.train_state import DataPosition, TrainState

REMOVED = ".removed"
MANIFEST_TIMEOUT_S = 600.0
SAVE_TIMEOUT_S = 600.0  # for Orbax to write
ENDED_TIMEOUT_S = 60.0  # for the other processes to stop writing a failed checkpoint


class Checkpoints:
    """Saves and restores the train state of one run.

    A checkpoint is sealed when all processes have written their manifests. A save that fails
    because of the disk does not end the run. It is reported in one line, its files are removed, and
    the next save tries again. At the end, `failure` tells whether the last save failed.

    Args:
      directory: made if missing; used by this run only.
      keep, every_steps, keep_every, extra_steps, export, copy_to: as in `config.checkpoints`. Old
        checkpoints are removed after a newer one is sealed. The parent of `directory` is copied.
      warn: gets a line for each that cannot be trusted or written, also from another thread.
      peers: the processes that hold the state. Each writes its part; only process 0 removes.
      shared: whether they share a disk. If not, the checkpoints are those of process 0, and the
        parts of the others get there and back through `copy_to`.
      adapter: what the parameters are, if they are adapters.
      exporter: writes the model of a checkpoint, if `export` is not empty.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep: int,
        every_steps: int = 1,
        keep_every: int = 0,
        extra_steps: Iterable[int] = (),
        export: str = "",
        copy_to: str = "",
        warn: Callable[[str], None] = warnings.warn,
        peers: Peers | None = None,
        shared: bool = True,
        adapter: AdapterRecord | None = None,
        exporter: Exporter | None = None,
    ):
        self._peers = peers or Peers()
        self._directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._every_steps = every_steps
        self._keep_every = keep_every
        self._extra_steps = frozenset(extra_steps)
        self._warn = warn
        self.adapter = adapter
        self._exporter = exporter if export else None
        self._timeout_s = SAVE_TIMEOUT_S if shared else EXCHANGE_TIMEOUT_S
        self._checkpointer = open_checkpointer(self._barrier, self._timeout_s)
        self._sound: set[int] = set()  # steps sealed or restored by this attempt
        self._unsound: set[int] = set()  # steps that do not match their manifest
        self._sealing: threading.Thread | None = None
        self._defect: Exception | None = None  # not caused by the disk; raised by wait()
        self._last_step = -1  # of the last save
        self._failure = ""  # of the last save, if the disk caused it
        # For errors that it also raises, Orbax logs pages of tracebacks. Here they become one line.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_of_orbax_failing)
        self._name = on_first(self._peers, "open_checkpoints", self._make_directory)
        self._copies: Copies | None = None
        if copy_to and (self._peers.index == 0 or not shared):
            place = copy_to, self._directory.parent
            self._copies = Copies(*place, self._kept, warn, apart=not shared)
        self._exchange = (
            None if shared else CheckpointExchange(self._copies, self._directory, self._peers)
        )
        self._num_saves = 0
        self._joint = JointSave(self._name, self._peers)

    def due(self, step: int, num_steps: int) -> bool:
        """Whether to save the state after `step` of `num_steps` updates."""
        return (
            step == num_steps
            or step in self._extra_steps
            or any(every and step % every == 0 for every in (self._every_steps, self._keep_every))
        )

    def save(self, state: TrainState) -> None:
        """Starts writing the state; arrays may be donated as soon as this returns."""
        run_phase(self._peers, "checkpoint", self.wait)
        self._agree_on_failure()
        step = int(state.step)
        if step in self._sound:
            return
        self._num_saves += 1
        self._joint = JointSave(f"{self._name}/{self._num_saves}", self._peers)
        # Agree first: if process 0 cannot make the directory, the others must not wait for it.
        refused = on_first(self._peers, "checkpoint", lambda: self._make_room(step))
        if self._exporter and not refused:
            params = self._exporter.whole(state.params, self._peers)
            refused = on_first(self._peers, "checkpoint", lambda: self._write_model(step, params))
        if refused:
            self._note_refusal(step, refused)
            return
        if self._exchange:
            self._exchange.begin(step)
        try:
            self._checkpointer.save(
                self._directory / str(step),
                args=save_args(
                    state._replace(position=None),
                    step,
                    state.position,
                    self.adapter.meta() if self.adapter else {},
                ),
            )
        except Exception as error:
            self._failed(step, error)
            return
        self._last_step = step
        self._sealing = threading.Thread(target=self._seal, args=(step,), name="seal-checkpoint")
        self._sealing.start()

    def restore(self, like: TrainState) -> TrainState | None:
        """Restores the newest checkpoint whose files match their manifest; None if there is none.

        `warn` gets a line for each newer one that cannot be trusted. UserError for a newer format,
        adapters of another base, or a state of other names, shapes or dtypes than `like`.
        """
        self.wait()
        like = like._replace(position=None)
        steps = on_first(self._peers, "restore", lambda: checkpoint_steps(self._directory))
        for step in reversed(steps):
            folder = self._directory / str(step)
            problem = on_first(self._peers, "restore", lambda: checkpoint_problem(folder))  # noqa: B023
            if not problem:
                if self._exchange:
                    self._exchange.hand_out(step)
                meta = read_meta(folder)
                check_resumed(meta, self.adapter, folder)
                try:
                    run_phase(self._peers, "restore", lambda: check_structure(folder, like))  # noqa: B023
                    with self._peers.phase("restore"):
                        state = restore_tree(folder, like)
                    if self._exchange:
                        self._exchange.remove_own()
                    self._sound.add(step)
                    if self._copies is not None and step == steps[-1]:
                        self._copies.expect(step)
                    return state._replace(position=DataPosition(**meta["position"]))
                except Exception as error:
                    is_mistake = isinstance(error, UserError)
                    if meta["format_version"] > 1 or (
                        is_mistake and not isinstance(error, UnreadableError)
                    ):
                        raise
                    # In format 1, our manifest does not cover tensorstore's own manifests.
                    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
                    problem = f"it cannot be read ({first_line})"
            self._unsound.add(step)
            self._warn(f"checkpoint {step} is not used: {problem}.")
        if steps:
            self._warn(
                f"none of the {len(steps)} checkpoints in {self._directory} can be trusted: the "
                "run starts again from step 0."
            )
        return None

    @property
    def sealed(self) -> int:
        """The newest step that this attempt has sealed or restored; 0 if there is none."""
        return max(self._sound, default=0)

    def wait(self) -> None:
        """Waits for the end of the last save; raises its error if the disk was not the cause."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect

    def failure(self) -> str:
        """Waits for the last save; returns the reason if the disk made it fail, "" if sealed."""
        run_phase(self._peers, "checkpoint", self.wait)
        self._agree_on_failure()
        return self._failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            if self._copies is not None and self._peers.index == 0:
                self._copies.close()
                if self._sound:
                    self._prune()

    def _seal(self, step: int) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if self._exporter:
                if self._peers.index == 0:
                    self._staged(step).rename(self._directory / str(step) / MODEL)
                self._joint.wait(MODEL, MANIFEST_TIMEOUT_S)  # manifests have its files
            if not self._exchange:
                write_manifest(self._directory / str(step))
            elif self._exchange.lends:
                self._exchange.remove_own()
            else:
                write_manifest(self._directory / str(step), of_all=True)
            # Without all manifests, this checkpoint must not replace an older one.
            self._joint.wait("sealed", MANIFEST_TIMEOUT_S)
            self._sound.add(step)
            self._unsound.discard(step)
            self._failure = ""
            if self._peers.index == 0:
                self._prune()
                if self._copies is not None:
                    self._copies.offer(step)
            self._joint.arrive("ended")
        except Exception as error:  # wait() raises it in the calling thread
            self._failed(step, error)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Orbax calls this after all processes have written and before process 0 renames.

        It calls it again after that, with another key.
        """
        with self._exchange.exchanged(key) if self._exchange else contextlib.nullcontext():
            self._joint.wait(key, timeout_ms / 1000)

    def _agree_on_failure(self) -> None:
        """Makes a save fail in all processes if it failed in one."""
        found = list(filter(None, self._peers.gather("checkpoint", self._failure)))
        if found and not self._failure:
            self._failure = found[0]
            self._sound.discard(self._last_step)

    def _make_directory(self) -> str:
        """Makes the directory; returns a name for the processes' messages about saves."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        return f"semrl-checkpoints-{secrets.token_hex(8)}"

    def _make_room(self, step: int) -> str:
        """Removes leftovers and an existing checkpoint of this step, and tries to write.

        The existing checkpoint was not sealed because of a kill, or was altered later. A manifest
        written now would declare its files valid. Returns why the disk does not allow this, or "".
        """
        probe = self._directory / f"{step}{TMP_MARK}-probe"
        try:
            self._sweep()
            self._remove(step)
            probe.mkdir()
            (probe / "file").write_bytes(bytes(4096))
            remove(probe)
            if self._exchange:
                self._copies.clear(step)
        except OSError as error:
            if disk_refusal(error) is None:
                raise
            return disk_refusal(error).strerror
        return ""

    def _staged(self, step: int) -> pathlib.Path:
        """Where the model of a checkpoint is until the checkpoint is there."""
        return self._directory / f"{step}{TMP_MARK}-{MODEL}"

    def _write_model(self, step: int, params: Params) -> str:
        """Returns why the disk does not allow this, or ""."""
        try:
            self._exporter.write(self._staged(step), params)
        except Exception as error:
            if disk_refusal(error) is None:
                raise
            self._sweep()
            return disk_refusal(error).strerror
        return ""

    def _prune(self) -> None:
        """Removes checkpoints that need not be kept; called only after a checkpoint was sealed.

        An invalid checkpoint does not count. It is removed once a newer one is valid. Checkpoints
        older than the restored one were not verified and count as valid. This is safe, because
        `keep` newer ones are valid before they are removed. If one cannot be removed, such as on
        NFS while another process reads it, the new one stays, and the next call tries again.
        """
        try:
            self._remove_old()
        except OSError as error:
            self._warn(f"old checkpoints are not removed ({error}); the next save tries again.")

    def _remove_old(self) -> None:
        steps = [step for step in checkpoint_steps(self._directory) if step not in self._unsound]
        kept = self._kept(steps)
        if self._copies is not None:
            kept |= self._copies.in_use
        overtaken = (step for step in self._unsound if step < max(self._sound))
        for step in (set(steps) - kept).union(overtaken):
            self._sound.discard(step)
            self._remove(step)
        self._unsound = {step for step in self._unsound if step > max(self._sound)}

    def _kept(self, steps: list[int]) -> set[int]:
        """Which of these steps, in order, need their checkpoint."""
        multiples = (step for step in steps if self._keep_every and step % self._keep_every == 0)
        return {*self._extra_steps, *steps[-self._keep :], *multiples}

    def _remove(self, step: int) -> None:
        """Removes a checkpoint if it exists."""
        folder = self._directory / str(step)
        if os.path.lexists(folder):
            # Rename first, so that a kill during the removal does not leave half a checkpoint.
            removed = folder.with_name(folder.name + REMOVED)
            remove(removed)
            folder.rename(removed)
            remove(removed)

    def _sweep(self) -> bool:
        """Removes incomplete files of a kill or a failed save; False if some cannot be removed."""
        try:
            for entry in self._directory.iterdir():
                if TMP_MARK in entry.name or entry.name.endswith(REMOVED):
                    remove(entry)
        except OSError:
            return False
        return True

    def _failed(self, step: int, error: Exception) -> None:
        refusal = disk_refusal(error)
        # Record the failure first, because the following calls may fail too.
        if refusal is None:
            self._defect = error
        else:
            self._note_refusal(step, refusal.strerror)
        self._joint.fail(refusal or error)
        if refusal is not None:
            # The old checkpointer would report this save's errors at the next save.
            failed = self._checkpointer
            self._checkpointer = open_checkpointer(self._barrier, self._timeout_s)
            with contextlib.suppress(Exception):
                failed.close()
            if self._peers.index == 0:
                # Remove nothing while another process writes. The next save removes the rest.
                with contextlib.suppress(TimeoutError):
                    self._joint.wait("ended", ENDED_TIMEOUT_S, whatever_failed=True)
                    self._clear(step)
        self._joint.arrive("ended")

    def _note_refusal(self, step: int, reason: str) -> None:
        self._sound.discard(step)
        free = ""
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(self._directory).free / 2**20:.0f} MiB free in "
        good = f"step {max(self._sound)}" if self._sound else "none"
        self._failure = (
            f"the checkpoint of step {step} could not be written: {reason} "
            f"({free}{self._directory}; last good checkpoint: {good})"
        )
        self._warn(f"{self._failure}; the next one tries again.")

    def _clear(self, step: int) -> None:
        """Removes the files of a failed checkpoint, as far as possible."""
        with contextlib.suppress(OSError):
            self._remove(step)
        # Other threads of Orbax may write for a moment longer. Files that they leave later are
        # removed at the next save or start.
        for _ in range(20):
            if self._sweep():
                break
            time.sleep(0.1)


def _is_not_of_orbax_failing(record: logging.LogRecord) -> bool:
    source = record.pathname + record.getMessage()
    return record.levelno < logging.ERROR or "orbax" not in source
