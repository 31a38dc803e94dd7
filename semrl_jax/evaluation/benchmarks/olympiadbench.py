"""OlympiadBench (arXiv:2402.14008), 675 English problems without images and proofs.

Several values stand in one text, "$-2,0,2$". The reference implementation grades the first text of
the list only; here all texts count.
"""

from typing import Any

from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    optional_text,
    text,
    texts,
    without_dollars,
)


def read(row: dict[str, Any]) -> Problem:
    answer = ", ".join(
        without_dollars(part).removesuffix(".") for part in texts(row, "final_answer")
    )
    context = optional_text(row, "context")
    question = f"{context}\n{text(row, 'question')}" if context else text(row, "question")
    return Problem(question, answer, optional_text(row, "subfield"))


BENCHMARK = Benchmark(675, read)
