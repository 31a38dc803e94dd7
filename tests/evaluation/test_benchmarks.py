"""The rows of every benchmark: fields and forms as published, problems written for this test."""

import json
import re

import pytest

from semrl_jax.data import RowError
from semrl_jax.evaluation import catalogue
from semrl_jax.evaluation.benchmark_spec import BenchmarkReader, options_in
from semrl_jax.rewards.grading import grade

AIME = {"id": 60, "problem": "1+1?", "solution": "2", "answer": "2", "url": "", "question": "1+1?"}
OLYMMATH = {"problem": "1+1?", "answer": "\\sqrt{4}", "subject": "Algebra", "unique_id": "E-0"}
CHINESE = "1+1=（ ）\nA.1  B. 2 C、$A$. 3\nD．4"
ABCD = ["1", "2", "$A$. 3", "4"]
MMLU = {"question": " 1+1?", "type": "astronomy", "choices": ["1", "2 ", "(3)", "4"], "answer": 1}
TABMWP = {
    "question": "How many?", "choices": None, "answer": "1,200", "unit": None, "split": "test",
    "table_title": "Cups", "table": "Day | Cups\nMon | 1,200", "ans_type": "integer_number",
}  # fmt: skip
TABLE = (
    'Read the following table regarding "Cups" and answer a question:\nDay | Cups\nMon | 1,200\n'
)
OLYMPIAD = {
    "id": 1, "subfield": "Algebra", "context": None, "question": "x?", "solution": ["s"],
    "final_answer": ["$-2,0,2$."], "is_multiple_answer": True, "unit": None,
}  # fmt: skip
GAOKAO = {"passage": None, "options": None, "label": None, "other": {"source": "2021"}}


def problem(question, answer, problem_type="", kind="number", **columns):
    return question, answer, problem_type, {"kind": kind, **columns}


def choice(question, answer, choices, problem_type="", letters="ABCD", **columns):
    columns = {"letters": letters, "choices": choices, **columns}
    return problem(question, answer, problem_type, "choice", **columns)


ROWS = [
    ("math24o", AIME | {"answer": "10.0"}, problem("1+1?", "10")),
    *[
        (f"olymmath_{part}", OLYMMATH, problem("1+1?", "\\sqrt{4}", "Algebra", "math"))
        for part in ("en_easy", "en_hard", "zh_easy", "zh_hard")
    ],
    ("beyond_aime", AIME, problem("1+1?", "2")),
    ("aime24", AIME, problem("1+1?", "2")),
    ("aime25", {"question": "x?", "answer": "6^\\circ"}, problem("x?", "6^\\circ", "", "math")),
    ("amc23", AIME | {"answer": 27.0}, problem("1+1?", "27")),
    (
        "amc24",
        {"exam": "2024 AMC 12A", "problem_number": 1, "problem": "1+1?", "answer": "\\frac{4}{2}"},
        problem("1+1?", "\\frac{4}{2}", "2024 AMC 12A", "math"),
    ),
    (
        "aqua",
        {"question": "1+1?", "options": ["A)1", "B)(2)", "C) 3", "D)D)", "E)5"], "correct": "B"},
        choice(
            "1+1?\nAnswer Choices: (A) 1 (B) (2) (C) 3 (D) D) (E) 5",
            "B", ["1", "(2)", "3", "D)", "5"], letters="ABCDE",
        ),
    ),
    (
        "asdiv",
        {"body": "7 cups.", "question": "How many?", "solution_type": "Sum", "answer": "7 (cups)"},
        problem("7 cups. How many?", "7", "Sum"),
    ),
    (
        "asdiv",
        {"body": "Cups.", "question": "More?", "solution_type": "Comparison", "answer": "Yes"},
        problem("Cups. More? (Yes or No)", "Yes", "Comparison", "math"),
    ),
    (
        "carp_en",
        {"content": "$a$?", "answer": "b ^ { 2 }", "steps": "s", "expr_cands": ["a"]},
        problem("$a$?", "b ^ { 2 }", "", "math"),
    ),
    ("cmath", {"grade": 1, "question": "几？", "answer": "9"}, problem("几？", "9", "1")),
    ("cmath", {"grade": 6, "question": "几", "answer": "5/8"}, problem("几", "5/8", "6", "math")),
    (
        "cn_middle_school",
        {"idx": 0, "question": CHINESE, "answer": "B. 2", "choice_answer": "B"},
        choice(CHINESE, "B", ABCD, references=["2"]),
    ),
    (
        "cn_middle_school",
        {"idx": 1, "question": "化简", "answer": "a/(a+1)", "choice_answer": ""},
        problem("化简", "a/(a+1)", "", "math"),
    ),
    (
        "college_math",
        {"data_source": "college_math.Calculus", "question": "x?", "answer": "$10-4 n$ ",
         "data_topic": "college_math.calculus"},
        problem("x?", "10-4 n", "calculus", "math"),
    ),
    (
        "college_math",
        {"question": "Is it?", "answer": "False."},
        problem("Is it? (True or False)", "False.", "", "math"),
    ),
    (
        "gaokao2023en",
        {"source": "s", "question": "x?", "lang": "en", "answer": "$\\{x|x<1\\}$"},
        problem("x?", "\\{x|x<1\\}", "", "math"),
    ),
    (
        "gaokao2023en",
        {"question": "x: (F) (1) (G) 2(H)3 (J) 4 (K) 5", "sourcename": "ACT", "answer": "H"},
        choice(
            "x: (F) (1) (G) 2(H)3 (J) 4 (K) 5", "H", ["(1)", "2", "3", "4", "5"], "ACT", "FGHJK"
        ),
    ),
    (
        "gaokao2023en",
        {"question": "x", "sourcename": "HMMT", "answer": ""},
        problem("x", "(none published)", "HMMT", "math"),
    ),
    *[
        (name, {"question": question, "answer": answer, "type": kind}, wanted)
        for name in ("gaokao2024_I", "gaokao2024_II")
        for question, answer, kind, wanted in (
            (CHINESE, "C", "single", choice(CHINESE, "C", ABCD, "single")),
            (CHINESE, "ACD", "multi", choice(CHINESE, "ACD", ABCD, "multi")),
            ("几", "2;1", "blank", problem("几", "2;1", "blank", "math", references=["2, 1"])),
        )
    ],
    (
        "gaokao2024_mix",
        {"idx": 0, "question": "1+1=( ) A 1 B. 2 C 3", "answer": "C. 3", "choice_answer": "C"},
        problem("1+1=( ) A 1 B. 2 C 3", "C", "", "choice", letters="ABCD", references=["3"]),
    ),
    (
        "gaokao_math_cloze",
        GAOKAO | {"question": "$a$?", "answer": "$5$;$10$"},
        problem("$a$?", "5;10", "", "math", references=["5, 10"]),
    ),
    (
        "gaokao_math_qa",
        GAOKAO | {"question": "$a$?", "answer": None, "label": "A C",
                  "options": {"A": "1", "B": "$2$", "C": "3", "D": "4"}},
        choice("$a$?\n选项: (A) 1 (B) $2$ (C) 3 (D) 4", "AC", ["1", "$2$", "3", "4"]),
    ),
    (
        "gsm8k",
        {"question": "2*600?", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200", "idx": 0},
        problem("2*600?", "1200"),
    ),
    (
        "math",
        {"problem": "x?", "level": "Level 5", "type": "Geometry",
         "solution": "$\\boxed{1}$, so $\\boxed{\\frac{1}{\\sqrt{2}}}$."},
        problem("x?", "\\frac{1}{\\sqrt{2}}", "Geometry", "math"),
    ),
    (
        "math500",
        {"problem": "x?", "solution": "\\boxed{-2}", "answer": "-2", "subject": "Algebra"},
        problem("x?", "-2", "Algebra", "math"),
    ),
    ("mawps", {"input": "x ?", "target": 43.0, "type": "addsub"}, problem("x ?", "43", "addsub")),
    (
        "minerva_math",
        {"problem": "x?", "solution": "\\[\\boxed{4.5e33} \\mathrm{ergs}\\]", "type": "8.282J"},
        problem("x?", "4.5e33", "8.282J", "math"),
    ),
    (
        "mmlu_stem",
        MMLU,
        choice(
            "1+1?\nAnswer Choices: (A) 1 (B) 2 (C) (3) (D) 4",
            "B", ["1", "2", "(3)", "4"], "astronomy",
        ),
    ),
    ("olympiadbench", OLYMPIAD, problem("x?", "-2,0,2", "Algebra", "math")),
    (
        "olympiadbench",
        OLYMPIAD | {"final_answer": ["$69$,$84$", "3"], "context": "Let x."},
        problem("Let x.\nx?", "69,84, 3", "Algebra", "math"),
    ),
    (
        "sat_math",
        {"id": "0", "question": "x?", "options": "A) 1 B) B) C) 3 D) 4", "Answer": "D"},
        choice("x?\nAnswer Choices: (A) 1 (B) B) (C) 3 (D) 4", "D", ["1", "B)", "3", "4"]),
    ),
    (
        "sat_math",
        {"id": "1", "question": "x?", "options": "A. 1,190 B. 2 C. 3 D. 4", "Answer": "A"},
        choice("x?\nAnswer Choices: (A) 1,190 (B) 2 (C) 3 (D) 4", "A", ["1,190", "2", "3", "4"]),
    ),
    (
        "svamp",
        {"Answer": 145.0, "Question": "How big?", "Body": "Some groups", "Type": "Division"},
        problem("Some groups. How big?", "145", "Division"),
    ),
    ("tabmwp", TABMWP, problem(f"{TABLE}How many?", "1200", "integer_number")),
    (
        "tabmwp",
        TABMWP | {"choices": ["yes", "no"], "answer": "no", "table_title": None},
        problem(
            TABLE.replace('regarding "Cups" ', "") + "How many? Please select from the following "
            "options: ['yes', 'no'] (Yes or No)", "no", "integer_number", "math",
        ),
    ),
]  # fmt: skip


def read(name, row, **options):
    return BenchmarkReader(catalogue.find(name), **options).read(row, name)


@pytest.mark.parametrize(("name", "row", "wanted"), ROWS)
def test_a_row_is_read(name, row, wanted):
    found = read(name, row)
    columns = json.loads(found.columns)
    assert (found.question, found.answer, found.problem_type, columns) == wanted
    assert found.data_source == name
    json.loads(read(name, row, keep_row=True).columns)


def test_an_amount_of_dollars_can_be_answered():
    answer = read("college_math", {"question": "x?", "answer": "$\\$32,000$"}).answer
    assert grade("It is \\boxed{\\$32{,}000}.", answer).correct


def test_every_benchmark_has_a_row_here_and_a_size():
    assert {name for name, _, _ in ROWS} == set(catalogue.names())
    assert len(catalogue.names()) == 32
    assert set(catalogue.GROUPS["full"]) == set(catalogue.names())
    assert all(set(group) <= set(catalogue.names()) for group in catalogue.GROUPS.values())
    assert all(catalogue.find(name).size > 0 for name in catalogue.names())


def test_a_verifier_that_takes_the_row_gets_it_with_the_keys_of_the_grader():
    columns = json.loads(read("mmlu_stem", MMLU, keep_row=True).columns)
    assert columns["type"] == "astronomy" and columns["answer"] == 1
    assert columns["kind"] == "choice" and columns["choices"] == ["1", "2", "(3)", "4"]
    row = TABMWP | {"choices": ["3", "4"], "kind": "table"}  # not what the grader means by them
    columns = json.loads(read("tabmwp", row, keep_row=True).columns)
    assert columns["kind"] == "number" and "choices" not in columns


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "gsm8k",
            {"question": "x", "answer": "18"},
            "field 'answer' has no number after ####: '18'",
        ),
        ("gsm8k", {"answer": "#### 1"}, "field 'question' is missing"),
        ("aime24", {"question": "x", "answer": None}, "field 'answer' must be text or a finite"),
        ("amc23", {"question": "x", "answer": float("nan")}, "field 'answer' must be text or a fi"),
        ("math", {"problem": "x", "solution": "1"}, r"field 'solution' has no \\boxed{answer}"),
        ("math", {"problem": "x", "solution": "\\boxed{}"}, r"field 'solution' has no \\boxed"),
        ("aqua", {"options": ["A)1"], "question": "x"}, "field 'options' must be a list of 5 text"),
        (
            "aqua",
            {"options": list("12345"), "question": "x", "correct": "F"},
            "field 'correct' must have letters of ABCDE, not 'F'",
        ),
        ("mmlu_stem", MMLU | {"answer": 4}, "field 'answer' must be an index from 0 to 3, not 4"),
        ("mmlu_stem", MMLU | {"choices": "abcd"}, "field 'choices' must be a list of 4 texts"),
        ("sat_math", {"options": "A) 1 B) 2", "question": "x"}, "field 'options' must be 'A"),
        ("gaokao_math_qa", {"options": {"A": "1"}}, "field 'options' must have the keys A, B, C"),
        (
            "gaokao2024_I",
            {"question": "x", "answer": "AA", "type": "multi"},
            "field 'answer' must have letters of ABCD, not 'AA'",
        ),
        ("olympiadbench", {"final_answer": "2"}, "field 'final_answer' must be a list of texts"),
        ("asdiv", {"body": "b", "question": "x", "answer": "(x)"}, "the answer is empty"),
        (
            "aime25",
            {"question": "x", "problem": "y", "answer": "1"},
            "fields ['question', 'problem'] have different texts; leave one of them",
        ),
        ("aime25", {"question": "\ud800", "answer": "1"}, "field 'question' holds a lone surrogat"),
    ],
)
def test_a_bad_row_names_its_field(name, wrong, message):
    with pytest.raises(RowError, match=re.escape(message).replace(r"\\\\", r"\\")):
        read(name, wrong)


def test_options_must_be_in_order():
    assert options_in("A. 1 B. 2", "AB", r"L\.") == ("1", "2")
    assert options_in("point A. What? A. 1 B. 2", "AB", r"L\.") == ("1", "2")
    assert options_in("B. 1 A. 2", "AB", r"L\.") == options_in("A. B. 2", "AB", r"L\.") == ()
