"""TabMWP (arXiv:2209.14610), 1000 test problems about a table; some have options.

The answer is a number or text. With options it is the text of one, as published.
"""

from typing import Any

from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    number_problem,
    optional_text,
    text,
    texts,
)


def read(row: dict[str, Any]) -> Problem:
    title = optional_text(row, "table_title")
    regarding = f'regarding "{title}" ' if title else ""
    question = (
        f"Read the following table {regarding}and answer a question:\n"
        f"{text(row, 'table')}\n{text(row, 'question')}"
    )
    if row.get("choices"):
        question += f" Please select from the following options: {texts(row, 'choices')}"
    return number_problem(question, text(row, "answer"), optional_text(row, "ans_type"))


BENCHMARK = Benchmark(
    1000, read, note="the size, 1000, and the fields are those of the published test1k, not checked"
)
