"""AGIEval (arXiv:2304.06364) gaokao-mathqa, Chinese, 351 choices; 7 have several letters."""

from typing import Any

from semrl_jax.data.files import RowError
from semrl_jax.data.rows import field_value
from semrl_jax.evaluation.benchmark import Benchmark, Problem, choice_problem, letters_of, text


def read(row: dict[str, Any]) -> Problem:
    options = field_value(row, "options")
    if not isinstance(options, dict) or sorted(options) != list("ABCD"):
        raise RowError(f"field 'options' must have the keys A, B, C and D, not {options!r:.80}.")
    choices = [text(options, letter) for letter in "ABCD"]
    answer = letters_of(row, "label", "ABCD")
    return choice_problem(text(row, "question"), answer, choices, before="选项:")


BENCHMARK = Benchmark(351, read)
