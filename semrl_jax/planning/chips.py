"""TPU chips and the slices that can be rented: public facts, no measurement.

Sources: docs.cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e, tables "key specifications" (read
2026-11). A link has, in one direction, the bandwidth of its chip over twice the number of links.
"How to scale your model" (jax-ml.github.io/scaling-book/tpus) gives 10 % less per link, which it
calls achievable: `ICI_SHARE`. Its rule for wraparound links is `has_ring`: a v5p axis has them if
it is a multiple of 4 chips, a v5e or v6e axis if it has 16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from semrl_jax.support.errors import UserError

ICI_SHARE = 0.9


class Chip(NamedTuple):
    """One chip, which is one JAX device in all these generations."""

    name: str  # as in a topology
    hbm_bytes: float | int
    hbm_bandwidth: float | int  # bytes per second
    flops: float | int  # bfloat16 products, floating point operations per second
    ici_bandwidth: float | int  # bytes per second of all links in both directions
    num_links: int  # links to other chips, two per dimension of the torus
    ring_multiple: int  # an axis has wraparound links if its size is a multiple of this
    topologies: tuple[str, ...]  # slices that can be rented

    @property
    def link_bandwidth(self) -> float | int:
        """Achievable bytes per second of one link in one direction."""
        return ICI_SHARE * self.ici_bandwidth / (2 * self.num_links)

    def has_ring(self, size: int) -> bool:
        """Whether an axis of so many chips is closed to a ring."""
        return size % self.ring_multiple == 0


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
    "16x16x16", "16x16x24",
)  # fmt: skip
GB = 10**9
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16 * GB, 819 * GB, 197e12, 400 * GB, 4, 16, _FLAT),
        Chip("v5p", 95 * GB, 2765 * GB, 459e12, 1200 * GB, 6, 4, _CUBES),
        Chip("v6e", 32 * GB, 1638 * GB, 918e12, 800 * GB, 4, 16, _FLAT),
    )
}


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
    def hbm_bytes(self) -> float | int:
        return self.num_chips * self.chip.hbm_bytes


def find_slice(text: str) -> Slice:
    """The slice of a flag such as "v5p:4x4x4"; UserError for one that cannot be rented."""
    name, _, shape = text.partition(":")
    if name not in CHIPS:
        known = f"the chip must be one of {', '.join(CHIPS)}, as in v5p:4x4x4"
    elif shape not in CHIPS[name].topologies:
        known = f"{name} slices have the shapes {', '.join(CHIPS[name].topologies)}"
    else:
        return Slice(CHIPS[name], tuple(int(size) for size in shape.split("x")))
    raise UserError(f"--topology={text!r:.100}: {known}.")


def smallest_that_holds(num_bytes: float | int) -> list[str]:
    """For each chip the name of its smallest slice with so much memory; none if there is none."""
    found = []
    for name, chip in CHIPS.items():
        slices = [find_slice(f"{name}:{shape}") for shape in chip.topologies]
        found += [slice_.name for slice_ in slices if slice_.hbm_bytes >= num_bytes][:1]
    return found
