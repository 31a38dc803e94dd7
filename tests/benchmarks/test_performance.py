"""docs/performance.md is what its command writes, and a result has all that the page needs."""

import argparse
import json
import sys

from benchmarks import performance, results
from tests.cases import raised


def test_the_page_is_up_to_date():
    assert performance.PAGE.read_text() == performance.page()


def test_a_result_becomes_a_section(tmp_path, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    results.add_option(parser)
    file = tmp_path / "made" / "step.json"
    argv = ["step", "--pairs=3", "--json", str(file), "--tunix=DIR", "--set", "a b"]
    monkeypatch.setattr(sys, "argv", argv)
    arguments = parser.parse_args(argv[2:4])
    text = results.table(("Side", "s"), [["ours", "1.5"]])
    results.show("A step", f"\n{text}\n", arguments.json, {"trl": "1.16.0"})
    assert text in capsys.readouterr().out
    monkeypatch.setattr(performance, "RESULTS", file.parent)
    section = performance.section("step")
    assert section.startswith(
        "### A step\n\n| Side | s |\n| --- | ---: |\n| ours | 1.5 |\n\n`python"
    )
    # Where files lie on this machine is nobody's business.
    assert "--pairs=3 --set 'a b'`" in section and "DIR" not in section
    assert "jax " in section and "trl 1.16.0" in section and "cores" in section


def test_a_command_tells_the_names_of_models_and_problems_without_their_place():
    argv = ["step", "--model=/some/where/smol", "--problems", "else/sums.jsonl", "--pairs=1"]
    assert results.command(argv).endswith(" --model=smol --problems=sums.jsonl --pairs=1")


def test_a_missing_result_names_its_command_and_an_incomplete_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert "python -m benchmarks.performance --run step" in performance.section("step")
    (tmp_path / "step.json").write_text(json.dumps({"title": "A step"}))
    raised(SystemExit, "has no command; make it again with --run step", performance.section, "step")


def test_every_result_of_the_page_is_a_benchmark():
    for name in performance.names():
        assert (performance.HERE / f"{name}.py").exists()
