"""The progress bar, its estimates, and the lines of steps and evaluations."""

import io
import re

import pytest
from rich.console import Console

from semrl_jax import compilation, console
from semrl_jax.clock import Clock
from semrl_jax.console import Reporter, duration, evaluation_line, summary_line


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
            monkeypatch.setattr(compilation, "_running", {1: "row_logprobs"})
            assert "old logprobs, compiling row_logprobs" in drawn(bar, output)
            monkeypatch.setattr(compilation, "_running", {})
        with clock("update"):
            line = drawn(bar, output)
            assert "update" in line and "sample" not in line and "compiling" not in line


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


def test_each_benchmark_has_a_line():
    names = ("greedy_accuracy", "greedy_accuracy_stderr", "boxed_fraction", "finished_fraction")
    scalars = {f"eval/{benchmark}/{name}": 0.125 for benchmark in ("a", "b") for name in names}
    assert evaluation_line(40, scalars | {"eval/a/metrics/effective_rank/mean": 3.0}) == (
        "eval 40  a  correct 12.5%  boxed 12.5%  finished 12.5%\n"
        "eval 40  b  correct 12.5%  boxed 12.5%  finished 12.5%"
    )


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0:00"), (75.0, "1:15"), (3599.4, "59:59"), (3599.6, "1h00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
