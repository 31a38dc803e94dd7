"""TPU chips and the slices that can be rented: public facts, no measurement.

Sources: docs.cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e, tables "key specifications" and
"configurations" (read 2026-11). The number of an accelerator type counts TensorCores for v5p, of
which a chip has two, and chips for v5e and v6e; each number has one shape. A link has, in one
direction, the bandwidth of its chip over twice the number of links. "How to scale your model"
(jax-ml.github.io/scaling-book/tpus) gives 10 % less per link, which it calls achievable:
`ICI_SHARE`. `Slice.has_ring` says which axes have wraparound links: in v5p all
axes of a slice of whole cubes of 4x4x4 chips, in v5e and v6e an axis of 16 chips.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import NamedTuple

from semrl_jax.support.errors import UserError

ICI_SHARE = 0.9


class Chip(NamedTuple):
    """One chip, which is one JAX device in all these generations."""

    name: str  # as in a topology
    prefix: str  # of the accelerator types, as in v5litepod-16
    num_cores: int  # that an accelerator type counts per chip
    hbm_bytes: float | int
    hbm_bandwidth: float | int  # bytes per second
    flops: float | int  # bfloat16 products, floating point operations per second
    ici_bandwidth: float | int  # bytes per second of all links in both directions
    num_links: int  # links to other chips, two per dimension of the torus
    ring_multiple: int  # an axis with wraparound links is a multiple of this
    topologies: tuple[str, ...]  # slices that can be rented

    @property
    def link_bandwidth(self) -> float | int:
        """Achievable bytes per second of one link in one direction."""
        return ICI_SHARE * self.ici_bandwidth / (2 * self.num_links)

    @property
    def sizes(self) -> Mapping[int, str]:
        """The shapes by the numbers of their accelerator types: 64, as in v5p-64, is "2x4x4"."""
        return {self.num_cores * _num_chips(shape): shape for shape in self.topologies}

    def nearest(self, number: str) -> list[str]:
        """The accelerator types next to one that does not exist; all if it is no number."""
        types = [f"{self.prefix}-{size}" for size in self.sizes]
        if not number.isdecimal():
            return types
        place = bisect.bisect(list(self.sizes), int(number))
        return types[max(0, place - 1) : place + 1]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
    "16x16x16", "16x16x24",
)  # fmt: skip
GB = 10**9
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5litepod", 1, 16 * GB, 819 * GB, 197e12, 400 * GB, 4, 16, _FLAT),
        Chip("v5p", "v5p", 2, 95 * GB, 2765 * GB, 459e12, 1200 * GB, 6, 4, _CUBES),
        Chip("v6e", "v6e", 1, 32 * GB, 1638 * GB, 918e12, 800 * GB, 4, 16, _FLAT),
    )
}
_BY_PREFIX = {name: chip for chip in CHIPS.values() for name in (chip.name, chip.prefix)}


class Slice(NamedTuple):
    """A slice of a pod."""

    chip: Chip
    shape: tuple[int, ...]  # chips along each dimension of the torus

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """The name, as the flag takes it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def accelerator_type(self) -> str:
        """Google's name for a slice of so many chips, such as v5p-64 for 32 of them."""
        return f"{self.chip.prefix}-{self.chip.num_cores * self.num_chips}"

    @property
    def hbm_bytes(self) -> float | int:
        return self.num_chips * self.chip.hbm_bytes

    def has_ring(self, size: int) -> bool:
        """Whether an axis of so many chips is closed to a ring."""
        multiple = self.chip.ring_multiple
        is_whole = len(self.shape) == 2 or all(own % multiple == 0 for own in self.shape)
        return is_whole and size % multiple == 0


def find_slice(text: str) -> Slice:
    """The slice of a flag such as "v5p:2x4x4" or "v5p-64"; UserError if it cannot be rented."""
    name, colon, shape = text.partition(":")
    kind, _, number = text.partition("-")
    chip = CHIPS.get(name) or _BY_PREFIX.get(kind)
    if chip is None:
        known = f"the chip must be one of {', '.join(CHIPS)}, as in v5p:2x4x4 or v5p-64"
    elif not colon and kind != text:
        shape = chip.sizes.get(int(number) if number.isdecimal() else 0, "")
        counts = "chips" if chip.num_cores == 1 else "TensorCores, two per chip"
        known = f"the number counts {counts}; next to it are {', '.join(chip.nearest(number))}"
    else:
        known = f"{chip.name} slices have the shapes {', '.join(chip.topologies)}"
    if chip is None or shape not in chip.topologies:
        raise UserError(f"--topology={text!r:.100}: {known}.")
    return Slice(chip, tuple(int(size) for size in shape.split("x")))


def _num_chips(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x"))


def smallest_that_holds(num_bytes: float | int) -> list[str]:
    """For each chip the name of its smallest slice with so much memory; none if there is none."""
    found = []
    for name, chip in CHIPS.items():
        slices = [find_slice(f"{name}:{shape}") for shape in chip.topologies]
        found += [slice_.name for slice_ in slices if slice_.hbm_bytes >= num_bytes][:1]
    return found
