"""Finds question, reference answer and data source in a row of a prompt file; reads examples."""

from __future__ import annotations

import dataclasses
import decimal
import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from semrl_jax.data.row_files import Row, RowError, read_rows
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import one_of

ROW_FORMATS = ("question_answer", "simplerl")
DATA_SOURCE_FIELD = "data_source"
MAX_REPORTED_BAD_ROWS = 5
MAX_TEXT_CHARS = 1_000_000  # of a question, an answer, a completion or all messages of a row
MAX_COLUMNS_CHARS = 1_000_000  # of a row's columns as JSON, when a verifier takes them

_QUESTION_FIELDS, _ANSWER_FIELD = ("question",), "answer"
_MESSAGES = "prompt"  # of a row of SimpleRL-Zoo


class Problem(NamedTuple):
    """A problem: the question as in the file, the reference answer, and the data source.

    `columns` is a JSON object for a verifier that takes it, such as the whole row; else "".
    `problem_type` is such as "Algebra"; only readers of benchmarks know it. `given` has the
    texts of given responses.
    """

    question: str
    answer: str
    data_source: str
    columns: str = ""
    problem_type: str = ""
    given: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Finds question and answer in a row.

    A field is a key, or a path into nested rows such as "reward_model.ground_truth" or
    "prompt.0.content".
    """

    # Texts, or lists of texts. Several texts are stripped and joined by one space; a single
    # text is not changed
    question_fields: tuple[str, ...]
    answer_field: str  # a text, or a finite number, see `answer_text`
    # The answer is the text after the last such mark; "" means the whole field
    answer_after: str = ""
    keep_columns: bool = False  # whether to keep the whole row, which needs memory
    needs_answer: bool = True  # whether a row without an answer is bad; else its answer is ""
    # Whether the rows are those of SimpleRL-Zoo, with exactly one message, the user's, which
    # includes a template
    has_template: bool = False
    given_field: str = ""  # of given responses, see `given_texts`; "" for none

    @property
    def fields(self) -> tuple[str, ...]:
        answer = (self.answer_field,) if self.needs_answer else ()
        return (*self.question_fields, *answer)

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """Fields that a file may lack."""
        answer = () if self.needs_answer else (self.answer_field,)
        given = (self.given_field,) if self.given_field else ()
        return (DATA_SOURCE_FIELD, *answer, *given)

    def read(self, row: dict[str, Any], default_source: str) -> Problem:
        """Reads a row; without "data_source" it gets the default. RowError names a field."""
        if self.has_template:
            self._check_messages(row)
        question = question_text(row, self.question_fields)
        answer = self._answer(row) if self.needs_answer or self._has_answer(row) else ""
        source = row.get(DATA_SOURCE_FIELD)
        if source is None:
            source = default_source
        elif not isinstance(source, str) or not source.strip():
            raise RowError(f"field {DATA_SOURCE_FIELD!r} must be text, not {source!r:.80}.")
        check_text(DATA_SOURCE_FIELD, source)
        columns = columns_text(row) if self.keep_columns else ""
        given = given_texts(row, self.given_field) if self.given_field else ()
        return Problem(question, answer, " ".join(source.split()), columns, given=given)

    def _check_messages(self, row: dict[str, Any]) -> None:
        """Raises RowError if the question would be one message of several."""
        messages = field_value(row, _MESSAGES)
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            return  # the question is missing, which has its own error
        roles = [str(message.get("role") or "user") for message in messages]
        if messages and roles != ["user"]:
            raise RowError(
                f"field {_MESSAGES!r} has messages of {', '.join(roles):.80}, but "
                "row_format='simplerl' reads exactly one message, the user's, with its template; "
                "leave the others out, or name a text by row_format='question_answer', "
                f"question_fields='{_MESSAGES}.{len(messages) - 1}.content' and "
                f"answer_field={self.answer_field!r}."
            )

    def _has_answer(self, row: dict[str, Any]) -> bool:
        try:
            return field_value(row, self.answer_field) is not None
        except RowError:
            return False

    def _answer(self, row: dict[str, Any]) -> str:
        value = field_value(row, self.answer_field)
        answer = answer_text(value)
        if not answer:
            raise RowError(
                f"field {self.answer_field!r} must be text or a finite number, not {value!r:.80}."
            )
        check_text(self.answer_field, answer)
        if self.answer_after:
            _, mark, answer = answer.rpartition(self.answer_after)
            answer = answer.strip()
            if not mark or not answer:
                raise RowError(
                    f"field {self.answer_field!r} has no answer after answer_after="
                    f"{self.answer_after!r}: {value!r:.80}; empty takes the whole field."
                )
        return answer


def row_reader(
    row_format: str = "question_answer",
    question_fields: str | Sequence[str] = _QUESTION_FIELDS,
    answer_field: str = _ANSWER_FIELD,
    answer_after: str = "",
    *,
    keep_columns: bool = False,
    needs_answer: bool = True,
    given_field: str = "",
    field_prefix: str = "data.",
) -> RowReader:
    """Makes the reader of a format; UserError for a wrong one, or fields with "simplerl".

    "question_answer" has fields by name, see `RowReader`. "simplerl" are rows of SimpleRL-Zoo,
    whose question is the text of the only message under `prompt`, template included, and whose
    answer is `reward_model.ground_truth`.
    """
    if isinstance(question_fields, str):
        question_fields = (question_fields,)
    question_fields = tuple(question_fields)
    check_row_format(row_format, field_prefix)
    has_template = row_format == "simplerl"
    if has_template:
        if (question_fields, answer_field) != (_QUESTION_FIELDS, _ANSWER_FIELD):
            raise UserError(
                f"{field_prefix}question_fields={question_fields} and answer_field="
                f"{answer_field!r} are not read with row_format='simplerl'; leave them as they are."
            )
        question_fields, answer_field = (f"{_MESSAGES}.0.content",), "reward_model.ground_truth"
    if not question_fields or not all((*question_fields, answer_field)):
        raise UserError(
            f"{field_prefix}question_fields={question_fields} and answer_field={answer_field!r} "
            "must each name a field."
        )
    return RowReader(
        question_fields, answer_field, answer_after, keep_columns, needs_answer, has_template,
        given_field,
    )  # fmt: skip


def check_row_format(row_format: str, field_prefix: str = "data.") -> None:
    """Raises UserError if there is no such format."""
    one_of(f"{field_prefix}row_format", row_format, ROW_FORMATS)


class BadRows:
    """Counts bad rows; `report` gets one line for each of the first. Without `skip`, raises."""

    def __init__(self, skip: bool, report: Callable[[str], object]):
        self.count = 0
        self.first = ""
        self._skip = skip
        self._report = report

    def add(self, where: str, error: RowError) -> None:
        """Counts one bad row; raises UserError instead unless bad rows are skipped."""
        line = f"{where}: {error}"
        if not self._skip:
            raise UserError(line) from error
        self.count += 1
        self.first = self.first or line
        if self.count <= MAX_REPORTED_BAD_ROWS:
            self._report(f"bad row skipped: {line}")


def question_text(row: dict[str, Any], fields: Sequence[str]) -> str:
    """The texts in the fields of a row, see `RowReader.question_fields`; RowError if bad."""
    roles = [_role(row, field) for field in fields]
    if all(roles) and "user" not in roles:
        raise RowError(
            f"field {fields[0]!r} is the text of a message of the {roles[0]!s:.80}, so the "
            "question would be without the user's; name the user's message."
        )
    parts: list[str] = []
    for field in fields:
        value = field_value(row, field)
        texts = value if isinstance(value, list) and value else [value]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise RowError(f"field {field!r} must be text, not {value!r:.80}.")
        for text in texts:
            check_text(field, text)
        parts += texts
    return parts[0] if len(parts) == 1 else " ".join(part.strip() for part in parts)


def given_texts(row: dict[str, Any], field: str) -> tuple[str, ...]:
    """The given responses in the field of a row, a text or a list of texts; () if it has none."""
    try:
        value = field_value(row, field)
    except RowError:
        return ()
    texts = value if isinstance(value, list) else [value or ""]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"field {field!r} must be text or a list of texts, not {value!r:.80}.")
    for text in texts:
        check_text(field, text)
    return tuple(text for text in texts if text.strip())


def _role(row: dict[str, Any], field: str) -> Any:
    """The role of the message whose content a field's path leads to; None if there is none."""
    place, _, name = field.rpartition(".")
    if name != "content" or field in row:
        return None
    try:
        message = field_value(row, place)
    except RowError:  # the field itself has the better error
        return None
    return message.get("role") if isinstance(message, dict) else None


def field_value(row: dict[str, Any], field: str) -> Any:
    """The value at a field's path; raises RowError if there is none."""
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise RowError(f"field {field!r} is missing; the row has {sorted(row)!s:.200}.")
    return value


def columns_text(row: dict[str, Any]) -> str:
    """The row as a JSON object; RowError if a column is not made of JSON values."""
    try:
        text = json.dumps(row, allow_nan=False)
    except (TypeError, ValueError):  # dates, bytes, NaN
        name = next(name for name, value in row.items() if not _is_json(value))
        raise RowError(
            f"field {name!r} is {row[name]!r:.80}, but a row that is kept may have texts, finite "
            "numbers, bools, null, lists and objects only; convert the column or remove it."
        ) from None
    if len(text) > MAX_COLUMNS_CHARS:
        raise RowError(
            f"has {len(text)} characters as JSON, but the row is kept, which may have "
            f"{MAX_COLUMNS_CHARS}; remove columns that are not used."
        )
    return text


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def answer_text(value: Any) -> str | None:
    """The answer as text, in full digits: 27.0 and 27.00 are "27", 1e-05 is "0.00001"."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        value = decimal.Decimal(repr(float(value)))  # the shortest text with the same value
    if isinstance(value, decimal.Decimal) and value.is_finite():
        whole, point, fraction = f"{value or abs(value):f}".partition(".")  # -0.0 is "0"
        return f"{whole}{point}{fraction}".rstrip("0").rstrip(".") if point else whole
    return None


def check_text(field: str, text: str) -> None:
    """Raises RowError for a lone surrogate, or a text that would take seconds to tokenise."""
    if len(text) > MAX_TEXT_CHARS:
        raise RowError(
            f"field {field!r} has {len(text)} characters, more than {MAX_TEXT_CHARS}; shorten it."
        )
    try:
        text.encode()
    except UnicodeEncodeError as e:  # such as JSON's "\\ud800", which no tokenizer accepts
        raise RowError(f"field {field!r} holds a lone surrogate at character {e.start}.") from e


def read_shots(path: str | os.PathLike[str], count: int) -> list[tuple[str, str]]:
    """The first examples of a file, as pairs of question and answer; UserError if too few."""
    shots = []
    for where, row in itertools.islice(read_rows(path), count):
        try:
            shots.append(_shot(row))
        except RowError as error:
            raise UserError(f"evaluation.shots_file: {where}: {error}") from None
    if len(shots) < count:
        raise UserError(
            f"evaluation.shots_file={str(path)!r} has {len(shots)} rows, fewer than {count} shots."
        )
    return shots


def _shot(row: Row) -> tuple[str, str]:
    if isinstance(row, RowError):
        raise row
    fields = "question", "response" if row.get("response") is not None else "answer"
    for field in fields:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise RowError(f"field {field!r} must be text, not {row.get(field)!r:.80}.")
        check_text(field, row[field])
    question, answer = (row[field].strip() for field in fields)
    return question, answer
