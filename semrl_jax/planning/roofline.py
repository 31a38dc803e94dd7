"""The time that a program takes at the limits of a chip.

Source: "How to scale your model" (jax-ml.github.io/scaling-book), chapters on rooflines and sharded
products, for the formulas and for the cost of collectives on a torus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from semrl_jax.planning.hlo import Collective, Program
from semrl_jax.support.chips import Slice


class Times(NamedTuple):
    """Seconds of one run of a program on a chip, each at its own limit."""

    compute: float | int  # all products at the peak rate
    hbm: float | int  # all bytes outside the chip at the bandwidth
    chip: float | int  # each instruction the larger of both, because one waits for the other
    ici_async: float | int  # collectives that other instructions may overlap
    ici_sync: float | int  # collectives during which the chip waits

    @property
    def total(self) -> float | int:
        """The longer of the chip's work and the collectives that overlap it, plus the others."""
        return max(self.chip, self.ici_async) + self.ici_sync

    @property
    def bound(self) -> str:
        """What takes most of the time: "compute", "HBM" or "ICI"."""
        if self.ici_async + self.ici_sync > self.chip:
            return "ICI"
        return "compute" if self.compute >= self.chip - self.compute else "HBM"


def times(program: Program, where: Slice, places: Sequence[Sequence[int]]) -> Times:
    """The roofline of a program; `places` are coordinates in the torus of the mesh's devices."""
    chip = where.chip
    compute = hbm = together = 0.0
    for work in program.work:
        own = work.times * work.flops / chip.flops
        moved = work.times * work.hbm_bytes / chip.hbm_bandwidth
        compute, hbm, together = compute + own, hbm + moved, together + max(own, moved)
    by_kind = {True: 0.0, False: 0.0}
    for collective in program.collectives:
        by_kind[collective.is_async] += collective_s(collective, where, places)
    return Times(compute, hbm, together, by_kind[True], by_kind[False])


def collective_s(
    collective: Collective, where: Slice, places: Sequence[Sequence[int]]
) -> float | int:
    """Seconds of all executions of a collective at the bandwidth of the links it can use.

    A group uses the links of the dimensions along which its devices differ: two per dimension, or
    the work of one if the dimension is no ring. An all-to-all is limited by the links in the
    middle of the longest dimension. Latency is left out.
    """
    members = [places[index] for index in collective.members]
    extents = [len(set(coordinate)) for coordinate in zip(*members)]
    rings = [
        (extent, where.has_ring(size) and extent == size)
        for extent, size in zip(extents, where.shape)
        if extent > 1
    ] or [(2, False)]
    link = where.chip.link_bandwidth
    if collective.kind == "collective-permute":
        return collective.sent_bytes / link
    if collective.kind == "all-to-all":
        extent, is_ring = max(rings)
        own = collective.num_bytes * collective.times
        return own * extent / (8 if is_ring else 4) / link
    return collective.sent_bytes / (link * sum(2 if is_ring else 1 for _, is_ring in rings))
