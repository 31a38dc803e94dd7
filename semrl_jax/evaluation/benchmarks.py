"""The benchmarks by name, and how their rows are read.

The conventions (how options are shown, which field is the answer) come from the evaluation of
Qwen2.5-Math and hf618/VERL, whose files the readers were checked on.
"""

from __future__ import annotations

import re
from typing import Any

from semrl_jax.data.prompt_rows import field_value
from semrl_jax.data.row_files import RowError
from semrl_jax.evaluation.benchmark_spec import (
    Benchmark,
    Problem,
    boxed,
    choice_problem,
    letters_of,
    number_problem,
    optional_text,
    options_in,
    parts,
    plain,
    text,
    texts,
    without_dollars,
)

NO_ANSWER = "(none published)"
_GAOKAO_2023_LETTERS = ("ABCDE", "FGHJK", "ABCD", "FGHJ")


def _aqua(row: dict[str, Any]) -> Problem:
    choices = [re.sub(r"^[A-E]\)\s*", "", option) for option in texts(row, "options", 5)]
    return choice_problem(text(row, "question"), letters_of(row, "correct", "ABCDE"), choices)


def _asdiv(row: dict[str, Any]) -> Problem:
    answer = re.sub(r"\(.*?\)", "", text(row, "answer")).strip()
    question = f"{text(row, 'body')} {text(row, 'question')}"
    return number_problem(question, answer, optional_text(row, "solution_type"))


def _college_math(row: dict[str, Any]) -> Problem:
    topic = optional_text(row, "data_topic").removeprefix("college_math.")
    return Problem(text(row, "question"), without_dollars(text(row, "answer")), topic)


def _gaokao2023en(row: dict[str, Any]) -> Problem:
    answer = NO_ANSWER if row.get("answer") == "" else without_dollars(text(row, "answer"))
    problem = Problem(text(row, "question"), answer, optional_text(row, "sourcename"))
    for letters in _GAOKAO_2023_LETTERS if len(answer) == 1 else ():
        found = options_in(problem.question, letters, r"\(L\)") if answer in letters else ()
        if found:
            return problem._replace(kind="choice", letters=letters, choices=found)
    return problem


def _gaokao_math_cloze(row: dict[str, Any]) -> Problem:
    answer = without_dollars(text(row, "answer"))
    return Problem(text(row, "question"), answer, references=parts(answer))


def _gaokao_math_qa(row: dict[str, Any]) -> Problem:
    options = field_value(row, "options")
    if not isinstance(options, dict) or sorted(options) != list("ABCD"):
        raise RowError(f"field 'options' must have the keys A, B, C and D, not {options!r:.80}.")
    choices = [text(options, letter) for letter in "ABCD"]
    answer = letters_of(row, "label", "ABCD")
    return choice_problem(text(row, "question"), answer, choices, before="选项:")


def _chinese_choice_or_text(row: dict[str, Any]) -> Problem:
    """A row with the letter in `choice_answer`, or with "" there and another answer."""
    question, answer = text(row, "question"), text(row, "answer")
    if not optional_text(row, "choice_answer"):
        return Problem(question, answer)
    letter = letters_of(row, "choice_answer", "ABCD")
    option = re.sub(r"^[A-D]\s*[.．]\s*", "", answer)
    return _chinese_choice(question, letter, "", (option,))


def _chinese_choice_or_blank(row: dict[str, Any]) -> Problem:
    """A row of `type` "single", "multi" or "blank"."""
    question, kind = text(row, "question"), text(row, "type")
    if kind in ("single", "multi"):
        return _chinese_choice(question, letters_of(row, "answer", "ABCD"), kind)
    answer = text(row, "answer")
    return Problem(question, answer, kind, references=parts(answer))


def _chinese_choice(
    question: str, letters: str, kind: str, references: tuple[str, ...] = ()
) -> Problem:
    choices = options_in(question, "ABCD", r"L\s*[.．、]")
    return Problem(question, letters, kind, "choice", "ABCD", choices, references)


def _gsm8k(row: dict[str, Any]) -> Problem:
    _, mark, answer = text(row, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise RowError(f"field 'answer' has no number after ####: {row['answer']!r:.80}.")
    return number_problem(text(row, "question"), answer.strip())


def _math(row: dict[str, Any]) -> Problem:
    problem_type = optional_text(row, "type", "subject")
    return Problem(text(row, "problem", "question"), boxed(row, "solution"), problem_type)


def _minerva_math(row: dict[str, Any]) -> Problem:
    question = text(row, "problem", "question")
    return Problem(question, boxed(row, "solution"), optional_text(row, "type"))


def _mmlu_stem(row: dict[str, Any]) -> Problem:
    index = row.get("answer")
    if type(index) is not int or not 0 <= index < 4:
        raise RowError(f"field 'answer' must be an index from 0 to 3, not {index!r:.80}.")
    choices = texts(row, "choices", 4)
    subject = optional_text(row, "type", "subject")
    return choice_problem(text(row, "question"), "ABCD"[index], choices, subject)


def _olympiadbench(row: dict[str, Any]) -> Problem:
    """All texts of an answer count; the reference implementation grades the first one only."""
    answers = [without_dollars(part).removesuffix(".") for part in texts(row, "final_answer")]
    context = optional_text(row, "context")
    question = f"{context}\n{text(row, 'question')}" if context else text(row, "question")
    return Problem(question, ", ".join(answers), optional_text(row, "subfield"))


def _sat_math(row: dict[str, Any]) -> Problem:
    choices = options_in(text(row, "options"), "ABCD", r"(?<!\S)L[.)]\s")
    if not choices:
        raise RowError(f"field 'options' must be 'A) ... B) ...', not {row['options']!r:.80}.")
    return choice_problem(text(row, "question"), letters_of(row, "Answer", "ABCD"), choices)


def _svamp(row: dict[str, Any]) -> Problem:
    body = text(row, "Body")
    body = body if body.endswith(".") else f"{body}."
    question = f"{body} {text(row, 'Question')}"
    return number_problem(question, text(row, "Answer"), optional_text(row, "Type"))


def _tabmwp(row: dict[str, Any]) -> Problem:
    title = optional_text(row, "table_title")
    regarding = f'regarding "{title}" ' if title else ""
    question = (
        f"Read the following table {regarding}and answer a question:\n"
        f"{text(row, 'table')}\n{text(row, 'question')}"
    )
    if row.get("choices"):
        question += f" Please select from the following options: {texts(row, 'choices')}"
    return number_problem(question, text(row, "answer"), optional_text(row, "ans_type"))


_NUMBERS = plain(kind="number")
_OF_SUBJECTS = plain(problem_type=("subject",))
BENCHMARKS = {
    # AIME, I and II: answers are whole numbers from 0 to 999.
    "aime24": Benchmark(30, _NUMBERS),
    "aime25": Benchmark(30, _NUMBERS),
    # AMC 12 without the options. Of 2023, answers are whole numbers (27.0); of 2024, LaTeX, and
    # once a name ("D").
    "amc23": Benchmark(40, _NUMBERS),
    "amc24": Benchmark(45, plain(problem_type=("exam",))),
    # AQuA-RAT (arXiv:1705.04146), test problems; one of five options, "A)..." to "E)...".
    "aqua": Benchmark(254, _aqua),
    # ASDiv (arXiv:2106.15772); problems with one answer, such as "9 (apples)" or "7:45".
    "asdiv": Benchmark(2215, _asdiv),
    "beyond_aime": Benchmark(100, _NUMBERS, folder="BeyondAIME"),
    # CARP (arXiv:2306.02408), English, algebra; answers are LaTeX with many spaces.
    "carp_en": Benchmark(976, plain(("content",))),
    # CMATH (arXiv:2306.16636), Chinese word problems of grades 1 to 6.
    "cmath": Benchmark(600, plain(problem_type=("grade",), kind="number")),
    # Chinese middle school examinations 2024; 41 problems have options in the question.
    "cn_middle_school": Benchmark(101, _chinese_choice_or_text),
    # MathScale (arXiv:2403.02884), problems of textbooks on 7 topics.
    "college_math": Benchmark(2818, _college_math),
    # Gaokao 2023 in English and American examinations of 2023. Some have options "(A) ..." or
    # "(F) ..." in the question, and a letter as answer. Two have no answer: every response to them
    # is wrong, as in the reference implementation.
    "gaokao2023en": Benchmark(385, _gaokao2023en),
    # Gaokao 2024, Chinese, examinations I and II: 8 single choices, 3 multiple choices ("ACD"), 3
    # blanks; of several examinations, 55 problems have options in the question.
    "gaokao2024_I": Benchmark(14, _chinese_choice_or_blank),
    "gaokao2024_II": Benchmark(14, _chinese_choice_or_blank),
    "gaokao2024_mix": Benchmark(91, _chinese_choice_or_text),
    # AGIEval (arXiv:2304.06364), Chinese: answers "$5$;$10$"; choices, 7 with several letters.
    "gaokao_math_cloze": Benchmark(118, _gaokao_math_cloze),
    "gaokao_math_qa": Benchmark(351, _gaokao_math_qa),
    # GSM8K (arXiv:2110.14168), test problems; the answer follows the last ####.
    "gsm8k": Benchmark(1319, _gsm8k),
    # MATH (arXiv:2103.03874), test problems; the answer is the last box of the solution.
    "math": Benchmark(5000, _math, note="the first publication names the fields"),
    # Chinese high school olympiad 2024 (preliminary); answers are numbers ("10.0").
    "math24o": Benchmark(21, _NUMBERS),
    # MATH-500 (arXiv:2305.20050), test problems of MATH; the answer has its own field.
    "math500": Benchmark(500, plain(problem_type=("subject", "type"))),
    # MAWPS (NAACL 2016), word problems of four kinds.
    "mawps": Benchmark(2065, plain(("input",), "target", ("type",), "number")),
    # Minerva's courses (arXiv:2206.14858); the answer is the box of the solution.
    "minerva_math": Benchmark(272, _minerva_math),
    # MMLU (arXiv:2009.03300), test problems of 18 STEM subjects; the answer is an index.
    "mmlu_stem": Benchmark(3018, _mmlu_stem),
    # OlymMATH (arXiv:2503.21380), problems of olympiads.
    "olymmath_en_easy": Benchmark(100, _OF_SUBJECTS, folder="OlymMATH-EN-EASY"),
    "olymmath_en_hard": Benchmark(100, _OF_SUBJECTS, folder="OlymMATH-EN-HARD"),
    "olymmath_zh_easy": Benchmark(100, _OF_SUBJECTS, folder="OlymMATH-ZH-EASY"),
    "olymmath_zh_hard": Benchmark(100, _OF_SUBJECTS, folder="OlymMATH-ZH-HARD"),
    # OlympiadBench (arXiv:2402.14008), English without images and proofs; several values stand in
    # one text, "$-2,0,2$".
    "olympiadbench": Benchmark(675, _olympiadbench),
    # SAT of May 2023; the options are in one text, "A) ... B) ... C) ... D) ...".
    "sat_math": Benchmark(32, _sat_math),
    # SVAMP (arXiv:2103.07191), word problems: a body and a question.
    "svamp": Benchmark(1000, _svamp),
    # TabMWP (arXiv:2209.14610), about a table; with options, the answer is the text of one.
    "tabmwp": Benchmark(
        1000, _tabmwp, note="size and fields are from the published test1k and were not checked",
    ),
}  # fmt: skip
