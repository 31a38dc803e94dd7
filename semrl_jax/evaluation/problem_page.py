"""`page.html`: the problems of an evaluation with all responses, a page in one file."""

from __future__ import annotations

import html
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from semrl_jax.evaluation.results import (
    SHOWN,
    Results,
    column_title,
    figure_text,
    main_figures,
    names_of,
    shown_figures,
    sizes_text,
)
from semrl_jax.evaluation.samples import Sample
from semrl_jax.pages.html import (
    content_policy,
    cut,
    cut_turns,
    data_element,
    filled,
    rounded,
    script_lengths,
    shortened,
)
from semrl_jax.support.safe_files import replacing

MAX_BYTES = 64 * 2**20  # of the page
# Characters of a response and of a question. The first limit with which the page is small enough
# is used. With the last one, fewer samples of each problem are shown until it is.
MAX_CHARACTERS = (16_000, 8_000, 4_000, 2_000, 1_000, 500, 250)
PREVIEW = 200  # characters of a question in the table
MAX_ANSWER = 300  # characters of an answer or an error

_TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def write_page(
    file: pathlib.Path,
    policies: Mapping[str, Sequence[Sample]],
    found: Mapping[str, Results],
    title: str,
    *,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Writes the page; the file is complete or missing. It opens from a disk, without a server.

    Above `max_bytes`, responses are cut in their middle, and then fewer samples per problem are
    shown, at least one; the page says which. `found` is the table at the top.
    """
    lengths = [len(sample.response) for samples in policies.values() for sample in samples]
    for limit, num_samples in _limits(policies):
        if num_samples is None and sum(min(length, limit) for length in lengths) > max_bytes:
            continue  # already the texts are too large
        note, data = _data(policies, limit, num_samples)
        if sum(map(len, data)) <= max_bytes:
            break
    template = _TEMPLATE.read_text("utf-8")
    script = template.split("<script>")[-1].split("</script>")[0]
    parts = {
        "policy": content_policy(script),
        "title": _escape(title),
        "note": _escape(note),
        "summary": _summary(found),
    }
    head, _, tail = template.partition("{{data}}")
    with replacing(file) as out:
        out.write(filled(head, parts))
        for piece in data:
            out.write(piece)
        out.write(filled(tail, parts))


def _limits(policies: Mapping[str, Sequence[Sample]]) -> Iterator[tuple[int, int | None]]:
    """Characters of a text and samples per problem (None: all), from the largest page on."""
    for limit in MAX_CHARACTERS:
        yield limit, None
    most = max((s.sample_index + 1 for samples in policies.values() for s in samples), default=1)
    while True:
        most = -(-most // 2)
        yield MAX_CHARACTERS[-1], most
        if most == 1:
            return


def _by_problem(
    policies: Mapping[str, Sequence[Sample]],
) -> dict[tuple[str, int], list[list[Sample]]]:
    """The samples of each problem, in a list per policy."""
    found: dict[tuple[str, int], list[list[Sample]]] = {}
    for place, samples in enumerate(policies.values()):
        for sample in samples:
            key = sample.benchmark, sample.group_id
            found.setdefault(key, [[] for _ in policies])[place].append(sample)
    benchmarks = {name: place for place, name in enumerate(dict.fromkeys(key[0] for key in found))}
    return {
        key: [sorted(samples, key=lambda sample: sample.sample_index) for samples in found[key]]
        for key in sorted(found, key=lambda key: (benchmarks[key[0]], key[1]))
    }


class _Numbers(dict[str, int]):
    """Numbers texts in order of their first use."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _data(
    policies: Mapping[str, Sequence[Sample]], limit: int, num_samples: int | None
) -> tuple[str, list[bytes]]:
    """The note on what is left out, and the script elements: the index, then each problem's."""
    problems = _by_problem(policies)
    labels = sorted({name for s in policies.values() for sample in s for name in sample.metrics})
    benchmarks, types, finishes = _Numbers(), _Numbers(), _Numbers()
    rows, texts, num_cut, num_left_out = [], [], 0, 0
    for at, ((benchmark, place), by_policy) in enumerate(problems.items()):
        kept = [samples[:num_samples] for samples in by_policy]
        num_left_out += sum(map(len, by_policy)) - sum(map(len, kept))
        num_cut += sum(len(sample.response) > limit for samples in kept for sample in samples)
        first = next(samples[0] for samples in by_policy if samples)
        rows.append(
            [
                benchmarks[benchmark],
                place,
                types[first.problem_type],
                shortened(first.question, PREVIEW),
                shortened(first.reference, MAX_ANSWER),
                [[_row(sample, finishes, labels) for sample in samples] for samples in kept],
            ]
        )
        responses = [[_text(sample, limit) for sample in samples] for samples in kept]
        texts.append(_element(f"p{at}", [cut(first.question, limit), responses]))
    index = {
        "policies": list(policies),
        "benchmarks": list(benchmarks),
        "types": list(types),
        "finishes": list(finishes),
        "metrics": labels,
        "problems": rows,
    }
    note = f"{len(problems)} problems."
    if num_cut:
        note += f" {num_cut} responses have more than {limit} characters and are cut in the middle."
    if num_left_out:
        note += (
            f" The first {num_samples} samples of each problem are shown, and counted in the table "
            f"of problems; {num_left_out} responses are left out."
        )
    if num_cut or num_left_out:
        note += " samples.parquet has all of them."
    return note, [_element("index", index), *texts]


def _text(sample: Sample, limit: int) -> str | list[Any]:
    """The response; of an episode, with the characters of its parts and the rewards."""
    turns = cut_turns(sample.response, sample.turn_characters, limit)
    if not sample.turn_rewards:
        return turns[0]
    rewards = [rounded(reward) for reward in sample.turn_rewards]
    return ["".join(turns), script_lengths(turns), rewards]


def _row(sample: Sample, finishes: _Numbers, labels: Sequence[str]) -> list[Any]:
    """The order of the constants NUMBER, CORRECT, ... in problem_page.html."""
    extracted = sample.extracted
    return [
        sample.sample_index,
        int(sample.correct),
        None if extracted is None else shortened(extracted, MAX_ANSWER),
        sample.num_tokens,
        finishes[sample.finish_reason],
        rounded(sample.mean_logprob),
        rounded(sample.score),
        int(sample.boxed),
        shortened(sample.verifier_error, MAX_ANSWER),
        [rounded(sample.metrics.get(name, math.nan)) for name in labels],
    ]


def _element(name: str, value: Any) -> bytes:
    return data_element(name, value).encode(errors="replace")


def _escape(text: object) -> str:
    return html.escape(str(text))


def _summary(found: Mapping[str, Results]) -> str:
    """The table of accuracies, one line per benchmark and policy."""
    names = list(dict.fromkeys(name for results in found.values() for name in names_of(results)))
    names = [*main_figures(names), *shown_figures(names, SHOWN)]
    benchmarks = dict.fromkeys(name for results in found.values() for name in results)
    several = len(found) > 1

    def cells() -> Iterator[str]:
        yield "<tr><th>benchmark</th>" + "<th>policy</th>" * several
        yield "<th class=number>problems x samples</th>"
        for name in names:
            yield f"<th class=number>{_escape(column_title(name))}</th>"
        yield "</tr>"
        for benchmark in benchmarks:
            for policy, results in found.items():
                if row := results.get(benchmark):
                    yield f"<tr><td>{_escape(benchmark)}</td>"
                    yield f"<td>{_escape(policy)}</td>" * several
                    for text in (sizes_text(row), *(figure_text(row, name) for name in names)):
                        yield f"<td class=number>{_escape(text)}</td>"
                    yield "</tr>"

    return (
        f"<div class=wide><table id=summary>{''.join(cells())}</table></div>"
        "<p class=dim>Percent, ± half of the 95 % interval over problems; lengths in tokens.</p>"
    )
