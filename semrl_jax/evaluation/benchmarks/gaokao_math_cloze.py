"""AGIEval (arXiv:2304.06364) gaokao-mathcloze, Chinese, 118 problems; answers "$5$;$10$"."""

from typing import Any

from semrl_jax.evaluation.benchmark import Benchmark, Problem, parts, text, without_dollars


def read(row: dict[str, Any]) -> Problem:
    answer = without_dollars(text(row, "answer"))
    return Problem(text(row, "question"), answer, references=parts(answer))


BENCHMARK = Benchmark(118, read)
