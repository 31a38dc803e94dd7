"""Collectives and products of a compiled program, read from its HLO text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all",
)  # fmt: skip
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8}

_COMPUTATION = re.compile(r"^(ENTRY )?%([^ ]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([^ ]+) = (\(.*?\)|[^ ]+) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%([^ ,)]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices.

    Attributes:
      kind: one of `COLLECTIVES`.
      arrays: dtype and shape of its results on one device.
      group: number of devices in one group.
      times: number of executions in one run of the program. Loops count as often as they run. Of
        several branches, one counts.
      op_name: the origin in the traced program.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    group: int
    times: int
    op_name: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger of operand and result (gathered, summed or sent), per execution."""
        size = sum(BYTES[dtype] * math.prod(shape) for dtype, shape in self.arrays)
        return size * self.group if self.kind == "reduce-scatter" else size

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all executions, by ring algorithms."""
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.num_bytes * self.times


@dataclasses.dataclass(frozen=True)
class Program:
    """The collectives of a compiled program, and the floating point operations of its products."""

    collectives: tuple[Collective, ...]
    dot_flops: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str


def read(text: str) -> Program:
    """Reads `compiled.as_text()`. Collectives within one device are left out.

    Raises:
      ValueError: for a loop with a collective or a product, if its number of passes is unknown.
    """
    computations, entry = _computations(text)
    collectives, flops = [], 0
    for times, instructions, instruction in _executed(computations, entry, 1):
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            group = _group(instruction.rest)
            name = _OP_NAME.search(instruction.rest)
            if group > 1:
                collectives.append(
                    Collective(
                        opcode,
                        _arrays(instruction),
                        group,
                        times,
                        name.group(1) if name else "",
                    )
                )
        elif opcode == "dot":
            flops += times * _dot_flops(instruction, instructions)
        if math.isnan(times) and (opcode in COLLECTIVES or opcode == "dot"):
            raise ValueError(f"%{instruction.name} is in a loop of unknown length")
    return Program(tuple(collectives), int(flops))


def _computations(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Per computation its instructions by name; and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header.group(2)] = {}
            entry = header.group(2) if header.group(1) else entry
        elif found := _INSTRUCTION.match(re.sub(r"/\*index=\d+\*/", "", line)):
            current[found.group(1)] = _Instruction(*found.groups())
    return computations, entry


def _executed(computations, name, times) -> Iterator:
    """Yields (times, the computation, instruction) for everything that a computation executes."""
    instructions = computations[name]
    for instruction in instructions.values():
        yield times, instructions, instruction
        inner = times
        if instruction.opcode == "while":
            trips = _TRIPS.search(instruction.rest)
            inner = times * int(trips.group(1)) if trips else math.nan
        if branches := _BRANCHES.search(instruction.rest):
            # Take the branch with most instructions: for a block of attention, it is the branch
            # that computes the block.
            called = [_computation_name(part) for part in branches.group(1).split(",")]
            called = [max(called, key=lambda name: _size(computations, name))]
        else:
            called = _CALLED.findall(instruction.rest)
        for callee in called:
            yield from _executed(computations, callee, inner)


def _size(computations, name: str) -> int:
    return sum(1 for _ in _executed(computations, name, 1))


def _computation_name(text: str) -> str:
    return text.strip().removeprefix("%")


def _arrays(instruction: _Instruction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(instruction.shape)
    ]
    if instruction.opcode.endswith("-start"):  # (operands, results)
        found = found[len(found) // 2 :]
    return tuple(found)


def _group(rest: str) -> int:
    """Number of devices in one group, for each notation of groups in HLO."""
    if found := re.search(r"replica_groups=\{\{([0-9,]*)\}", rest):
        return found.group(1).count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(found.group(1))
    # mesh['a'=2,'b'=4], device_ids=(...) {'a','b':(1)2}; the last one is part of an axis
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{('[^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        names = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found.group(2))
        return math.prod(int(part or sizes[name]) for name, part in names)
    if "source_target_pairs=" in rest:
        pairs = re.findall(r"\{(\d+),(\d+)\}", rest)
        return 2 if any(a != b for a, b in pairs) else 1
    raise ValueError(f"no groups in {rest[:200]!r}")


def _dot_flops(instruction: _Instruction, instructions: dict[str, _Instruction]) -> int:
    """2 * outputs * terms per output; shapes of operands are those of their instructions."""
    left = re.match(r"(?:[a-z0-9]+\[[0-9,]*\]\S* )?%([^ ,)]+)", instruction.rest).group(1)
    contracted = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", instruction.rest).group(1)
    (_, shape), *_ = _arrays(instructions[left])
    (_, result), *_ = _arrays(instruction)
    terms = math.prod(shape[int(n)] for n in contracted.split(",") if n)
    return 2 * math.prod(result) * terms
