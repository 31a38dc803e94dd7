"""GSM8K (arXiv:2110.14168), the 1319 test problems; the answer follows the last ####."""

from typing import Any

from semrl_jax.data.files import RowError
from semrl_jax.evaluation.benchmark import Benchmark, Problem, number_problem, text


def read(row: dict[str, Any]) -> Problem:
    _, mark, answer = text(row, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise RowError(f"field 'answer' has no number after ####: {row['answer']!r:.80}.")
    return number_problem(text(row, "question"), answer.strip())


BENCHMARK = Benchmark(1319, read)
