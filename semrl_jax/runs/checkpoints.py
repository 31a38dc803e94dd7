"""Checkpoints of a run: written in the background, trusted only with a matching manifest.

Orbax's CheckpointManager is not used: it removes old checkpoints before the new one has its
manifest, and reads metadata of every checkpoint, damaged ones too, before it can be asked anything.
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
from semrl_jax.errors import UserError, disk_refusal
from semrl_jax.files import remove
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
from semrl_jax.runs.joint_save import JointSave
from semrl_jax.training.state import DataPosition, TrainState

TMP_MARK = ".orbax-checkpoint-tmp"  # in the names of directories that Orbax has not finished
REMOVED = ".removed"
MANIFEST_TIMEOUT_S = 600.0
ENDED_TIMEOUT_S = 60.0  # for the others to stop writing a checkpoint that failed


class Checkpoints:
    """Saves and restores the train state of one run.

    A save that the disk refuses, be it to one of several processes, does not end the run: it is
    said in one line, what was written is removed, and the next save tries again. `failure` tells in
    the end whether the last one failed.

    Args:
      directory: made if missing; of this run alone.
      keep: newest checkpoints kept; older ones are removed after a newer one is sealed.
      every_steps: steps between two saves, see `due`; 0 leaves `extra_steps` and the last step.
      keep_every: multiples of this step are saved and kept for ever; 0: none.
      extra_steps: these steps are saved and kept for ever.
      warn: called with one line for each checkpoint that cannot be trusted or written; from
        another thread, too.
      peers: the processes that hold the state; each writes its part, process 0 alone removes.

    Attributes:
      num_failed: saves the disk refused.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep: int,
        every_steps: int = 1,
        keep_every: int = 0,
        extra_steps: Iterable[int] = (),
        warn: Callable[[str], None] = warnings.warn,
        peers: Peers | None = None,
    ):
        self.num_failed = 0
        self._peers = peers or Peers()
        self._directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._every_steps = every_steps
        self._keep_every = keep_every
        self._extra_steps = frozenset(extra_steps)
        self._warn = warn
        self._checkpointer = open_checkpointer(self._barrier)
        self._sound: set[int] = set()  # steps sealed, or restored, by this attempt
        self._unsound: set[int] = set()  # steps found not to match their manifest
        self._sealing: threading.Thread | None = None
        self._defect: Exception | None = None  # not the disk's doing; raised by wait()
        self._last_step = -1  # of the last save
        self._failure = ""  # of the last save, if the disk refused it
        # Pages of tracebacks for what is raised, too, and here becomes one line.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_of_orbax_failing)
        self._name = on_first(self._peers, "open_checkpoints", self._make_directory)
        self._num_saves = 0
        self._joint = JointSave(self._name, self._peers)

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the state after `step` of `num_steps` updates is to be saved."""
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
        # A directory that process 0 could not make would leave the others waiting for it.
        refused = on_first(self._peers, "checkpoint", lambda: self._make_room(step))
        if refused:
            self._note_refusal(step, refused)
            return
        try:
            self._checkpointer.save(
                self._directory / str(step),
                args=save_args(state._replace(position=None), step, state.position),
            )
        except Exception as error:
            self._failed(step, error)
            return
        self._last_step = step
        self._sealing = threading.Thread(target=self._seal, args=(step,), name="seal-checkpoint")
        self._sealing.start()

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest checkpoint whose files match their manifest, or None.

        Each newer one that cannot be trusted is named by `warn`, and so is a start from nothing
        because none can.

        Args:
          like: a state with the shapes, dtypes and shardings to restore into.

        Raises:
          UserError: if a sound checkpoint was written by a newer format, or holds a state of other
            names, shapes or dtypes than `like`.
        """
        self.wait()
        like = like._replace(position=None)
        steps = on_first(self._peers, "restore", lambda: checkpoint_steps(self._directory))
        for step in reversed(steps):
            folder = self._directory / str(step)
            problem = on_first(self._peers, "restore", lambda: checkpoint_problem(folder))  # noqa: B023
            if not problem:
                meta = read_meta(folder)
                try:
                    run_phase(self._peers, "restore", lambda: check_structure(folder, like))  # noqa: B023
                    with self._peers.phase("restore"):
                        state = restore_tree(folder, like)
                except Exception as error:
                    is_damaged = isinstance(error, UnreadableError)
                    if meta["format_version"] > 1 or (
                        isinstance(error, UserError) and not is_damaged
                    ):
                        raise
                    # Format 1 leaves tensorstore's own manifests out of ours.
                    problem = f"it cannot be read ({_first_line(error)})"
            if problem:
                self._unsound.add(step)
                self._warn(f"checkpoint {step} is not used: {problem}.")
                continue
            self._sound.add(step)
            return state._replace(position=DataPosition(**meta["position"]))
        if steps:
            self._warn(
                f"none of the {len(steps)} checkpoints in {self._directory} can be trusted: the "
                "run starts again from step 0."
            )
        return None

    def wait(self) -> None:
        """Returns when the last save is sealed or has failed; raises a failure of other causes
        than the disk."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect

    def failure(self) -> str:
        """Waits for the last save; what the disk refused it with, "" if it is sealed."""
        run_phase(self._peers, "checkpoint", self.wait)
        self._agree_on_failure()
        return self._failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _seal(self, step: int) -> None:
        try:
            self._checkpointer.wait_until_finished()
            write_manifest(self._directory / str(step))
            # Without the others' this checkpoint does not replace another.
            self._joint.wait("sealed", MANIFEST_TIMEOUT_S)
            self._sound.add(step)
            self._unsound.discard(step)
            self._failure = ""
            if self._peers.index == 0:
                self._prune()
            self._joint.arrive("ended")
        except Exception as error:  # handed to the thread that asks, by wait()
            self._failed(step, error)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's, between the writing of all processes and the renaming by process 0."""
        self._joint.wait(key, timeout_ms / 1000)

    def _agree_on_failure(self) -> None:
        """What one process could not write none has written."""
        found = list(filter(None, self._peers.gather("checkpoint", self._failure)))
        if found and not self._failure:
            self._failure = found[0]
            self._sound.discard(self._last_step)

    def _make_directory(self) -> str:
        """Returns a name for what the processes tell each other of this attempt's saves."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        return f"semrl-checkpoints-{secrets.token_hex(8)}"

    def _make_room(self, step: int) -> str:
        """Removes leftovers, and this step's: left unsealed by a kill, or altered since; sealing
        it now would vouch for its files.

        Returns what the disk refuses this, or a small file, with; "" if nothing.
        """
        probe = self._directory / f"{step}{TMP_MARK}-probe"
        try:
            self._sweep()
            self._remove(step)
            probe.mkdir()
            (probe / "file").write_bytes(bytes(4096))
            remove(probe)
        except OSError as error:
            if disk_refusal(error) is None:
                raise
            return disk_refusal(error).strerror
        return ""

    def _prune(self) -> None:
        """Removes what need not be kept; only called when a checkpoint has just been sealed.

        An unsound one counts for nothing and goes as soon as a newer one is sound. Those before
        the restored one were not looked at and count as sound: `keep` newer ones are.
        """
        steps = [step for step in checkpoint_steps(self._directory) if step not in self._unsound]
        kept = self._extra_steps.union(
            steps[-self._keep :],
            (step for step in steps if self._keep_every and step % self._keep_every == 0),
        )
        overtaken = (step for step in self._unsound if step < max(self._sound))
        for step in (set(steps) - kept).union(overtaken):
            self._remove(step)
            self._sound.discard(step)
        self._unsound = {step for step in self._unsound if step > max(self._sound)}

    def _remove(self, step: int) -> None:
        """Removes a checkpoint, if it is there."""
        folder = self._directory / str(step)
        if os.path.lexists(folder):
            # One rename first: a kill in the middle must not leave half a checkpoint.
            removed = folder.with_name(folder.name + REMOVED)
            remove(removed)
            folder.rename(removed)
            remove(removed)

    def _sweep(self) -> bool:
        """Removes what a kill or a failed save left half-written; False if some of it resists."""
        try:
            for entry in self._directory.iterdir():
                if TMP_MARK in entry.name or entry.name.endswith(REMOVED):
                    remove(entry)
        except OSError:
            return False
        return True

    def _failed(self, step: int, error: Exception) -> None:
        refusal = disk_refusal(error)
        # Noted first: what follows may fail as well.
        if refusal is None:
            self._defect = error
        else:
            self._note_refusal(step, refusal.strerror)
        self._joint.fail(refusal or error)
        if refusal is not None:
            # The old one would tell the next save of errors of this one.
            failed, self._checkpointer = self._checkpointer, open_checkpointer(self._barrier)
            with contextlib.suppress(Exception):
                failed.close()
            if self._peers.index == 0:
                # While another writes nothing is removed; what is left goes at the next save.
                with contextlib.suppress(TimeoutError):
                    self._joint.wait("ended", ENDED_TIMEOUT_S, whatever_failed=True)
                    self._clear(step)
        self._joint.arrive("ended")

    def _note_refusal(self, step: int, reason: str) -> None:
        self.num_failed += 1
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
        """Removes what was written of a checkpoint, as far as the disk lets it."""
        with contextlib.suppress(OSError):
            self._remove(step)
        # Other threads of Orbax may go on writing for a moment; what they leave later goes at the
        # next save or start.
        for _ in range(20):
            if self._sweep():
                break
            time.sleep(0.1)


def _is_not_of_orbax_failing(record: logging.LogRecord) -> bool:
    source = record.pathname + record.getMessage()
    return record.levelno < logging.ERROR or "orbax" not in source


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
