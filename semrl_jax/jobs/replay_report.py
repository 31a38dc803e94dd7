"""`launch.replay`: runs the comparison, prints its line and writes its page."""

from __future__ import annotations

import contextlib
import html
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax import data
from semrl_jax.jobs.replay import Compared, Finding, Replay, chosen_steps, remarks
from semrl_jax.jobs.replay_bisect import (
    Change,
    against_record,
    against_unchanged,
    between_revisions,
    between_runs,
    is_at_start,
    settings_apart,
)
from semrl_jax.pages.html import content_policy, filled
from semrl_jax.runs.differences import Difference, known
from semrl_jax.runs.policies import model_of
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import replacing

EXIT_SAME, EXIT_DIFFERENT = 0, 1
AROUND = 12  # tokens with their values before and after the one that differs
_TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


class Answer(NamedTuple):
    """What a comparison has found."""

    finding: Finding | None
    sides: tuple[str, str]
    steps: str  # that were compared
    remarks: Sequence[str] = ()


def replay(
    runs: Sequence[pathlib.Path],
    begin: int | None,
    end: int | None,
    output: pathlib.Path,
    *,
    changes: Mapping[str, Any] = {},
    recorded: bool = False,
    code: pathlib.Path | None = None,
    weights: str = "",
    bisect: bool = False,
    revisions: tuple[str, str] | None = None,
) -> int:
    """Compares, prints one line, writes the page if there is a difference; returns the exit code.

    See the flags of `launch.replay`. UserError for what cannot be compared.
    """
    reporter, compared = Reporter(), Compared()
    if len(runs) == 2:
        answer = _two_runs(runs, begin, end, compared)
        if answer.finding is not None:
            for note in answer.remarks:
                reporter.notice(note)
    else:
        first, begin, end = chosen_steps(runs[0], begin, end)
        asked = Replay(runs[0], first, end, recorded=recorded)
        change = Change(changes, weights, code)
        notes, steps = remarks(runs[0]), f"steps {begin} to {end}"
        for note in notes:
            reporter.notice(f"note: {note}")
        if revisions is not None:
            found = between_revisions(asked, *revisions, compared, reporter.notice)
            notes.append(
                f"the first revision with other numbers is {found.revision[:12]}, "
                f'"{found.subject}" ({found.tried} revisions were run)'
            )
            reporter.notice(notes[-1])
            answer = Answer(found.finding, (revisions[0], found.revision[:12]), steps, notes)
        elif bisect:
            found = against_unchanged(asked, begin, change, compared)
            answer = Answer(found, ("unchanged", str(change)), steps, notes)
        else:
            found = against_record(asked, begin, change, compared)
            again = "recorded responses" if recorded else "sampled again"
            answer = Answer(found, ("as recorded", str(change) or again), steps, notes)
    return _told(answer, runs[0], output, compared, reporter)


def _two_runs(
    runs: Sequence[pathlib.Path], begin: int | None, end: int | None, compared: Compared
) -> Answer:
    found = between_runs(*runs, begin or 0, end, compared)
    apart = settings_apart(*runs, found.first.step if found else begin or 0)
    texts = [f"{name} {a!r} -> {b!r}" for name, (a, b) in apart.items()]
    notes = [f"settings that differ: {', '.join(texts) or 'none'}"]
    if found is not None and is_at_start(found):
        notes.insert(0, "the two runs differ from the start")
    return Answer(found, tuple(map(str, runs)), "all steps that both have", notes)


def _told(
    answer: Answer, run: pathlib.Path, output: pathlib.Path, compared: Compared, reporter: Reporter
) -> int:
    what = known(compared.records)
    if answer.finding is None:
        reporter.notice(f"no difference in {answer.steps} (compared: {what})")
        return EXIT_SAME
    reporter.notice(str(answer.finding.first))
    write_page(output, answer, run, what)
    reporter.notice(f"page: {output}")
    return EXIT_DIFFERENT


def write_page(output: pathlib.Path, answer: Answer, run: pathlib.Path, compared: str) -> None:
    """Writes the page of a difference; complete or missing."""
    finding = answer.finding
    parts = {
        "policy": content_policy(),
        "title": html.escape(f"{run.name}: first difference at step {finding.first.step}"),
        "line": html.escape(str(finding.first)),
        "notes": "".join(f"<li>{html.escape(note)}" for note in answer.remarks),
        "compared": html.escape(f"Compared: {answer.steps}; {compared}."),
        "stages": _stages(finding.differences, answer.sides),
        "response": "".join(_response(finding, answer.sides, run)),
    }
    with replacing(output) as out:
        out.write(filled(_TEMPLATE.read_text("utf-8"), parts))


def _stages(found: Sequence[Difference], sides: Sequence[str]) -> str:
    """The first difference of each stage."""
    names = ("stage", "response", "token", "what", *sides, "")
    cells = [
        (d.stage, d.row, d.token, d.what, _value(d.left), _value(d.right), d.note) for d in found
    ]
    return _table(names, cells)


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]], marked: int = -1) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in names)
    body = "".join(
        f"<tr{' class=here' * (number == marked)}>"
        + "".join(f"<td>{html.escape('' if cell is None else str(cell))}" for cell in row)
        for number, row in enumerate(rows)
    )
    return f"<div class=wide><table><tr>{head}{body}</table></div>"


def _value(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else "none" if value is None else str(value)


def _response(finding: Finding, sides: Sequence[str], run: pathlib.Path) -> Iterator[str]:
    """The response of the first difference that has one, on both sides, its token marked."""
    place = next((d for d in finding.differences if d.row is not None), None)
    tables = [record.columns for record in (finding.left, finding.right)]
    if place is None or any("response_ids" not in table.column_names for table in tables):
        return
    rows = [table.slice(place.row, 1).to_pylist()[0] for table in tables]
    tokenizer = None
    with contextlib.suppress(UserError, OSError):
        tokenizer = data.load_tokenizer(model_of(run))

    def text(ids: Sequence[int]) -> str:
        if tokenizer is None:
            return " ".join(map(str, ids))
        return data.full_text(tokenizer, ids)

    of_tokens = place.token is not None and place.what not in ("mean_states", "effective_ranks")
    token = place.token if of_tokens and place.what != "prompt_ids" else None
    yield f"<h2>Response {place.row} of step {place.step}</h2>"
    yield f"<h3>prompt</h3><pre>{html.escape(text(rows[0]['prompt_ids']))}</pre>"
    yield "<div class=sides>"
    for side, row in zip(sides, rows):
        ids = row["response_ids"]
        parts = [ids] if token is None else [ids[:token], ids[token : token + 1], ids[token + 1 :]]
        texts = [html.escape(text(part)) for part in parts]
        if token is not None:
            texts[1] = f"<mark>{texts[1] or '(end)'}</mark>"
        score = "" if row.get("score") is None else f", score {row['score']:g}"
        yield f"<div><h3>{html.escape(side)}: {len(ids)} tokens{score}</h3>"
        yield f"<pre>{''.join(texts)}</pre></div>"
    yield "</div>"
    if token is not None:
        yield _tokens(rows, sides, token, text)


def _tokens(
    rows: Sequence[Mapping[str, Any]],
    sides: Sequence[str],
    token: int,
    text: Callable[[Sequence[int]], str],
) -> str:
    """A table of the tokens around one, with the values of both sides."""
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages")
    names = [name for name in names if all(row.get(name) is not None for row in rows)]
    begin = max(token - AROUND, 0)
    cells = []
    for at in range(begin, min(token + AROUND + 1, max(len(r["response_ids"]) for r in rows))):
        ids = [row["response_ids"][at : at + 1] for row in rows]
        values = [_pair(*((row[n][at : at + 1] or [None])[0] for row in rows)) for n in names]
        cells.append((at, *(text(one) if one else "none" for one in ids), *values))
    head = ("token", *sides, *names)
    return "<h2>Tokens around it</h2>" + _table(head, cells, token - begin)


def _pair(left: Any, right: Any) -> str:
    return _value(left) if left == right else f"{_value(left)} → {_value(right)}"
