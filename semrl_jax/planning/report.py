"""A plan as tables of at most 100 columns."""

from __future__ import annotations

from rich.table import Table

from semrl_jax.planning import hlo
from semrl_jax.planning.plan import Plan, ProgramPlan

GIB = 2**30


def headline(plan: Plan) -> list[str]:
    """What to know first: whether it fits, how fast it is, what bounds it."""
    used, limit = plan.peak_bytes / GIB, plan.slice_.chip.hbm_bytes / GIB
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
        row(f"stays: {kind}", [size] * len(compiled))
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
        found = hlo.by_kind_and_axis(part.program.collectives, part.compiled.mesh.shape)
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
        if one.kind == kind and ("+".join(one.axes(part.compiled.mesh.shape)) or "?") == axes
    ]
    total = sum(one.sent_bytes for one in own)
    return sum(one.sent_bytes for one in own if one.is_async) / total if total else 0
