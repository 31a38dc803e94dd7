"""The report of a run: `curves.png`, and `report.html`, an interactive page in one file."""

from __future__ import annotations

import io
import pathlib

from semrl_jax.support.safe_files import replacing


def write_report(workdir: pathlib.Path) -> None:
    """Writes `curves.png` and `report.html` of a run; nothing as long as it has no row."""
    # Matplotlib and plotly load here, because only some processes of a run draw.
    from semrl_jax.pages.report.page import write_page_of
    from semrl_jax.pages.report.picture import draw_curves
    from semrl_jax.pages.report.reading import read_runs, thinned

    (run,) = read_runs([workdir], may_be_empty=True)  # once: it may be gigabytes in memory
    if not run.rows:
        return
    image = io.BytesIO()
    draw_curves(thinned(run.rows)).savefig(image, format="png", dpi=110)
    with replacing(workdir / "curves.png") as out:
        out.write(image.getvalue())
    write_page_of(workdir / "report.html", [run])
