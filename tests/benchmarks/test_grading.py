"""The check of the grader on benchmark files, and the pairs that are timed."""

import json

import pytest

from benchmarks import grading


@pytest.mark.parametrize(
    ("reference", "row", "wrong"),
    [
        ("7", {}, "8"), ("3159.0", {}, "3160.0"), ("025", {}, "26"), (".5", {}, "1.5"),
        (r"3\sqrt{13}", {}, r"3\sqrt{14}"), (r"15\mbox{ cm}^2", {}, r"16\mbox{ cm}^2"),
        (r"\text{east}", {}, r"\text{another}"), ("p - q", {}, "p - q + 1"),
        ("E", {"kind": "choice", "letters": "ABCDE"}, "A"),
    ],
)  # fmt: skip
def test_wrong_answers_are_of_the_same_kind(reference, row, wrong):
    assert grading.wrong_answer(reference, row) == wrong


def test_timed_pairs_differ():
    pairs = grading.numbers(500)
    assert len(pairs) == 500 and len(set(pairs)) > 490
    assert len(grading.mix()) > 300


@pytest.mark.slow
def test_files_are_checked(tmp_path, capsys):
    rows = {
        "gsm8k": [{"question": "x", "answer": f"so\n#### {n}"} for n in ("1,200", "-3")],
        "aqua": [{"question": "x", "correct": "B", "options": ["A)5", "B)6", "C)7", "D)8", "E)9"]}],
        "aime25": [{"question": "x", "answer": "?" * 9}],  # empty after normalisation
    }
    for name, lines in rows.items():
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / f"{name}.jsonl").write_text(text)
    grading.agreement(tmp_path)
    output = capsys.readouterr().out
    assert "gsm8k                2 rows, 100.00 % as expected" in output
    assert "aqua                 1 rows, 100.00 % as expected" in output
    assert "aime25               1 rows, 50.00 % as expected" in output
    assert "'?????????' for '?????????' should be right" in output
    assert "mawps            no file" in output
