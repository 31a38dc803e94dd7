"""Samples for tests of scores, files and pages."""

import math

from semrl_jax.evaluation.samples import Sample


def make_sample(problem=0, sample=0, correct=False, **fields) -> Sample:
    """A sample; `fields` replace its defaults."""
    values = {
        "benchmark": "sums",
        "problem": problem,
        "sample": sample,
        "question": f"What is {problem} + {problem}?",
        "reference": f"{2 * problem}",
        "problem_type": "",
        "row": "",
        "response": "text",
        "extracted": None,
        "correct": correct,
        "score": float(correct),
        "boxed": False,
        "verifier_error": "",
        "finish_reason": "eos",
        "num_tokens": 3,
        "mean_logprob": math.nan,
        "metrics": {},
    }
    return Sample(**values | fields)


def make_problems(table, **columns) -> list[list[Sample]]:
    """Problems with a row of correct or wrong samples each, and tables of further fields."""
    return [
        [
            make_sample(p, s, bool(correct), **{name: t[p][s] for name, t in columns.items()})
            for s, correct in enumerate(row)
        ]
        for p, row in enumerate(table)
    ]
