"""A plan as tables of at most 100 columns, and as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from rich.table import Table

from semrl_jax.planning import hlo
from semrl_jax.planning.plan import Plan, ProgramPlan

GIB = 2**30


def headline(plan: Plan) -> list[str]:
    """What to know first: whether it fits, how fast it is, what bounds it."""
    used, limit = plan.peak_bytes / GIB, plan.capacity / GIB
    mesh = " ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
    chips = f"{plan.slice_.num_chips} chips, {mesh}" if mesh else "1 chip"
    settings = f"remat {plan.settings['remat']}, micro-batch {plan.settings['micro_batch_size']}"
    lines = [
        f"{plan.slice_.name}: {chips}, {settings}",
        f"model: {_parameters(plan.num_parameters)} parameters",
        f"{'fits' if plan.fits else 'DOES NOT FIT'}: {used:.2f} of {limit:.2f} GiB per chip",
    ]
    if plan.step is not None:
        update = plan.programs["update"]
        mfu = update.mfu(plan.slice_.chip.flops)
        lines.append(
            f"update: {_seconds(update.times.total)}, predicted MFU {mfu:.1%}, bound by "
            f"{update.times.bound}; all updates and passes of a step: {_seconds(plan.step.total)}"
        )
    for name, part in plan.programs.items():
        for option, value in part.compiled.options.items():
            lines.append(f"{name}: compiles only with LIBTPU_INIT_ARGS=--{option}={value}")
    return lines + [f"to make it fit: {text}" for text in plan.advice]


def _parameters(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _seconds(value: float | int) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def memory_table(plan: Plan) -> Table:
    """GiB per chip by kind, one column per program."""
    table = Table(title="HBM per chip, GiB")
    table.add_column("kind")
    for name in plan.programs:
        table.add_column(name, justify="right")
    kinds = dict.fromkeys(k for p in plan.programs.values() for k in p.compiled.arguments)

    def row(label, values):
        table.add_row(label, *("" if v is None else f"{v / GIB:.3f}" for v in values))

    compiled = [part.compiled for part in plan.programs.values()]
    for kind in kinds:
        row(kind, [one.arguments.get(kind) for one in compiled])
    row("gradients, temporaries", [one.temporary for one in compiled])
    row("outputs", [one.output for one in compiled])
    row("code", [one.code for one in compiled])
    row("total", [one.total for one in compiled])
    for kind, size in plan.held.items():
        row(f"beside: {kind}", [size] * len(compiled))
    return table


def time_table(plan: Plan) -> Table:
    """Roofline of each program."""
    table = Table(title="Roofline of one run of each program")
    for name in ("program", "runs", "TFLOP", "needed", "ms", "MXU", "HBM", "ICI", "waits"):
        table.add_column(name, justify="left" if name == "program" else "right")
    table.add_column("MFU", justify="right")
    table.add_column("bound")
    for name, part in plan.programs.items():
        if part.times is None:
            table.add_row(name, f"{part.runs:g}", "does not fit")
            continue
        times = part.times
        table.add_row(
            name,
            f"{part.runs:g}",
            _short(part.program.dot_flops / 1e12),
            _short(part.flops / 1e12),
            *(
                _short(1e3 * value)
                for value in (times.total, times.compute, times.hbm, times.ici, times.ici_sync)
            ),
            f"{part.mfu(plan.slice_.chip.flops):.1%}",
            times.bound,
        )
    table.caption = (
        "per chip; runs: in a step; MXU, HBM, ICI: ms at each limit alone;\n"
        "waits: ms of collectives that nothing overlaps"
    )
    return table


def _short(value: float | int) -> str:
    """Three digits; of values below 0.001 only that, so that a table stays narrow."""
    return "<0.001" if 0 < value < 0.001 else f"{value:.3g}"


def collective_table(plan: Plan) -> Table:
    """What a chip sends, by kind and mesh axis."""
    table = Table(title="Collectives")
    for name in ("program", "kind", "axis", "executions", "sent, GiB", "overlapped"):
        table.add_column(name, justify="right" if name in ("executions", "sent, GiB") else "left")
    for name, part in plan.programs.items():
        if part.program is None:
            continue
        found = hlo.by_kind_and_axis(part.program.collectives, part.mesh)
        for (kind, axes), (times, sent) in sorted(found.items(), key=lambda item: -item[1][1]):
            share = _async_share(part, kind, axes)
            table.add_row(name, kind, axes, f"{times}", _short(sent / GIB), f"{share:.0%}")
    if not table.row_count:
        table.add_row("none", *[""] * (len(table.columns) - 1))
    return table


def _async_share(part: ProgramPlan, kind: str, axes: str) -> float | int:
    """Share of the bytes of a kind that other work may overlap."""
    own = [
        one
        for one in part.program.collectives
        if one.kind == kind and ("+".join(one.axes(part.mesh)) or "?") == axes
    ]
    total = sum(one.sent_bytes for one in own)
    return sum(one.sent_bytes for one in own if one.is_async) / total if total else 0


def search_table(plans: Sequence[Plan]) -> Table:
    """Compiled candidates, best first."""
    table = Table(title="Compiled candidates, fastest first")
    for name in ("replica", "fsdp", "tensor", "remat", "micro-batch", "GiB", "update, s", "MFU"):
        table.add_column(name, justify="left" if name == "remat" else "right")
    table.add_column("bound")
    for plan in plans:
        update = plan.programs["update"]
        times = update.times
        table.add_row(
            *(str(plan.mesh[axis]) for axis in ("replica", "fsdp", "tensor")),
            plan.settings["remat"],
            str(plan.settings["micro_batch_size"]),
            f"{plan.peak_bytes / GIB:.2f}" + ("" if plan.fits else " (too much)"),
            f"{times.total:.3g}" if times else "",
            f"{update.mfu(plan.slice_.chip.flops):.1%}" if times else "",
            times.bound if times else "",
        )
    return table


def draw(plan: Plan, file: pathlib.Path) -> None:
    """Writes a picture: memory of a chip by kind beside its limit, and times at each limit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(plan.programs)
    compiled = [part.compiled for part in plan.programs.values()]
    kinds = dict.fromkeys(kind for one in compiled for kind in one.arguments)
    parts = {kind: [one.arguments.get(kind, 0) for one in compiled] for kind in kinds}
    parts["gradients, temporaries"] = [
        one.used - sum(one.arguments.values()) if one.used else one.temporary for one in compiled
    ]
    parts["outputs, code"] = [one.output + one.code for one in compiled]
    bottom = [0.0] * len(names)
    for kind, sizes in parts.items():
        heights = [size / GIB for size in sizes]
        left.bar(names, heights, bottom=bottom, label=kind, width=0.5)
        bottom = [a + b for a, b in zip(bottom, heights)]
    left.axhline(plan.capacity / GIB, color="black", linestyle="--", label="HBM of a chip")
    left.set(ylabel="GiB per chip", title=f"{plan.slice_.name}: memory")
    left.legend(fontsize=8)
    shown = [(name, part) for name, part in plan.programs.items() if part.times is not None]
    limits = {"compute": "compute", "HBM": "hbm", "ICI": "ici", "predicted": "total"}
    width = 0.8 / max(len(shown), 1)
    for index, (name, part) in enumerate(shown):
        places = [i + index * width - 0.4 + width / 2 for i in range(len(limits))]
        values = [getattr(part.times, field) for field in limits.values()]
        bars = right.bar(places, values, width * 0.9, label=name)
        right.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7)
    right.set_xticks(range(len(limits)), list(limits))
    right.set(ylabel="seconds per run", title="time at each limit")
    right.margins(y=0.12)
    if shown:
        right.legend(fontsize=8)
    figure.savefig(file, dpi=150)
