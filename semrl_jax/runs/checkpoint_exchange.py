"""Checkpoints of processes that share no disk: what each writes gets to process 0 through a store.

Orbax lets every process write its arrays to `<step>/state/ocdbt.process_<n>`. Then process 0 merges
their indices and renames the directory. In between, process 0 gets the files of the others, so that
its checkpoints are whole. To restore one, the others get all of it, for a while.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator

from semrl_jax.cluster.agreement import run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs.checkpoint_files import checkpoint_problem
from semrl_jax.runs.copies import Copies, StoreError
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import remove

TMP_MARK = ".orbax-checkpoint-tmp"  # in the names of directories that Orbax has not finished
WRITTEN = "async_write_complete"  # in the name of Orbax's barrier after all have written
TIMEOUT_S = 3600.0  # of a save


class CheckpointExchange:
    """The exchange of one run; `directory` has the checkpoints of this process."""

    def __init__(self, copies: Copies, directory: pathlib.Path, peers: Peers):
        self._copies, self._directory, self._peers = copies, directory, peers
        self.lends = peers.index > 0  # this disk has only parts, for a while
        self._step = -1  # that is being saved
        if self.lends:
            remove(directory)
            directory.mkdir(parents=True)

    def begin(self, step: int) -> None:
        """To call before Orbax saves a step; the copy of it has been cleared."""
        self._step = step
        if self.lends:
            self.remove_own()
            # Orbax waits until process 0 has made this directory, and it will not on this disk.
            self._place("state/array_metadatas").mkdir(parents=True)

    @contextlib.contextmanager
    def exchanged(self, barrier: str) -> Iterator[None]:
        """If this is the barrier after all have written, process 0 gets the files of the others."""
        is_due = WRITTEN in barrier
        if is_due and self.lends:
            top = self._directory / f"{self._step}{TMP_MARK}"
            files = (file for file in top.rglob("*") if file.is_file())
            named = {file.relative_to(top).as_posix().replace(TMP_MARK, ""): file for file in files}
            self._copies.send(self._step, named)
        yield
        if is_due and not self.lends:
            self._copies.fetch(self._step, self._place)

    def hand_out(self, step: int) -> None:
        """Brings a valid checkpoint of process 0 to the disks of the others; all call it."""
        folder = self._directory / str(step)

        def fetch() -> None:
            self._copies.fetch(step, lambda name: folder / name)
            if problem := checkpoint_problem(folder):
                raise StoreError(problem)

        def move(is_due: bool, work: Callable[[], None]) -> None:
            try:
                if is_due:
                    work()
            except StoreError as error:
                raise UserError(
                    f"checkpoints.copy_to: checkpoint {step} did not get to all processes "
                    f"({error}); start again when it can."
                ) from None

        publish = functools.partial(self._copies.publish, step)
        run_phase(self._peers, "restore", lambda: move(not self.lends, publish))
        run_phase(self._peers, "restore", lambda: move(self.lends, fetch))

    def remove_own(self) -> None:
        """Removes what this process holds only for a while."""
        if self.lends:
            for entry in self._directory.iterdir():
                remove(entry)

    def _place(self, name: str) -> pathlib.Path:
        """Where Orbax writes a file of the step that is being saved, before it renames."""
        item, _, rest = name.partition("/")
        return self._directory / f"{self._step}{TMP_MARK}" / f"{item}{TMP_MARK}" / rest
