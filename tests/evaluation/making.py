"""Samples for tests of scores, files and pages."""

import math

from semrl_jax.evaluation.results import Results, as_results, evaluate
from semrl_jax.evaluation.samples import Sample, table_of
from semrl_jax.support import response_files


def make_sample(group_id=0, sample_index=0, correct=False, **fields) -> Sample:
    """A sample; `fields` replace its defaults."""
    values = {
        "benchmark": "sums",
        "group_id": group_id,
        "sample_index": sample_index,
        "question": f"What is {group_id} + {group_id}?",
        "reference": f"{2 * group_id}",
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


def write_samples(file, samples) -> None:
    response_files.write(file, table_of(samples))


def results_of(samples, scores, options, groups=None) -> Results:
    return as_results(evaluate(samples, scores, options, groups))
