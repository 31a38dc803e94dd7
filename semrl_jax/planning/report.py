"""A plan as lines and tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from semrl_jax.planning.estimate import MARGIN
from semrl_jax.planning.slice_programs import ADDED

GIB = 2**30


def headline(plan: Mapping[str, Any]) -> list[str]:
    """What to know first: whether it fits, how fast it is, what bounds it."""
    used, limit = plan["peak_bytes"] / GIB, plan["hbm_bytes"] / GIB
    mesh = " ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1)
    chips = f"{plan['chips']} chips, {mesh}" if mesh else "1 chip"
    where = f"{plan['topology']} ({plan.get('accelerator_type', 'estimated')})"
    if plan.get("trains_on", plan["topology"]) != plan["topology"]:
        where += f", {plan['trains_on']} trains"
    lines = [
        f"{where}: {chips}, remat {plan['remat']}, micro-batch {plan['micro_batch_size']}",
        f"model: {_parameters(plan['parameters'])} parameters",
        f"{'fits' if plan['fits'] else 'DOES NOT FIT'}: {used:.2f} of {limit:.2f} GiB per chip",
    ]
    if plan["step_s"] is not None:
        seconds = plan["programs"]["update"]["times_s"]["total"]
        step = "all updates and passes of a step"
        if plan.get("replica"):
            step = "a step with its sampling"
        lines.append(
            f"update: {_seconds(seconds)}, predicted MFU {plan['update_mfu']:.1%}, bound by "
            f"{plan['bound']}; {step}: {_seconds(plan['step_s'])}"
        )
    if "trains_on" in plan:
        lines += _estimate_lines(plan)
    for name, part in plan["programs"].items():
        for option, value in part["compiler_options"].items():
            lines.append(f"{name}: compiles only with LIBTPU_INIT_ARGS=--{option}={value}")
    return lines + [f"to make it fit: {text}" for text in plan["advice"]]


def _estimate_lines(plan: Mapping[str, Any]) -> list[str]:
    """What an estimate says in addition: shares of a card, the replicas, and the network."""
    most, share = plan["most_of_a_card"], plan["peak_bytes"] / plan["hbm_bytes"]
    lines = []
    if most < 1.0:
        setting = f"XLA_PYTHON_CLIENT_MEM_FRACTION={most:.2g} (default 0.75)"
        if plan["in_turns"]:
            setting = "XLA_PYTHON_CLIENT_ALLOCATOR=platform"
        lines.append(
            f"arrays: {share:.0%} of a card, {share * MARGIN:.0%} with a margin; set {setting}"
        )
    if plan["replica"] is None:
        lines.append("sampling is on other machines (rollout.addresses), and not in this estimate")
    else:
        replica = plan["replica"]
        lines.append(
            f"replicas: {replica['copies']} of {replica['cards']} device(s), "
            f"{replica['slots']} of {replica['responses']} responses side by side"
            f"{'' if replica['fits'] else ', WHICH DO NOT FIT'}; "
            f"{replica['weight_bytes'] / GIB:.3g} GiB of weights to each"
        )
    update = plan["programs"]["update"]
    if sent := update["leaving_bytes"]:
        rate = sent / update["times_s"]["total"] / 1e9
        lines.append(
            f"network: {sent / GIB:.3g} GiB leave a node per update, {rate:.3g} GB/s to overlap all"
        )
    return lines


def _parameters(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _seconds(value: float | int) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def memory_table(plan: Mapping[str, Any]) -> Table:
    """GiB per chip by kind, one column per program."""
    sized = {name: part["bytes"] for name, part in plan["programs"].items() if "bytes" in part}
    table = _table("HBM per chip, GiB", "kind", *sized)
    sizes = list(sized.values())
    last = (*ADDED, "total")
    kinds = dict.fromkeys(kind for own in sizes for kind in own if kind not in last)
    compiled = [kind for kind in last if any(kind in own for own in sizes)]
    for kind in (*kinds, *compiled):
        table.add_row(kind, *(f"{own[kind] / GIB:.3f}" if kind in own else "" for own in sizes))
    for kind, size in plan["held_bytes"].items():
        table.add_row(f"stays: {kind}", *[f"{size / GIB:.3f}"] * len(sizes))
    if "temporary" in compiled:
        table.caption = "temporary: gradients are among them"
    return table


def time_table(plan: Mapping[str, Any]) -> Table:
    """Roofline of each program."""
    columns = ("runs", "TFLOP", "needed", "ms", "compute", "HBM", "links", "waits", "MFU", "bound")
    table = _table("Roofline of one run of each program", "program", *columns)
    for name, part in plan["programs"].items():
        times = part.get("times_s")
        if times is None:
            table.add_row(name, f"{part['runs']:g}", "does not fit")
            continue
        ici = times["ici_async"] + times["ici_sync"]
        shown = times["total"], times["compute"], times["hbm"], ici, times["ici_sync"]
        table.add_row(
            name,
            f"{part['runs']:g}",
            _short(part["flops"] / 1e12),
            _short(part["needed_flops"] / 1e12),
            *(_short(1e3 * value) for value in shown),
            f"{part['mfu']:.1%}",
            part["bound"],
        )
    table.caption = (
        "per chip; runs: in a step; compute, HBM, links: ms at each limit alone;\n"
        "waits: ms of collectives that nothing overlaps"
    )
    return table


def collective_table(plan: Mapping[str, Any]) -> Table:
    """What a chip sends, by kind and mesh axis."""
    table = _table(
        "Collectives", "program", "kind", "axis", "executions", "sent, GiB", "overlapped"
    )
    for name, part in plan["programs"].items():
        for one in part.get("collectives", ()):
            sent, share = _short(one["sent_bytes"] / GIB), f"{one['overlapped']:.0%}"
            table.add_row(name, one["kind"], one["axes"], str(one["times"]), sent, share)
    if not table.row_count:
        table.add_row("none")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        is_text = name in ("kind", "program", "axis", "bound")
        table.add_column(name, justify="left" if is_text else "right")
    return table


def _short(value: float | int) -> str:
    """Three digits; of values below 0.001 only that, so that a table stays narrow."""
    return "<0.001" if 0 < value < 0.001 else f"{value:.0f}" if value > 999 else f"{value:.3g}"
