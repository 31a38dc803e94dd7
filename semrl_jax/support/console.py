"""Console output of a run: one line per step, and a progress bar with rate and time left."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from semrl_jax.support import compilation, notebook

RECENT_UNITS = 8
MAX_WIDTH = 400  # of a table, in columns
LINE_WIDTH = 100  # of the line of a step or of an evaluation
NAME_WIDTH = 40  # of a benchmark in such a line
BAR_WIDTH, SMALL_BAR_WIDTH = 20, 8


class StatusColumn(rich_progress.ProgressColumn):
    """The status of the current unit, and the program that is compiled now, if any.

    It is the only column that may be narrower than its text.
    """

    def render(self, task: rich_progress.Task) -> Text:
        program = compilation.current()
        parts = (task.fields["status"], program and f"compiling {program}")
        return Text(", ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis")


class Reporter:
    """Prints lines, and bars if the output is a terminal or a cell of a notebook.

    Elsewhere it prints text without control characters. `silent` is for all processes but one;
    `quiet` prints only notices: what ends, and what needs attention.
    """

    def __init__(self, silent: bool = False, quiet: bool = False):
        self._quiet = quiet
        self._in_cell = notebook.is_notebook() and not silent
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._console = Console(
            highlight=False,
            soft_wrap=True,
            quiet=silent,
            force_terminal=is_terminal,  # rich would also obey FORCE_COLOR
            force_jupyter=False,  # a notebook would get an HTML object for each line
        )

    @property
    def shows_bars(self) -> bool:
        """Whether bars are shown."""
        return (self._console.is_terminal or self._in_cell) and not self._quiet

    def line(self, text: str) -> None:
        """Prints one line, above any bar; nothing if quiet."""
        if not self._quiet:
            self._console.print(text, markup=False)

    def notice(self, text: str) -> None:
        """Prints a line also if quiet."""
        self._console.print(text, markup=False)

    def ending(
        self, line: str, places: Mapping[str, str], commands: Sequence[Sequence[str]] = ()
    ) -> None:
        """Prints the last block, also if quiet; `commands` to try next, if they exist."""
        self.notice(line)
        width = max(map(len, places), default=0) + 2
        for name, place in places.items():
            self._console.print(Text(f"  {name:<{width}}", "bold"), place, sep="", markup=False)
        found = [command for command in commands if importlib.util.find_spec(command[0])]
        if found:
            self.notice("next:")
        for command in found:
            self._console.print(Text(f"  python -m {shlex.join(command)}", "cyan"))

    def table(self, table: Table) -> None:
        """Prints a table, also if quiet; it may be wide if the output is no terminal."""
        console = self._console
        if not console.is_terminal:
            console = Console(
                width=MAX_WIDTH,
                highlight=False,
                quiet=console.quiet,
                force_terminal=False,
                force_jupyter=self._in_cell,
            )
        console.print(table)

    @contextlib.contextmanager
    def bar(self, what: str, total: int, unit: str, done: int = 0) -> Iterator[Bar]:
        """Shows a bar over `total` units, if bars are shown."""
        bar_width = BAR_WIDTH if self._console.width >= LINE_WIDTH else SMALL_BAR_WIDTH
        progress = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),  # maybe a directory
            rich_progress.BarColumn(bar_width=bar_width),
            rich_progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            rich_progress.TextColumn("{task.fields[pace]}"),
            rich_progress.TimeElapsedColumn(table_column=Column(no_wrap=True)),
            StatusColumn(),
            console=self._console,
            disable=not self.shows_bars or self._in_cell,
            transient=True,
        )
        with progress:
            progress.add_task(what, total=total, completed=done, pace="", status="", line="")
            if self._in_cell and self.shows_bars:
                with notebook.shown(progress.tasks[0], _text_after_bar):
                    yield Bar(progress, unit, say=None)
            else:
                yield Bar(progress, unit, self.line)


class Bar:
    """Updates the only task of `progress` and estimates its end.

    The first unit is not part of the estimate, because it compiles, also when a run is resumed.
    `say` prints the lines of finished units; None: the bar has room for the last one.
    """

    def __init__(
        self, progress: rich_progress.Progress, unit: str, say: Callable[[str], None] | None
    ):
        self._progress, self._say = progress, say
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
        """Sets the number of finished units, which end in bursts; returns rate and time left."""
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

    def line(self, line: str) -> None:
        """Prints the line of a finished unit. In a cell, it replaces the one before."""
        if self._say is None:
            self._progress.update(self._task.id, line=line)
        else:
            self._say(line)


def _text_after_bar(task: rich_progress.Task) -> str:
    """Count, pace, elapsed time and status."""
    count, status = f"{task.completed:g}/{task.total:g}", StatusColumn().render(task).plain
    parts = count, task.fields["pace"], f"after {duration(task.elapsed or 0)}", status
    return ", ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Formats seconds as 9:05, and from one hour as 2h05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}" if hours else f"{minutes}:{seconds:02d}"


def summary_line(
    step: int, num_steps: int, scalars: Mapping[str, float], left_s: float | None
) -> str:
    """The main numbers of a step, as many as fit into LINE_WIDTH columns."""
    fields = (
        ("correct ", "reward/correct", lambda v: f"{_short(100 * v):>4}%"),
        ("reward ", "reward/mean", lambda v: f"{v:+.2f}" if abs(v) < 1e4 else f"{v:+.1e}"),
        ("length ", "response/length/mean", _short),
        ("turns ", "episode/turns/mean", _short),
        ("env ", "time/environment_s", lambda v: f"{_short(v)} s"),
        ("failed ", "episode/failed_fraction", lambda v: f"{_short(100 * v)}%" if v else ""),
        ("ER ", "metrics/effective_rank/mean", _short),
        ("bonus ", "shaping/bonus/mean", lambda v: f"{v:.4f}" if abs(v) < 100 else f"{v:.1e}"),
        ("", "time/step_s", lambda v: f"{_short(v)} s"),
    )
    shown = [(name, show(scalars[key])) for name, key, show in fields if key in scalars]
    parts = [f"{name}{value}" for name, value in shown if value]
    if left_s:
        parts.append(f"left {duration(left_s)}")
    return fitted(f"step {step:>4}/{num_steps}", parts)


def evaluation_line(step: int, scalars: Mapping[str, float]) -> str:
    """One line for each benchmark of an evaluation, each of at most LINE_WIDTH columns."""
    shown = {
        "greedy_accuracy": "correct",
        "boxed_fraction": "boxed",
        "finished_fraction": "finished",
    }
    lines: dict[str, list[str]] = {}
    for key, value in scalars.items():
        benchmark, _, name = key.removeprefix("eval/").rpartition("/")
        if name in shown or re.fullmatch(r"(pass|maj)@\d+", name):
            text = f"{shown.get(name, name)} {_short(100 * value):>4}%"
        elif name == "mean_turns":
            text = f"turns {_short(value)}"
        else:
            continue
        lines.setdefault(benchmark, []).append(text)
    return "\n".join(
        fitted(f"eval {step}  {shortened(benchmark, NAME_WIDTH)}", parts)
        for benchmark, parts in lines.items()
    )


def fitted(start: str, parts: Sequence[str]) -> str:
    """Start and parts in one line of at most LINE_WIDTH columns, without parts that do not fit."""
    line = start
    for part in parts:
        if len(line) + 2 + len(part) <= LINE_WIDTH:
            line += f"  {part}"
    return line


def shortened(text: str, width: int) -> str:
    """The text, or its beginning and end with an ellipsis between."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def short_path(path: str | os.PathLike[str]) -> str:
    """The path, relative if it is below the working directory."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative


def _short(value: float) -> str:
    """One decimal below 100, none above, and powers of ten for very large values."""
    if abs(value) >= 1e7:
        return f"{value:.2g}"
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
