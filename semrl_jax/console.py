"""Console output of a run: one line per step, and a progress bar with rate and time left."""

from __future__ import annotations

import collections
import contextlib
import re
import statistics
import time
from collections.abc import Iterator, Mapping

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from semrl_jax import compilation

RECENT_UNITS = 8
MAX_WIDTH = 400  # of a table, in columns


class StatusColumn(rich_progress.ProgressColumn):
    """The status of the current unit, and the program that is compiled now, if any."""

    def __init__(self):
        super().__init__(Column(no_wrap=True))

    def render(self, task: rich_progress.Task) -> Text:
        program = compilation.current()
        parts = (task.fields["status"], program and f"compiling {program}")
        return Text(", ".join(filter(None, parts)))


class Reporter:
    """Prints lines, and bars if the output is a terminal; with `quiet`, nothing."""

    def __init__(self, quiet: bool = False):
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)

    @property
    def is_terminal(self) -> bool:
        """Whether bars are shown."""
        return self._console.is_terminal

    def line(self, text: str) -> None:
        """Prints one line, above any bar."""
        self._console.print(text, markup=False)

    def table(self, table: Table) -> None:
        """Prints a table; it may be wide if the output is no terminal."""
        console = self._console
        if not console.is_terminal:
            console = Console(width=MAX_WIDTH, highlight=False, quiet=console.quiet)
        console.print(table)

    @contextlib.contextmanager
    def bar(self, what: str, total: int, unit: str, done: int = 0) -> Iterator[Bar]:
        """Shows a bar over `total` units, if the output is a terminal."""
        progress = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=20),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[pace]}"),
            rich_progress.TimeElapsedColumn(),
            StatusColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        with progress:
            progress.add_task(what, total=total, completed=done, pace="", status="")
            yield Bar(progress, unit)


class Bar:
    """Updates the only task of `progress` and estimates its end.

    The first unit is not part of the estimate, because it compiles, also when a run is resumed.
    """

    def __init__(self, progress: rich_progress.Progress, unit: str):
        self._progress = progress
        self._task = progress.tasks[0]
        self._unit = unit
        self._last_end: float | None = None  # None before the end of the first unit
        self._unit_s: collections.deque[float] = collections.deque(maxlen=RECENT_UNITS)
        self._first: tuple[float, int] | None = None  # time and count of the first `reach`

    def advance(self, status: str = "") -> None:
        """Counts one finished unit."""
        now = time.monotonic()
        if self._last_end is not None:
            self._unit_s.append(now - self._last_end)
        self._last_end = now
        self._progress.advance(self._task.id)
        pace = ""
        if self._unit_s:
            rate = 1 / max(statistics.median(self._unit_s), 1e-9)
            pace = f"{rate:.3g} {self._unit}/s, left {duration(self.left_s())}"
        self._progress.update(self._task.id, pace=pace, status=status)

    def reach(self, done: int) -> str:
        """Sets the number of finished units, for units that end in bursts.

        Returns:
          Rate and time left, from the mean since the first call; "" at the first.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        seconds, count = now - self._first[0], done - self._first[1]
        pace = ""
        if count and seconds:
            left_s = (self._task.total - done) * seconds / count
            pace = f"{count / seconds:.3g} {self._unit}/s, left {duration(left_s)}"
        self._progress.update(self._task.id, completed=done, pace=pace)
        return pace

    def left_s(self) -> float | None:
        """Seconds to the end, from the median of the last few units; None before two are done."""
        if not self._unit_s:
            return None
        return (self._task.total - self._task.completed) * statistics.median(self._unit_s)

    def status(self, status: str) -> None:
        """Shows what the current unit does."""
        self._progress.update(self._task.id, status=status)


def duration(seconds: float) -> str:
    """Formats seconds as 9:05, and from one hour as 2h05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}" if hours else f"{minutes}:{seconds:02d}"


def summary_line(
    step: int, num_steps: int, scalars: Mapping[str, float], left_s: float | None
) -> str:
    """The main numbers of a step in at most 100 columns; missing ones are left out."""
    fields = (
        ("correct ", "reward/correct", lambda v: f"{_short(100 * v):>4}%"),
        ("reward ", "reward/mean", lambda v: f"{v:+.2f}"),
        ("length ", "response/length/mean", _short),
        ("ER ", "metrics/effective_rank/mean", _short),
        ("bonus ", "shaping/bonus/mean", lambda v: f"{v:.4f}"),
        ("", "time/step_s", lambda v: f"{_short(v)} s"),
    )
    parts = [f"step {step:>4}/{num_steps}"]
    parts += [f"{name}{show(scalars[key])}" for name, key, show in fields if key in scalars]
    if left_s is not None:
        parts.append(f"left {duration(left_s)}")
    return "  ".join(parts)


def evaluation_line(step: int, scalars: Mapping[str, float]) -> str:
    """One line for each benchmark of an evaluation."""
    shown = {
        "greedy_accuracy": "correct",
        "boxed_fraction": "boxed",
        "finished_fraction": "finished",
    }
    lines: dict[str, str] = {}
    for key, value in scalars.items():
        benchmark, _, name = key.removeprefix("eval/").rpartition("/")
        if name in shown or re.fullmatch(r"(pass|maj)@\d+", name):
            line = lines.get(benchmark, f"eval {step}  {benchmark}")
            lines[benchmark] = f"{line}  {shown.get(name, name)} {_short(100 * value):>4}%"
    return "\n".join(lines.values())


def _short(value: float) -> str:
    """One decimal below 100, none above."""
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
