"""A real browser shows all parts of the report, and responses only as text."""

import re
import shutil
import subprocess

import pytest

from semrl_jax.runs.records import MetricWriter, write_rollouts
from semrl_jax.runs.report import write_report
from semrl_jax.runs.workdir import open_workdir
from tests.fixtures import make_scored

pytestmark = pytest.mark.browser


def test_report_renders_and_runs_no_script_of_a_response(config, tmp_path):
    workdir = open_workdir(str(tmp_path / "run"), config)
    writer = MetricWriter(workdir.path, 0)
    for step in range(3):
        writer.write(step, {"policy/loss": 0.1, "eval/arithmetic/greedy_accuracy": 0.5})
    writer.close()
    hostile = (
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    )
    write_rollouts(
        workdir.path / "rollouts",
        2,
        [make_scored(i, response=hostile) for i in range(4)],
        lambda _: hostile,
    )
    write_report(workdir.path)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "install Chromium"
    dom = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            (workdir.path / "report.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert re.search(r"<title>(.*)</title>", dom).group(1) == "run"
    assert dom.count("<tr>") > 8 and "data:image/png" in dom
    assert "&lt;script&gt;" in dom
