"""TPU chips and their slices, GPU cards and clusters of them: public facts, no measurement.

Sources: docs.cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e, tables "key specifications" and
"configurations" (read 2026-11). The number of an accelerator type counts TensorCores for v5p, of
which a chip has two, and chips for v5e and v6e; each number has one shape. A link has, in one
direction, the bandwidth of its chip over twice the number of links. "How to scale your model"
(jax-ml.github.io/scaling-book/tpus) gives 10 % less per link, which it calls achievable:
`ICI_SHARE`. Wraparound links (`Slice.has_ring`) have, in v5p, all axes of a slice of whole cubes of
4x4x4 chips, and in v5e and v6e an axis of 16 chips.

Cards: NVIDIA's data sheets of H100, H200 and A100 (columns SXM) and of L40S. A peak is of bfloat16
products without sparsity, half of what a sheet gives with it. Links are NVLink in one direction,
half of a sheet's sum of both; an L40S has PCIe only. `kinds` are JAX's names of devices with the
peak of a chip or card.
"""

from __future__ import annotations

import bisect
import math
import re
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
    kinds: tuple[str, ...]

    @property
    def link_bandwidth(self) -> float | int:
        """Achievable bytes per second of one link in one direction."""
        return ICI_SHARE * self.ici_bandwidth / (2 * self.num_links)

    @property
    def node_bandwidth(self) -> float | int:
        """Achievable bytes per second that it can send over all its links."""
        return self.link_bandwidth * self.num_links

    @property
    def sizes(self) -> Mapping[int, str]:
        """The shapes by the numbers of their accelerator types: 64, as in v5p-64, is "2x4x4"."""
        return {
            self.num_cores * math.prod(map(int, shape.split("x"))): shape
            for shape in self.topologies
        }

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
        Chip("v5e", "v5litepod", 1, 16 * GB, 819 * GB, 197e12, 400 * GB, 4, 16, _FLAT,
             ("TPU v5 lite", "TPU v5e")),
        Chip("v5p", "v5p", 2, 95 * GB, 2765 * GB, 459e12, 1200 * GB, 6, 4, _CUBES,
             ("TPU v5", "TPU v5p")),
        Chip("v6e", "v6e", 1, 32 * GB, 1638 * GB, 918e12, 800 * GB, 4, 16, _FLAT,
             ("TPU v6 lite", "TPU v6e")),
    )
}  # fmt: skip


class Card(NamedTuple):
    """One GPU."""

    name: str  # as in a topology
    hbm_bytes: float | int
    hbm_bandwidth: float | int  # bytes per second
    flops: float | int  # bfloat16 products, floating point operations per second
    node_bandwidth: float | int  # bytes per second that it can send to the cards of its node
    kinds: tuple[str, ...]


CARDS = {
    card.name: card
    for card in (
        Card("h100", 80 * GB, 3350 * GB, 989.4e12, 450 * GB, ("NVIDIA H100 80GB HBM3",)),
        Card("h200", 141 * GB, 4800 * GB, 989.4e12, 450 * GB, ("NVIDIA H200",)),
        Card("a100-80", 80 * GB, 2039 * GB, 312e12, 300 * GB,
             ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
        Card("a100-40", 40 * GB, 1555 * GB, 312e12, 300 * GB,
             ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
        Card("l40s", 48 * GB, 864 * GB, 362.05e12, 32 * GB, ("NVIDIA L40S",)),
    )
}  # fmt: skip
_PEAKS = {kind: one.flops for one in (*CHIPS.values(), *CARDS.values()) for kind in one.kinds}
_BY_PREFIX = {name: chip for chip in CHIPS.values() for name in (chip.name, chip.prefix)}


class Slice(NamedTuple):
    """A slice of a pod."""

    chip: Chip
    shape: tuple[int, ...]  # chips along each dimension of the torus

    @property
    def per_node(self) -> int:
        """Chips of a host; a slice of eight may also have one host."""
        return min(4, self.num_chips)

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


class Cluster(NamedTuple):
    """Nodes with GPUs, all of them in one run."""

    chip: Card
    nodes: int
    per_node: int

    @property
    def num_chips(self) -> int:
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """The name, as the flag takes it."""
        return f"{self.chip.name}:{self.nodes}x{self.per_node}"

    @property
    def hbm_bytes(self) -> float | int:
        return self.num_chips * self.chip.hbm_bytes


def find_cluster(text: str) -> Cluster | None:
    """The cluster of a flag such as "h100:4x8"; None if it names no card, UserError if no size."""
    name, _, size = text.partition(":")
    if name not in CARDS:
        return None
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d?)", size)
    if found is None:
        raise UserError(f"--topology={text!r:.100} must be nodes x GPUs of each, as {name}:4x8.")
    return Cluster(CARDS[name], int(found[1]), int(found[2]))


def find_slice(text: str) -> Slice:
    """The slice of a flag such as "v5p:2x4x4" or "v5p-64"; UserError if it cannot be rented."""
    name, colon, shape = text.partition(":")
    kind, _, number = text.partition("-")
    chip = CHIPS.get(name) or _BY_PREFIX.get(kind)
    if chip is None:
        known = (
            f"the chip must be one of {', '.join(CHIPS)}, as in v5p:2x4x4 or v5p-64, or the GPU "
            f"one of {', '.join(CARDS)}, as in h100:4x8"
        )
    elif not colon and kind != text:
        shape = chip.sizes.get(int(number) if number.isdecimal() else 0, "")
        counts = "chips" if chip.num_cores == 1 else "TensorCores, two per chip"
        known = f"the number counts {counts}; next to it are {', '.join(chip.nearest(number))}"
    else:
        known = f"{chip.name} slices have the shapes {', '.join(chip.topologies)}"
    if chip is None or shape not in chip.topologies:
        raise UserError(f"--topology={text!r:.100}: {known}.")
    return Slice(chip, tuple(int(size) for size in shape.split("x")))


def peak_flops(kind: str) -> float | int | None:
    """The peak of bfloat16 products of a device that JAX names `kind`; None if it is not known."""
    return _PEAKS.get(kind)


def smallest_that_holds(num_bytes: float | int) -> list[str]:
    """For each chip the name of its smallest slice with so much memory; none if there is none."""
    found = []
    for name, chip in CHIPS.items():
        slices = [find_slice(f"{name}:{shape}") for shape in chip.topologies]
        found += [slice_.name for slice_ in slices if slice_.hbm_bytes >= num_bytes][:1]
    return found
