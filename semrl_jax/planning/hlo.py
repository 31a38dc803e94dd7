"""Collectives, products and memory traffic of a compiled program, read from its HLO text.

Pure functions of text. A loop counts as often as it runs: XLA's own cost analysis counts its body
once. The number of passes is in the text, as a known trip count or as the constant in the loop's
condition. Loops whose bound is an argument (over micro-batches) take it from the caller.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all",
)  # fmt: skip
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5, "s16": 2, "u16": 2}

_COMPUTATION = re.compile(r"^(ENTRY )?%([^ ]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%([^ ]+) = (\((?:[^()]|\([^()]*\))*\)|[^ ]+) ([a-z][a-z0-9-]*)\((.*)$"
)
_ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%([^ ,)]+)")
_INDEX = re.compile(r"index=(\d+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([^ ,()]+)")
_OPERANDS_OF_KERNEL = re.compile(
    r'"tpu_custom_call", operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}'
)
# Products of each block: scores and attended values; those and three or two of their gradients.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# On-chip memory of a TPU. Without it, or in space 0, an array is in HBM.
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")
# Instructions that move nothing themselves.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "add-dependency", "partition-id", "replica-id", "opt-barrier", "domain",
    "copy-done", "async-done", "async-update", "slice-done",
}  # fmt: skip
# What these call computes one element.
_OF_ELEMENTS = {*COLLECTIVES, "reduce", "reduce-window", "sort", "scatter", "map"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices."""

    kind: str  # one of `COLLECTIVES`
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of its results on one device
    members: tuple[int, ...]  # the devices of the first group, as positions in the mesh
    # Executions in one run of the program, with those of loops. Of several branches, one counts.
    times: int
    op_name: str  # the origin in the traced program
    is_async: bool = False  # whether other instructions may run between its start and its end

    @property
    def group(self) -> int:
        """Number of devices in one group."""
        return len(self.members)

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger of operand and result (gathered, summed or sent), per execution."""
        size = sum(BYTES[dtype] * math.prod(shape) for dtype, shape in self.arrays)
        return int(size * self.group if self.kind == "reduce-scatter" else size)

    @property
    def sent_bytes(self) -> float | int:
        """Bytes that a device sends in all executions, by ring algorithms."""
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.num_bytes * self.times

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of the mesh along which the devices of a group differ."""
        places = np.unravel_index(self.members, tuple(mesh.values()))
        return tuple(axis for axis, place in zip(mesh, places) if len(set(place.tolist())) > 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """What executed instructions of one kind need, other than collectives."""

    flops: float | int  # floating point operations of products
    hbm_bytes: float | int  # read from and written to memory that is not on the chip
    times: int  # executions in one run of the program


@dataclasses.dataclass(frozen=True)
class Program:
    """What one run of a compiled program does on each device."""

    collectives: tuple[Collective, ...]
    work: tuple[Work, ...]

    @property
    def dot_flops(self) -> int:
        """Floating point operations of products."""
        return int(sum(part.flops * part.times for part in self.work))

    @property
    def hbm_bytes(self) -> float | int:
        """Bytes read and written outside the chip."""
        return sum(part.hbm_bytes * part.times for part in self.work)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str
    is_root: bool = False

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands: those before the parenthesis that closes the list."""
        depth = 1
        for end, character in enumerate(self.rest):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return tuple(_OPERAND.findall(self.rest[:end]))
        return ()

    @property
    def kind(self) -> str:
        """The opcode; an asynchronous start has the opcode of its whole operation."""
        return self.opcode.removesuffix("-start")

    @property
    def number(self) -> int:
        """The value of a constant, or the index of a parameter."""
        return int(self.rest.partition(")")[0])

    def called(self, attribute: str) -> str:
        """The computation that an attribute such as `body` names."""
        return re.search(rf"{attribute}=%([^ ,)]+)", self.rest).group(1)


def read(text: str, passes: int | None = None) -> Program:
    """Reads `compiled.as_text()` of any backend; collectives within one device are left out.

    `passes` is of the loops whose number of passes is not in the text; without it, ValueError.
    """
    computations, entry = _computations(text)
    collectives, work = [], []
    for times, instructions, instruction in _executed(computations, entry, 1, passes):
        is_collective = instruction.kind in COLLECTIVES
        flops = _flops(instruction, instructions, computations)
        if math.isnan(times):
            if is_collective or flops:
                raise ValueError(f"%{instruction.name} is in a loop of unknown length")
        elif is_collective:
            members, rest = _members(instruction.rest), instruction.rest
            name = _OP_NAME.search(rest)
            origin = name.group(1) if name else ""
            is_async = instruction.opcode.endswith("-start") or "async_collective" in rest
            if len(members) > 1:
                arrays = _arrays(instruction)
                found = Collective(instruction.kind, arrays, members, times, origin, is_async)
                collectives.append(found)
        elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
            moved = _hbm_bytes(instruction, instructions, computations)
            if flops or moved:
                work.append(Work(flops, moved, times))
    return Program(tuple(collectives), tuple(work))


def by_kind_and_axis(
    collectives: Sequence[Collective], mesh: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Sums by kind and mesh axes, such as all-gather over "fsdp"; the largest first.

    `overlapped` is the share of a device's `sent_bytes` that other work may overlap.
    """
    groups = collections.defaultdict(list)
    for one in collectives:
        groups[one.kind, "+".join(one.axes(mesh)) or "?"].append(one)
    found = []
    for (kind, axes), own in groups.items():
        sent = sum(one.sent_bytes for one in own)
        sums = {"kind": kind, "axes": axes, "times": sum(one.times for one in own)}
        overlapped = sum(one.sent_bytes for one in own if one.is_async) / (sent or 1)
        found.append({**sums, "sent_bytes": sent, "overlapped": overlapped})
    return sorted(found, key=lambda sums: -sums["sent_bytes"])


def _computations(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Per computation its instructions by name; and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header.group(2)] = {}
            entry = header.group(2) if header.group(1) else entry
        elif found := _INSTRUCTION.match(re.sub(r"/\*index=\d+\*/", "", line)):
            root, *fields = found.groups()
            current[fields[0]] = _Instruction(*fields, is_root=bool(root))
    return computations, entry


def _executed(computations, name, times, passes) -> Iterator:
    """Yields (times, the computation, instruction) for everything that a computation executes.

    The inside of a fusion is not executed on its own. Only its collectives are: some compilers
    put a product next to one. A TPU's reduce-scatter is often a fusion of an all-reduce and a slice
    of it, of which the chips do the scattering half only ("AllReduceScatterFusion" in its text).
    """
    instructions = computations[name]
    for instruction in instructions.values():
        yield times, instructions, instruction
        inner = times
        if instruction.opcode == "while":
            inner = times * _trips(instruction, computations, passes)
        if instruction.opcode == "fusion":
            callee = instruction.called("calls")
            for _, inside, part in _executed(computations, callee, times, passes):
                if part.kind in COLLECTIVES:
                    yield times, inside, _scattered(part, inside)
            continue
        if branches := _BRANCHES.search(instruction.rest):
            # The branch with most instructions: of a block of attention, the one that computes it.
            called = _OPERAND.findall(branches.group(1))
            called = [max(called, key=lambda name: _size(computations, name))]
        else:
            called = [] if instruction.kind in _OF_ELEMENTS else _CALLED.findall(instruction.rest)
        for callee in called:
            yield from _executed(computations, callee, inner, passes)


def _scattered(part: _Instruction, inside) -> _Instruction:
    """An all-reduce of which its fusion keeps a slice, as a reduce-scatter; others as they are."""
    (root,) = (other for other in inside.values() if other.is_root)
    if root.opcode == "dynamic-slice" and root.operands[0] == part.name:
        return dataclasses.replace(part, opcode="reduce-scatter", shape=root.shape)
    return part


def _size(computations, name: str) -> int:
    return sum(1 for _ in _executed(computations, name, 1, 1))


def _trips(loop: _Instruction, computations, passes: int | None) -> float | int:
    """How often a loop runs: from its own text, or from the only constant of its condition."""
    if trips := _TRIPS.search(loop.rest):
        return int(trips.group(1))
    condition = computations.get(loop.called("condition"), {})
    fused = [part.called("calls") for part in condition.values() if part.opcode == "fusion"]
    parts = [part for body in (condition, *map(computations.get, fused)) for part in body.values()]
    limits = {
        part.number
        for part in parts
        if part.opcode == "constant" and part.shape.startswith(("s32[]", "u32[]"))
    }
    if len(limits) == 1:
        return math.ceil(limits.pop() / _step(loop, condition, computations))
    return math.nan if passes is None else passes


def _step(loop: _Instruction, condition, computations) -> int:
    """What each pass adds to the counter of a loop, 1 if the text does not say."""
    counters = [part for part in condition.values() if part.opcode == "get-tuple-element"]
    body = computations.get(loop.called("body"), {})
    roots = [part for part in body.values() if part.is_root and part.opcode == "tuple"]
    if len(counters) != 1 or not roots:
        return 1
    place = int(_INDEX.search(counters[0].rest).group(1))
    added = body.get(roots[0].operands[place])
    if added is None or added.opcode != "add":
        return 1
    steps = [body[name].number for name in added.operands if body[name].opcode == "constant"]
    return steps[0] if len(steps) == 1 else 1


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each array in a text."""
    return [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims, _ in _ARRAY.findall(text)
    ]


def _arrays(instruction: _Instruction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = _shapes(instruction.shape)
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        # (operands, results, and on a TPU two numbers of its own)
        found = [array for array in found if array != ("u32", ())]
        found = found[len(found) // 2 :]
    return tuple(found)


def _hbm_arrays(shape: str) -> list[float | int]:
    """Bytes of the arrays of a shape that are not on the chip."""
    return [
        BYTES.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims, layout in _ARRAY.findall(shape)
        if not _ON_CHIP.search(layout)
    ]


def _hbm_bytes(instruction: _Instruction, instructions, computations) -> float | int:
    """Bytes that an instruction moves outside the chip; of a slice or update, only that part."""
    opcode, own = instruction.opcode, _hbm_arrays(instruction.shape)
    given = [
        sum(_hbm_arrays(instructions[name].shape))
        for name in instruction.operands
        if name in instructions
    ]
    if opcode in ("dynamic-slice", "gather") or opcode.startswith("slice"):
        return 2 * sum(own[:1])
    if opcode == "dynamic-update-slice":
        return 2 * given[1]
    if opcode == "copy-start":
        return sum(own[:2])
    if opcode != "fusion":
        return sum(own) + sum(given)
    body = computations[instruction.called("calls")]
    read, is_updated = 0, False
    for part in body.values():
        if part.opcode == "parameter" and part.number < len(given) and given[part.number]:
            size, is_changed = _read_of(part.name, body, given[part.number])
            read, is_updated = read + size, is_updated or is_changed
    changed = {
        sum(_hbm_arrays(part.shape)): sum(_hbm_arrays(body[part.operands[1]].shape))
        for part in body.values()
        if is_updated and part.opcode == "dynamic-update-slice"
    }
    return read + sum(changed.get(size, size) for size in own)


def _read_of(name: str, body, size: float | int) -> tuple[float | int, bool]:
    """Bytes that a fusion reads of a parameter, and whether it updates a slice of it in place."""
    users = [part for part in body.values() if name in part.operands]
    if len(users) == 1 and users[0].opcode == "bitcast":
        return _read_of(users[0].name, body, size)
    if users and all(part.opcode in ("dynamic-slice", "slice", "gather") for part in users):
        return sum(sum(_hbm_arrays(part.shape)) for part in users), False
    if users and all(
        part.opcode == "dynamic-update-slice" and part.operands[0] == name for part in users
    ):
        return 0.0, True
    return size, False


def _flops(instruction: _Instruction, instructions, computations) -> float | int:
    """Floating point operations of the products of an instruction, the inside of a fusion too."""
    if instruction.opcode in ("dot", "convolution"):
        return _product_flops(instruction, instructions)
    if instruction.opcode == "fusion":
        body = computations[instruction.called("calls")]
        return sum(_flops(part, body, computations) for part in body.values())
    if instruction.opcode == "custom-call":
        return _kernel_flops(instruction)
    return 0


def _kernel_flops(instruction: _Instruction) -> float | int:
    """Products of the kernels that a TPU's program calls, from the shapes of their operands.

    Splash attention computes the blocks under the diagonal, or fewer with a window: the grid says
    how many at most. `ragged_dot` multiplies each row with one kernel; all its rows count.
    """
    given = _OPERANDS_OF_KERNEL.search(instruction.rest)
    if given is None:
        return 0
    arrays = _shapes(given.group(1))
    if instruction.name.startswith("ragged-dot-none"):
        (_, rows), (_, kernels) = arrays[-2:]
        return 2 * math.prod(rows) * kernels[-1]
    if kind := re.match(r"splash_m[hq]a_(fwd|dq|dkv)_", instruction.name):
        # Operands: the grid of blocks for each head, whole numbers; then queries [..., S, H].
        _, num_blocks, num_others = next(shape for _, shape in arrays if len(shape) == 3)
        queries = next(shape for dtype, shape in arrays if dtype in ("bf16", "f32"))
        computed = min(num_blocks * num_others, num_blocks * (num_blocks + 1) / 2)
        pairs = computed * (queries[-2] / num_blocks) ** 2
        return 2 * _SPLASH_PRODUCTS[kind.group(1)] * pairs * math.prod(queries) / queries[-2]
    return 0


def _product_flops(instruction: _Instruction, instructions: dict[str, _Instruction]) -> int:
    """2 * outputs * terms per output, from the sizes of both operands and the result.

    A product of a batch of n matrices has n M K, n K N and n M N numbers: the operations are twice
    the root of their product over n. TPUs write every product as a convolution, with dimensions of
    the batch as spatial ones, of the same size in operands and result.
    """
    shapes = [instructions[name] for name in instruction.operands[:2]] + [instruction]
    shapes = [_arrays(part)[0][1] for part in shapes]
    if instruction.opcode == "dot":
        batch = re.search(r"lhs_batch_dims=\{([0-9,]*)\}", instruction.rest)
        count = math.prod(shapes[0][int(n)] for n in batch.group(1).split(",")) if batch else 1
    else:
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest).groups()
        sizes = [dict(zip(names, shape)) for names, shape in zip(labels, shapes)]
        spatial = [{part[name] for part in sizes} for name in set(labels[2]) - set("bf")]
        count = math.prod(min(found) for found in spatial if len(found) == 1)
    return 2 * math.isqrt(math.prod(map(math.prod, shapes)) // count)


def _members(rest: str) -> tuple[int, ...]:
    """The devices of the first group, for each notation of groups in HLO."""
    if found := re.search(r"replica_groups=\{\{([0-9,]*)\}", rest):
        return tuple(int(n) for n in found.group(1).split(","))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[0-9,]+\](?:T\([0-9,]+\))?)", rest):
        return tuple(_order(found.group(3)).reshape(int(found.group(1)), -1)[0].tolist())
    # mesh['a'=2,'b'=4], device_ids=(...) {'a','b':(1)2}; the last one is part of an axis
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{('[^}]*)\}", rest):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
        order = re.search(r"device_ids=\((\[[0-9,]+\](?:T\([0-9,]+\))?)\)", found.group(2))
        order = _order(order.group(1)) if order else np.arange(math.prod(sizes.values()))
        places = order.reshape(tuple(sizes.values()))
        parts = {
            name: (int(before or 1), int(part or sizes[name]))
            for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", found.group(3))
        }
        chosen = []
        for name, size in sizes.items():
            before, part = parts.get(name, (1, 1))
            # A part of an axis is the middle of (before, part, after).
            chosen.append(np.arange(part) * (size // (before * part)))
        return tuple(places[np.ix_(*chosen)].reshape(-1).tolist())
    if "source_target_pairs=" in rest:
        pairs = re.findall(r"\{(\d+),(\d+)\}", rest)
        return next(((int(a), int(b)) for a, b in pairs if a != b), (0,))
    raise ValueError(f"no groups in {rest[:200]!r}")


def _order(text: str) -> np.ndarray:
    """The device numbers of an iota such as [2,4]T(1,0)."""
    sizes, _, axes = text.partition("T")
    shape = [int(n) for n in sizes.strip("[]").split(",")]
    order = np.arange(math.prod(shape)).reshape(shape)
    if axes:
        order = order.transpose([int(n) for n in axes.strip("()").split(",")])
    return order.reshape(-1)
