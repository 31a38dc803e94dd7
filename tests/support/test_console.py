"""The progress bar, its estimates, and the lines of steps and evaluations."""

import io
import os
import re
import sys
import time

import pytest
from rich.console import Console
from rich.table import Table

from semrl_jax.support import compilation, console, notebook
from semrl_jax.support.clock import Clock
from semrl_jax.support.console import (
    LINE_WIDTH,
    Reporter,
    duration,
    evaluation_line,
    short_path,
    shortened,
    summary_line,
)


@pytest.fixture
def terminal(monkeypatch):
    """A reporter on a terminal of 100 columns, and what is on it."""
    reporter, output = Reporter(), io.StringIO()
    reporter._console = Console(
        file=output, force_terminal=True, width=100, soft_wrap=True, color_system=None
    )
    return reporter, output


@pytest.fixture
def now(monkeypatch):
    """The time of the bar, set by the test."""
    time = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: time[0])
    return time


def drawn(bar, output) -> str:
    """The bar as it is drawn now."""
    output.truncate(output.seek(0))
    bar._progress.refresh()
    return re.sub(r"\x1b\[\S*?[A-Za-z]|\r", "", output.getvalue())


def test_estimates_exclude_the_first_unit(terminal, now):
    reporter, output = terminal
    with reporter.bar("train", 10, "steps") as bar:
        now[0] = 60.0  # compiles
        bar.advance()
        assert bar.left_s() is None
        assert "left" not in drawn(bar, output)
        for _ in range(2):
            now[0] += 2.0
            bar.advance()
        assert bar.left_s() == 14.0
        assert "3/10 0.5 steps/s, left 0:14" in drawn(bar, output)


def test_the_bar_shows_the_phase_and_the_program_that_compiles(terminal, monkeypatch):
    reporter, output = terminal
    with reporter.bar("train", 10, "steps") as bar:
        clock = Clock(bar.status)
        with clock("sample"):
            bar.status("sample 32/32")
            with clock("generate"):  # inside another phase: the status does not change
                assert "sample 32/32" in drawn(bar, output)
        with clock("old_logprobs"):
            monkeypatch.setattr(
                compilation, "_running", {1: [compilation._Stage("row_logprobs", time.monotonic())]}
            )
            assert "old logprobs, compiling row_logprobs" in drawn(bar, output)
            monkeypatch.setattr(compilation, "_running", {})
        with clock("update"):
            line = drawn(bar, output)
            assert "update" in line and "sample" not in line and "compiling" not in line


def test_a_bar_may_have_any_name(terminal):
    reporter, output = terminal
    with reporter.bar("runs[/b]", 3, "steps") as bar:
        bar.advance()
    assert "runs[/b]" in output.getvalue()


def test_the_line_of_a_step_fits_a_terminal():
    scalars = {
        "reward/correct": 0.9999,
        "reward/mean": -1.0,
        "response/length/mean": 32767.6,
        "metrics/effective_rank/mean": 2047.6,
        "shaping/bonus/mean": 0.01234,
        "policy/loss": -0.12345,
        "policy/grad_norm": 1234.56,
        "rollout/tokens_per_s": 123456.0,
        "time/step_s": 3599.6,
    }
    line = summary_line(1000, 1000, scalars, 99 * 3600.0)
    assert len(line) <= 100
    assert line == (
        "step 1000/1000  correct  100%  reward -1.00  length 32768  ER 2048  bonus 0.0123  3600 s"
        "  left 99h00"
    )


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9, -1e30, float("nan")])
def test_the_line_of_a_step_fits_whatever_the_values(size):
    keys = ("reward/correct", "reward/mean", "response/length/mean", "metrics/effective_rank/mean",
            "shaping/bonus/mean", "time/step_s")  # fmt: skip
    line = summary_line(10**7, 10**7, dict.fromkeys(keys, size), 1e7)
    assert len(line) <= LINE_WIDTH and line.startswith("step 10000000/10000000  correct")


def test_long_names_and_many_scores_fit_a_line():
    name = "a-" + "very-" * 30 + "long-name"
    scalars = {f"eval/{name}/pass@{k}": 0.5 for k in range(1, 65)}
    (line,) = evaluation_line(1000, scalars).splitlines()
    assert 85 < len(line) <= LINE_WIDTH
    assert "a-very-" in line and "-long-name" in line and line.endswith("pass@3 50.0%")
    assert shortened("abcdefghij", 5) == "ab…ij" and shortened("abcde", 5) == "abcde"


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_a_bar_with_a_long_status_is_one_line_with_its_count(terminal, width):
    reporter, output = terminal
    reporter._console = Console(
        file=output, force_terminal=True, width=width, soft_wrap=True, color_system=None
    )
    with reporter.bar("train", 1000, "steps") as bar:
        bar.status("sample 256/256 from " + "replica-12:50051 " * 9)
        line = drawn(bar, output)
    assert len(line.rstrip("\n")) <= width and "\n" not in line.strip()
    assert width < 80 or "0/1000" in line


def printed_without_a_terminal(reporter, capsys):
    with reporter.bar("train", 2, "steps") as bar:
        bar.advance("status")
        reporter.line("a line [with] brackets")
        reporter.notice("a notice")
        reporter.ending("done", {"log": "a b"}, [["launch.train", "--x=a b"], ["launch.none"]])
    return capsys.readouterr().out


def test_text_for_files_has_no_control_characters(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    assert printed_without_a_terminal(Reporter(), capsys) == (
        "a line [with] brackets\na notice\ndone\n  log  a b\n"
        "next:\n  python -m launch.train '--x=a b'\n"  # a command that is missing is left out
    )


def test_notices_and_the_end_are_printed_if_quiet(capsys):
    out = printed_without_a_terminal(Reporter(quiet=True), capsys)
    assert out.startswith("a notice\ndone\n")
    assert printed_without_a_terminal(Reporter(silent=True), capsys) == ""


def test_colours_and_bars_are_on_terminals_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for is_terminal in (True, False):
        output = io.StringIO()
        output.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stdout", output)
        reporter = Reporter()
        reporter.ending("done", {}, [["launch.train"]])
        assert reporter.shows_bars is is_terminal
        assert ("\x1b[36m" in output.getvalue()) is is_terminal
    output.isatty = lambda: True
    assert not Reporter(quiet=True).shows_bars  # no bar


def test_paths_below_the_working_directory_are_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "a") == os.path.join("runs", "a")
    assert short_path(tmp_path.parent / "b") == str(tmp_path.parent / "b")


def test_each_benchmark_has_a_line():
    names = ("greedy_accuracy", "greedy_accuracy_stderr", "boxed_fraction", "finished_fraction")
    scalars = {f"eval/{benchmark}/{name}": 0.125 for benchmark in ("a", "b") for name in names}
    assert evaluation_line(40, scalars | {"eval/a/metrics/effective_rank/mean": 3.0}) == (
        "eval 40  a  correct 12.5%  boxed 12.5%  finished 12.5%\n"
        "eval 40  b  correct 12.5%  boxed 12.5%  finished 12.5%"
    )


def test_the_line_of_an_evaluation_of_episodes_has_their_turns():
    scalars = {"eval/a/greedy_accuracy": 0.5, "eval/a/mean_turns": 2.25}
    assert evaluation_line(0, scalars) == "eval 0  a  correct 50.0%  turns 2.2"


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0:00"), (75.0, "1:15"), (3599.4, "59:59"), (3599.6, "1h00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_line_of_a_step_with_an_environment():
    scalars = {
        "reward/correct": 0.25, "reward/mean": 0.25, "response/length/mean": 120.0,
        "episode/turns/mean": 2.25, "episode/failed_fraction": 0.0, "time/environment_s": 3.21,
        "metrics/effective_rank/mean": 20.0, "time/step_s": 9.8,
    }  # fmt: skip
    begin = "step    3/10  correct 25.0%  reward +0.25  length 120  turns 2.2  env 3.2 s"
    assert summary_line(3, 10, scalars, None) == f"{begin}  ER 20.0  9.8 s"
    failed = summary_line(3, 10, scalars | {"episode/failed_fraction": 0.5}, None)
    assert failed == f"{begin}  failed 50.0%  ER 20.0"  # the time does not fit


class Cell:
    """What a cell shows: elements by number, and all states that they had."""

    def __init__(self):
        self.states = []

    def display(self, shown, raw=False, display_id=None):
        self.states.append(shown)
        return self

    def update(self, shown, raw=False):
        self.states.append(shown)


@pytest.fixture
def cell(monkeypatch):
    """A cell of a notebook, and a reporter in it."""
    found = Cell()
    monkeypatch.setattr("IPython.display.display", found.display)
    monkeypatch.setattr(notebook, "is_notebook", lambda: True)
    monkeypatch.setattr(notebook, "REDRAW_S", 0.01)
    return found


def test_a_cell_shows_one_bar_with_the_last_line(cell, capsys):
    reporter = Reporter()
    assert reporter.shows_bars
    with reporter.bar("train", 3, "steps", done=1) as bar:
        for step in (2, 3):
            bar.status("sample <1>")
            while "sample" not in cell.states[-1]["text/plain"]:
                time.sleep(0.01)
            bar.advance()
            bar.line(f"step {step}/3")
        reporter.line("eval 3")
    assert capsys.readouterr().out == "eval 3\n"
    assert any("sample &lt;1&gt;" in shown["text/html"] for shown in cell.states)
    last = cell.states[-1]
    assert re.fullmatch(r"train 3/3, .*\nstep 3/3", last["text/plain"])
    assert '<progress value="3" max="3"' in last["text/html"]
    assert "step 2/3" not in last["text/html"]
    count = len(cell.states)
    time.sleep(0.05)
    assert len(cell.states) == count  # it is not drawn after the end


def test_a_cell_of_a_quiet_reporter_has_no_bar(cell, capsys):
    for reporter in (Reporter(quiet=True), Reporter(silent=True)):
        with reporter.bar("train", 1, "steps") as bar:
            bar.line("step 1/1")
    assert not cell.states and capsys.readouterr().out == ""


def test_a_table_in_a_cell_is_one(cell, monkeypatch):
    shown = []
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    table = Table("name", "value")
    table.add_row("a" * 120, "1")
    Reporter().table(table)
    assert len(shown) == 1 and max(map(len, shown[0].splitlines())) > 120
