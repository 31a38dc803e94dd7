"""`report.html`: one run or several, a page in one file that also opens without a server."""

from __future__ import annotations

import functools
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from semrl_jax.pages.html import content_policy, data_element, filled, shortened
from semrl_jax.pages.report import reading, several_runs
from semrl_jax.pages.report.panels import STAGES, Panel, panels_of
from semrl_jax.pages.report.reading import RunLog
from semrl_jax.pages.report.recorded_responses import samples
from semrl_jax.support.safe_files import replacing

MAX_KEYS = 12  # named in a note
MAX_KEY = 80  # characters
MAX_STAGES, LEAST_SHARE = 4, 0.02  # of the sentence about a step
_HERE = pathlib.Path(__file__).parent


def write_page(file: pathlib.Path, paths: Sequence[pathlib.Path]) -> None:
    """Writes the page of these runs, complete or not at all; raises as `reading.read_runs`."""
    write_page_of(file, reading.read_runs(paths))


def write_page_of(file: pathlib.Path, runs: Sequence[RunLog]) -> None:
    """Writes the page of runs that were read."""
    content = page(figures(runs), samples(runs))
    with replacing(file) as out:
        out.write(content)


def figures(runs: Sequence[RunLog]) -> dict[str, Any]:
    """All that the page shows but the responses; only JSON values."""
    shown, notes = [], []
    for run in runs:
        notes += run.damage()
        if unknown := reading.never_finite(run.rows):
            names = ", ".join(shortened(key, MAX_KEY) for key in unknown[:MAX_KEYS])
            rest = f" and {len(unknown) - MAX_KEYS} more" if len(unknown) > MAX_KEYS else ""
            notes.append(f"{run.name}: not a finite number at any step: {names}{rest}.")
        stage_means = reading.stage_means(run.rows)
        rows = reading.thinned(run.rows)
        if len(rows) < len(run.rows):
            notes.append(
                f"{run.name} has {len(run.rows)} rows; the plots have {len(rows)} of them, with "
                "every one of an evaluation or an event up to "
                f"{reading.MAX_ROWS}. metrics.jsonl has all."
            )
        shown.append(
            {
                "name": run.name,
                "id": run.record["run_id"],
                "steps": [row["step"] for row in rows],
                "series": reading.series(rows),
                # Not of the thinned rows: evaluations are a larger part of them.
                "stage_means": stage_means,
                "events": reading.events(run),
                "starts": run.starts,
                "versions": _texts(run.record.get("versions")),
            }
        )
    numbers, names = reading.variants(runs)
    for run, number in zip(shown, numbers, strict=True):
        run["variant"] = number
    keys = {key: None for run in shown for key in run["series"]}
    panels = panels_of(keys)
    series = [run["series"] for run in shown]
    varied = [p for p in panels if any(any(s.get(key, ())) for s in series for key in p.keys)]
    if same := [panel.title for panel in panels if panel not in varied]:
        notes.append(f"0 at every step and not drawn: {', '.join(same)}.")
    return {
        "title": ", ".join(run.name for run in runs),
        "runs": shown,
        "variants": names,
        "panels": [
            panel._replace(limits=None)._asdict()
            | {"keys": list(panel.keys.items()), "links": _links(panel, runs)}
            for panel in varied
        ],
        "pace": [  # of one run of each variant
            pace_text(shown[first]["name"], shown[first]["stage_means"])
            for first in map(numbers.index, range(len(names)))
        ],
        "notes": notes,
        "settings": reading.settings_table(runs),
        "paired": several_runs.paired(runs, notes) if len(runs) > 1 else [],
    }


def pace_text(name: str, stage_means: Mapping[str, float]) -> str:
    """What a mean step of a run waits for, in one sentence; "" if nothing is known of it."""
    total = sum(stage_means.values())
    if not total:
        return ""
    longest = sorted(stage_means.items(), key=lambda stage: -stage[1])[:MAX_STAGES]
    parts = [
        f"{STAGES[key]} {100 * seconds / total:.0f} %"
        for key, seconds in longest
        if seconds >= LEAST_SHARE * total
    ]
    return f"{name}: a step takes {total:.3g} s: {', '.join(parts)}."


def _texts(value: Any) -> dict[str, str]:
    """The entries that are there, as texts; {} for what is no object."""
    if not isinstance(value, dict):
        return {}
    return {key: str(entry) for key, entry in value.items() if entry is not None}


def _links(panel: Panel, runs: Sequence[RunLog]) -> dict[str, str]:
    """Pages of a run about a panel, by what the link says."""
    if not panel.page or len(runs) > 1 or not (runs[0].path / panel.page).is_file():
        return {}
    return {f"{panel.page}: layers, tokens and the cause": panel.page}


def page(figures: dict[str, Any], samples: dict[str, Any], *, live: bool = False) -> bytes:
    """The page as HTML; a live one asks the server that sent it for changes."""
    script = (_HERE / "page.js").read_text("utf-8")
    plotly = _plotly()
    # Plotly makes a picture of a plot from data: and blob: addresses, when a button asks for one.
    policy = f"{content_policy(plotly, script)}; img-src data: blob:"
    parts = {
        "policy": policy + "; connect-src 'self'" * live,
        "title": html.escape(figures["title"]),
        "data": data_element("figures", figures | {"live": live})
        + data_element("samples-data", samples),
        "plotly": plotly,
        "script": script,
    }
    return filled((_HERE / "page.html").read_text("utf-8"), parts)


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
