"""What a person sees of a run: one line a step, a progress bar with rate and time left."""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

RECENT_UNITS = 8


class Reporter:
    """Prints lines, and bars where the output is a terminal; with `quiet`, nothing."""

    def __init__(self, quiet: bool = False):
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)

    def line(self, text: str) -> None:
        """One line, above any bar."""
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def bar(self, what: str, total: int, unit: str, done: int = 0) -> Iterator[Bar]:
        """A bar over `total` units; `advance` and `status` of the context's value move it.

        Where the output is no terminal the bar is silent and the lines of the phase remain.
        """
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        with progress:
            progress.add_task(what, total=total, completed=done, rate=f"- {unit}/s", status="")
            yield Bar(progress, unit)


class Bar:
    """Moves one task and keeps its rate readable."""

    def __init__(self, progress: Progress, unit: str):
        self._progress = progress
        self._unit = unit
        # The last few units: the first one compiles, and would spoil the estimate for long.
        self._ends = collections.deque([time.monotonic()], maxlen=RECENT_UNITS + 1)

    def advance(self, steps: int = 1, status: str = "") -> None:
        self._ends.append(time.monotonic())
        task = self._progress.tasks[0]
        rate = f"{task.speed:.3g} {self._unit}/s" if task.speed else f"- {self._unit}/s"
        self._progress.update(task.id, advance=steps, rate=rate, status=status)

    def left_s(self) -> float:
        """Seconds to the end, at the median pace of the last few units."""
        task = self._progress.tasks[0]
        paces = [later - earlier for earlier, later in itertools.pairwise(self._ends)]
        return (task.total - task.completed) * statistics.median(paces or [0.0])

    def status(self, status: str) -> None:
        """Says what is going on inside the current unit."""
        self._progress.update(self._progress.tasks[0].id, status=status)


def summary_line(step: int, num_steps: int, scalars: Mapping[str, float], left_s: float) -> str:
    """The numbers a person watches, one line; what is missing is left out."""
    fields = (
        ("correct", "reward/correct", lambda v: f"{100 * v:4.1f} %"),
        ("reward", "reward/mean", lambda v: f"{v:+.3f}"),
        ("length", "response/length/mean", lambda v: f"{v:.1f}"),
        ("ER", "metrics/effective_rank/mean", lambda v: f"{v:.2f}"),
        ("bonus", "shaping/bonus/mean", lambda v: f"{v:.4f}"),
        ("loss", "policy/loss", lambda v: f"{v:+.4f}"),
        ("grad", "policy/grad_norm", lambda v: f"{v:.2f}"),
        ("sampled", "rollout/tokens_per_s", lambda v: f"{v / 1000:.1f}k tok/s"),
        ("step", "time/step_s", lambda v: f"{v:.2f} s"),
    )
    parts = [f"{name} {show(scalars[key])}" for name, key, show in fields if key in scalars]
    minutes, seconds = divmod(round(left_s), 60)
    return f"step {step:>4}/{num_steps}  " + "  ".join(parts) + f"  left {minutes}:{seconds:02d}"
