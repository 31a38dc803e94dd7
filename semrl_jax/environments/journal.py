"""Answers of environments on the disk: a run that was killed does not ask for them again."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from semrl_jax.support.safe_files import check_regular, parse_json, remove, through_no_link

MAX_LINE_BYTES = 1 << 26  # a longer one is not read, so that its environment is asked again


class Place(NamedTuple):
    """Whose answers these are: `episode` is unique among episodes with the weights of `step`."""

    step: int
    episode: str


class Reply(NamedTuple):
    """What came of a call of `step`."""

    value: Any  # what it returned, as JSON has it
    error: str  # "" or why it returned nothing
    seconds: float  # that it took


class Journal:
    """The answers that a run may need again; safe to use from several threads.

    An answer is one JSON object in a line of `<step>.<process>.jsonl`, written before it is used.
    It is found again by place and turn, if all that was said before is the same. Lines that a kill
    left incomplete are passed over. A loss of power may cost the last lines. The directory is made
    if missing, and shared by the processes. Raises UserError if a file is no regular file.
    """

    def __init__(self, directory: pathlib.Path, process: int = 0):
        self._directory, self._process = directory, process
        self._lock = threading.Lock()  # guards the answers, by step, then by episode and turn
        self._answers: dict[int, dict[tuple[str, int], tuple[str, Reply]]] = {}
        directory.mkdir(exist_ok=True)
        for step, file in self._files():
            self._answers.setdefault(step, {}).update(_read(file))

    def has(self, place: Place) -> bool:
        """Whether there is an answer to the first message of an episode."""
        with self._lock:
            return (place.episode, 0) in self._answers.get(place.step, {})

    def find(self, place: Place, turn: int, said: str) -> Reply | None:
        """The reply in this turn, or None; `said` is a hash of all that was said before."""
        with self._lock:
            found = self._answers.get(place.step, {}).get((place.episode, turn))
        return found[1] if found is not None and found[0] == said else None

    def add(self, place: Place, turn: int, said: str, reply: Reply) -> None:
        """Keeps a reply; OSError: the disk refuses it, UserError: its file is a link or a pipe."""
        line = {"episode": place.episode, "turn": turn, "said": said, **reply._asdict()}
        # The end of a line comes first, so that a line that a kill cut does not spoil the next one.
        content = b"\n" + json.dumps(line).encode()
        file = self._directory / f"{place.step:06d}.{self._process}.jsonl"
        with self._lock:
            with open(file, "ab", buffering=0, opener=through_no_link) as out:
                while content:
                    content = content[out.write(content) :]
            self._answers.setdefault(place.step, {})[place.episode, turn] = said, reply

    def forget(self, trained: int, sealed: int) -> None:
        """Drops answers of early steps.

        Args:
          trained: this process needs no answer of a step before this one.
          sealed: nor does a run that is killed now.
        """
        with self._lock:
            for step in [step for step in self._answers if step < trained]:
                del self._answers[step]
        for step, file in self._files():
            if step < sealed:
                file.unlink(missing_ok=True)

    def end(self) -> None:
        """Removes all answers: the run is finished."""
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            remove(self._directory)

    def _files(self) -> Iterator[tuple[int, pathlib.Path]]:
        for file in sorted(self._directory.iterdir()):
            if name := re.fullmatch(r"(\d+)\.\d+\.jsonl", file.name):
                yield int(name[1]), file


def _read(file: pathlib.Path) -> Iterator[tuple[tuple[str, int], tuple[str, Reply]]]:
    """The complete lines of a file: episode and turn, then hash and reply."""
    check_regular(file)
    with open(file, "rb") as lines:
        for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = parse_json(line)
                reply = Reply(found["value"], str(found["error"]), float(found["seconds"]))
                yield (str(found["episode"]), int(found["turn"])), (found["said"], reply)
