"""What a benchmark declares, and helpers that read its rows; `benchmarks` has them all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from semrl_jax.data import prompt_rows
from semrl_jax.data.prompt_rows import answer_text, check_text, columns_text, field_value
from semrl_jax.data.row_files import RowError
from semrl_jax.rewards.extraction import boxed_answer

KINDS = ("math", "number", "choice")
# A fixed version of the evaluation data of the reference implementation.
SOURCE = (
    "https://raw.githubusercontent.com/hf618/VERL/3de68f16e447647d3f80d11fdbe5816137b515aa/"
    "examples/simplelr_math_eval/data/{folder}/test.jsonl"
)
QUESTION_FIELDS = ("question", "problem")

_GRADED_COLUMNS = ("kind", "letters", "choices", "references")
_HINTS = {("true", "false"): " (True or False)", ("yes", "no"): " (Yes or No)"}
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")


class Problem(NamedTuple):
    """A problem of a benchmark."""

    question: str  # with its options, without the template
    answer: str  # the reference: LaTeX or text, a number, or letters of options ("B", "ACD")
    problem_type: str = ""  # such as "Algebra"; "" if the benchmark has no types
    kind: str = "math"  # of the answer, one of `KINDS`
    letters: str = ""  # that may be answers of a choice, such as "ABCD"
    # The texts of the options in the order of the letters, if they are known
    choices: tuple[str, ...] = ()
    references: tuple[str, ...] = ()  # further right answers


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark; rows come from a .jsonl or .parquet file."""

    size: int  # the published number of problems
    # From a row to a problem; raises RowError, naming the field, for a bad row
    read: Callable[[dict[str, Any]], Problem]
    folder: str = ""  # of the file in `SOURCE`; "" is the name of the benchmark
    note: str = ""  # what is not known about the data; shown if a file has another size

    def url(self, name: str) -> str:
        """Where the file of the benchmark `name` can be fetched."""
        return SOURCE.format(folder=self.folder or name)


@dataclasses.dataclass(frozen=True)
class BenchmarkReader:
    """Reads rows of a benchmark for `data.load_prompts`.

    `columns` of its problems have the kind of the answer, and with `keep_row` the row.
    """

    benchmark: Benchmark
    keep_row: bool = False
    fields: tuple[str, ...] = ()  # of a Parquet file; () reads all
    optional_fields: tuple[str, ...] = ()
    keep_columns: bool = True
    has_template: bool = False

    def read(self, row: dict[str, Any], default_source: str) -> prompt_rows.Problem:
        problem = self.benchmark.read(row)
        question, answer = problem.question.strip(), problem.answer.strip()
        if not question or not answer:
            raise RowError(f"the {'answer' if question else 'question'} is empty.")
        for words, hint in _HINTS.items():
            question += hint if answer.lower().rstrip(".") in words else ""
        check_text("question", question)
        check_text("answer", answer)
        columns = {key: row[key] for key in row if key not in _GRADED_COLUMNS}
        graded = {key: getattr(problem, key) for key in _GRADED_COLUMNS}
        columns = columns if self.keep_row else {}
        columns |= {key: value for key, value in graded.items() if value}
        text = columns_text(columns)
        return prompt_rows.Problem(question, answer, default_source, text, problem.problem_type)


def text(row: dict[str, Any], *fields: str) -> str:
    """The only of these fields that the row has, as text; a number 27.0 is "27"."""
    there = [field for field in fields if row.get(field) is not None] or [fields[0]]
    field, *others = there
    value = field_value(row, field)
    found = answer_text(value)
    if not found:
        raise RowError(f"field {field!r} must be text or a finite number, not {value!r:.80}.")
    if any(answer_text(row[other]) != found for other in others):
        raise RowError(f"fields {there} have different texts; leave one of them.")
    return found


def optional_text(row: dict[str, Any], *fields: str) -> str:
    """The first of these fields that has a text or a number; "" if there is none."""
    return next(filter(None, (answer_text(row.get(field)) for field in fields)), "")


def texts(row: dict[str, Any], field: str, count: int = 0) -> list[str]:
    """A list of texts or numbers, `count` of them unless that is 0."""
    value = field_value(row, field)
    found = [answer_text(item) for item in value] if isinstance(value, list) else []
    if not found or not all(found) or (count and len(found) != count):
        size = f"{count} texts" if count else "texts"
        raise RowError(f"field {field!r} must be a list of {size}, not {value!r:.80}.")
    return [str(item) for item in found]


def letters_of(row: dict[str, Any], field: str, letters: str) -> str:
    """One or more of the letters, such as "ACD" from "A C D"."""
    value = row.get(field)
    found = re.sub(r"[\s,]", "", value) if isinstance(value, str) else ""
    if not found or len(set(found)) < len(found) or not set(found) <= set(letters):
        raise RowError(f"field {field!r} must have letters of {letters}, not {value!r:.80}.")
    return found


def plain(
    question: Sequence[str] = QUESTION_FIELDS,
    answer: str = "answer",
    problem_type: Sequence[str] = (),
    kind: str = "math",
) -> Callable[[dict[str, Any]], Problem]:
    """Makes a reader for rows whose fields are question, answer and type."""

    def read(row: dict[str, Any]) -> Problem:
        of_type = optional_text(row, *problem_type)
        if kind == "number":
            return number_problem(text(row, *question), text(row, answer), of_type)
        return Problem(text(row, *question), text(row, answer), of_type, kind)

    return read


def number_problem(question: str, answer: str, problem_type: str = "") -> Problem:
    """A problem whose answer is a number. An answer that is none, such as "7:45", is text."""
    if not _NUMBER.fullmatch(answer):
        return Problem(question, answer, problem_type)
    answer = answer.replace(",", "")
    whole, point, fraction = answer.partition(".")
    if point and not fraction.strip("0"):  # "10.0"
        answer = whole
    return Problem(question, answer, problem_type, "number")


def choice_problem(
    question: str,
    answer: str,
    choices: Sequence[str],
    problem_type: str = "",
    *,
    before: str = "Answer Choices:",
) -> Problem:
    """A problem whose question shows its options as "(A) ... (B) ..."."""
    letters = "ABCDE"[: len(choices)]
    shown = [f"({letter}) {choice}" for letter, choice in zip(letters, choices, strict=True)]
    question = f"{question.strip()}\n{before} {' '.join(shown)}"
    return Problem(question, answer, problem_type, "choice", letters, tuple(choices))


def options_in(text: str, letters: str, mark: str) -> tuple[str, ...]:
    """The texts of the options in a text; () if it does not have one for each letter in this order.

    `mark` is the pattern of what introduces an option, with L for its letter.
    """
    marks = [mark.replace("L", letter) for letter in letters]
    found = re.fullmatch(".*" + "(.*?)".join(marks) + "(.*)", text, re.DOTALL)
    choices = tuple(choice.strip() for choice in found.groups()) if found else ()
    return choices if all(choices) else ()


def boxed(row: dict[str, Any], field: str) -> str:
    """The content of the last \\boxed{...} in a solution."""
    solution = text(row, field)
    answer = (boxed_answer(solution) or "").strip()
    if not answer:
        raise RowError(f"field {field!r} has no \\boxed{{answer}}: {solution!r:.80}.")
    return answer


def without_dollars(answer: str) -> str:
    """LaTeX without the signs around it: "$5$;$10$" is "5;10". A dollar, "\\$5", stays."""
    return re.sub(r"(?<!\\)\$", "", answer).strip()


def parts(answer: str) -> tuple[str, ...]:
    """The further reference "5, 10" of an answer "5;10", as a response would list the parts."""
    return (", ".join(part.strip() for part in answer.split(";")),) if ";" in answer else ()
