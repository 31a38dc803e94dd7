"""How the sequences of a batch are laid out on the devices: in rows, and rows in micro-batches.

The rest of the system sees responses as [B, T]. A pass over them sees M micro-batches of R rows of
S columns; each data shard has R / shards of the rows. A row holds one sequence (a prompt and its
response, from column 0), or with `pack_sequences` as many as fit. Segment ids tell the sequences of
a row apart, and positions start from 0 in each.

Responses to the same prompt share it if that takes less computation. A bundle then takes the place
of a sequence: the prompt once, and several responses after it. Each response attends to the prompt
and to itself. Positions of each response begin after the last position of the prompt. Such rows are
filled in the order of the responses, so a prompt is once in each row that has responses to it.
Further conversations of an episode are segments of their own, each in consecutive columns.

Of a row's columns, at most U produce tokens of the policy. The states of these columns are gathered
into slots, and only slots get logits. Context inside a response (False in `response_mask`) is
attended to, but has no slot. Columns and slots that no sequence fills are padding: segment 0,
weight 0.

The host computes where everything goes, from token ids and masks. Values of response tokens stay on
the devices; `take_values` moves them between [B, T] and [M, R, U] by index.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from semrl_jax.models import DATA_AXES
from semrl_jax.models.attention import BRANCHES, block_columns
from semrl_jax.models.hosts import from_host
from semrl_jax.models.sharding import platform_of
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.training.rollout_batch import bucket
from semrl_jax.types import RolloutBatch

# 60 batches with lengths like those of GSM8K need 3 programs, at a cost that is below 1 % higher.
# With 1.0 in its place they need 7.
NEARLY_EQUAL = 1.05


class TokenRows(NamedTuple):
    """What a forward pass and a loss read; int32, 0 where padded; a pytree."""

    token_ids: Int[Array, "M R S"]
    positions: Int[Array, "M R S"]  # from 0 at the first prompt token of each sequence
    # See `models.attention.BRANCHES`: i for sequence i = 1, 2, ... with a prompt of its own.
    segment_ids: Int[Array, "M R S"]
    response_ids: Int[Array, "M R U"]  # the response token of each slot
    sources: Int[Array, "M R U"]  # the column of the state whose logits produced it
    # 1, 2, ... for the sequences of a row that have slots; see `algorithms.sum_over_sequences`.
    sequence_ids: Int[Array, "M R U"]
    # For `models.Dropout`: numbers of the update and of the token; None without dropout.
    dropout: tuple[Int[Array, "M R S"], Int[Array, "M R S"]] | None = None
    # The `routed_experts` of the batch, in L layers; None: the routers choose.
    experts: UInt[Array, "M R S L C"] | None = None


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How batches are laid out; no choice changes a number beyond rounding."""

    mesh: Mesh  # rows are split over its data axes
    # Most rows of a micro-batch, a multiple of the number of data shards. Not used if
    # `micro_batch_tokens` is set.
    micro_batch_size: int = 1
    # Most columns of a micro-batch per data shard, padding included; a multiple of the sequence
    # axis. 0: `micro_batch_size` is the limit.
    micro_batch_tokens: int = 0
    pack_sequences: bool = False  # several sequences share a row of `micro_batch_tokens` columns
    # Assign sequences so that shards and micro-batches have about the same number of tokens;
    # otherwise sequences stay in their order.
    balance_lengths: bool = True

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in DATA_AXES)

    def split_evenly(self, size: int) -> int:
        """The next multiple of the sequence axis, which would hold other sizes unsharded."""
        return size + -size % self.mesh.shape["sequence"]

    @property
    def sharding(self) -> NamedSharding:
        """The layout of arrays [M, R, ...]: rows over the data axes."""
        return NamedSharding(self.mesh, PartitionSpec(None, DATA_AXES))

    def put(self, tree: Any) -> Any:
        """Host arrays [M, R, ...], the same in all processes, with rows over the data axes."""
        return jax.tree.map(lambda leaf: from_host(leaf, self.sharding), tree)


def row_plan(mesh: Mesh, training: ml_collections.ConfigDict) -> RowPlan:
    """The plan of a run, from its `config.training`."""
    fields = (field.name for field in dataclasses.fields(RowPlan) if field.name != "mesh")
    return RowPlan(mesh, **{name: training[name] for name in fields})


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A batch in rows, and the mapping between its responses and their slots."""

    rows: TokenRows  # NumPy arrays
    # Number of micro-batches that hold sequences. They come first; the passes skip the empty ones
    # after them.
    num_micro: int
    # Index into the M * R * U slots of each response token; -1 for padding and context.
    slots: Int[np.ndarray, "B T"]
    # Tokens of each data shard, prompts included; a shared prompt counts once.
    shard_tokens: Int[np.ndarray, " shards"]

    def tokens(self) -> Int[np.ndarray, "M R U"]:
        """Index into the B * T response tokens of each slot; -1 in slots without one."""
        found = np.full(self.rows.sources.shape, -1, np.int32)
        held = self.slots >= 0
        found.reshape(-1)[self.slots[held]] = np.flatnonzero(held)
        return found

    def responses(
        self, shards: Mapping[int, Sequence[Float[np.ndarray, "r U D"]]]
    ) -> dict[int, Float[np.ndarray, "_ D"]]:
        """Views of the values of each response, which has a slot, in these shards, by index.

        A shard has the values of its M micro-batches.
        """
        _, num_rows, num_slots = self.rows.sources.shape
        rows_of_shard = num_rows // len(self.shard_tokens)
        found = {}
        for index, slots in enumerate(self.slots):
            own = slots[slots >= 0]
            row, first = divmod(int(own[0]), num_slots)
            micro, row = divmod(row, num_rows)
            shard, row = divmod(row, rows_of_shard)
            if shard in shards:
                found[index] = shards[shard][micro][row, first : first + len(own)]
        return found

    def scalars(self) -> dict[str, float]:
        """Share of padding among computed tokens; most tokens of a shard over the mean."""
        computed = self.num_micro * math.prod(self.rows.token_ids.shape[1:])
        return {
            "policy/padding_fraction": float(1 - self.shard_tokens.sum() / computed),
            "policy/shard_imbalance": float(self.shard_tokens.max() / self.shard_tokens.mean()),
        }


def take_values(
    values: Shaped[Array | np.ndarray, "*_"], index: Int[Array | np.ndarray, "*shape"]
) -> Shaped[Array, "*shape"]:
    """Values at an index into all of them, as `Layout.slots` and `Layout.tokens` are; 0 at -1."""
    return jnp.where(index >= 0, values.reshape(-1)[index], 0)


@functools.partial(jax.jit, static_argnames="sharding")
def to_batch(
    values: Float[Array, "M R U"], index: Int[np.ndarray | Array, "B T"], *, sharding: NamedSharding
) -> Float[Array, "B T"]:
    """Values of slots at `Layout.slots`."""
    return jax.lax.with_sharding_constraint(take_values(values, index), sharding)


def lay_out(
    batch: RolloutBatch,
    plan: RowPlan,
    attention_columns: float = 0.0,
    dropout: int | None = None,
    replays: bool = False,
) -> Layout:
    """Lays NumPy rows [prompt | response] out for the devices.

    Shapes follow from the number of responses. Sizes that depend on the lengths are rounded up to
    one of a few values, because a program compiles as long as several updates take.
    `attention_columns`: see `Policy.attention_columns`; 0: no prompt is shared. `dropout`: the
    number of the update, see `TokenRows.dropout`. `replays`: whether tokens go to the experts of
    the batch, if it has any; a prompt that responses share, to those of its last response.
    ValueError: a sequence of more than `micro_batch_tokens`.
    """
    prompt_columns = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    tokens = batch.segment_ids > 0
    num_further = np.maximum(batch.segment_ids.max(axis=1), 1) - 1  # conversations of an episode
    order = np.cumsum(tokens, axis=1) - 1  # of the tokens of a sequence
    if num_further.any():
        # Fused kernels count a window in columns, so each conversation has consecutive ones.
        by_segment = np.where(tokens, batch.segment_ids, np.iinfo(np.int32).max)
        order = by_segment.argsort(axis=1, kind="stable").argsort(axis=1)
    # Whether each prompt has a token and equals the prompt before it.
    of_prompts = tokens[:, :prompt_columns]
    prompts = np.where(of_prompts, batch.token_ids[:, :prompt_columns], -1)
    same = (prompts[1:] == prompts[:-1]).all(axis=1) & of_prompts[1:].any(axis=1)
    sequences = Sequences(
        same_prompt=np.concatenate([[False], same]),
        prompts=tokens[:, :prompt_columns].sum(axis=1),
        responses=tokens[:, prompt_columns:].sum(axis=1),
        slots=batch.response_mask.sum(axis=1),
    )
    longest = int((sequences.prompts + sequences.responses).max())
    if plan.micro_batch_tokens and longest > plan.micro_batch_tokens:
        raise ValueError(
            f"a prompt and response of {longest} tokens does not fit into "
            f"training.micro_batch_tokens={plan.micro_batch_tokens}; raise it."
        )
    chosen = _cheapest(sequences, batch, plan, attention_columns)
    num_rows = chosen.rows_per_shard * plan.num_shards

    # Where the prompt and the response of each sequence begin in its row, and its first slot.
    columns_used, slots_used, sequences_used, with_slots = np.zeros(
        (4, chosen.num_places * num_rows), np.int64
    )
    starts = np.zeros((len(tokens), 2), np.int64)
    segments = np.zeros((len(tokens), 2), np.int64)
    first_slots, numbers, further = np.zeros((3, len(tokens)), np.int64)
    row_of = chosen.row_of[chosen.bundle_of]
    bundle_sizes = np.bincount(chosen.bundle_of)
    previous = -1
    for index, (bundle, row) in enumerate(zip(chosen.bundle_of, row_of)):
        sequences_used[row] += 1
        segments[index] = sequences_used[row]
        with_slots[row] += sequences.slots[index] > 0
        numbers[index] = with_slots[row]
        if bundle != previous:
            prompt, first, previous = columns_used[row], sequences_used[row], bundle
            columns_used[row] += sequences.prompts[index]
        if bundle_sizes[bundle] > 1:
            segments[index] = first * BRANCHES
            segments[index, 1] += 1 + sequences_used[row] - first
        starts[index] = prompt, columns_used[row]
        columns_used[row] += sequences.responses[index]
        first_slots[index] = slots_used[row]
        slots_used[row] += sequences.slots[index]
        further[index] = sequences_used[row] - 1
        sequences_used[row] += num_further[index]

    # The column of each token, [B, S]. Entries outside `tokens` are not used.
    is_response = (np.arange(tokens.shape[1]) >= prompt_columns).astype(np.int64)
    before_response = np.stack([np.zeros_like(sequences.prompts), sequences.prompts], axis=1)
    columns = (starts - before_response)[:, is_response] + order
    to = row_of[:, None] * chosen.num_columns + columns
    held = batch.response_mask
    slots = (row_of * chosen.num_slots + first_slots)[:, None] + np.cumsum(held, axis=1) - 1
    slots = np.where(held, slots, -1).astype(np.int32)  # [B, T]
    # The state before a token produced it: of the prompt's last token, or of the column before.
    is_first = order[:, prompt_columns:] == sequences.prompts[:, None]
    end_of_prompt = (starts[:, 0] + sequences.prompts)[:, None]
    sources = np.where(is_first, end_of_prompt, columns[:, prompt_columns:]) - 1  # [B, T]

    of_tokens = segments[:, is_response]
    is_further = batch.segment_ids > 1
    of_tokens = np.where(is_further, further[:, None] + batch.segment_ids, of_tokens)

    def filled(shape, where, values) -> Int[np.ndarray, "M R _"]:
        found = np.zeros(shape, np.int32)
        found.reshape(-1)[where] = values
        return found

    shape = (chosen.num_places, num_rows, chosen.num_columns)
    slots_shape = (*shape[:2], chosen.num_slots)
    rows = TokenRows(
        token_ids=filled(shape, to[tokens], batch.token_ids[tokens]),
        positions=filled(shape, to[tokens], batch.positions[tokens]),
        segment_ids=filled(shape, to[tokens], of_tokens[tokens]),
        response_ids=filled(slots_shape, slots[held], batch.token_ids[:, prompt_columns:][held]),
        sources=filled(slots_shape, slots[held], sources[held]),
        sequence_ids=filled(slots_shape, slots[held], np.repeat(numbers, sequences.slots)),
    )
    if dropout is not None:
        # A prompt has the numbers of its first response, also where responses do not share it.
        own = np.arange(len(tokens))
        first = np.maximum.accumulate(np.where(sequences.same_prompt, 0, own))
        of_tokens = np.stack([first, own], axis=1)[:, is_response] * tokens.shape[1]
        of_tokens = of_tokens + np.arange(tokens.shape[1])
        values = np.full_like(of_tokens, dropout), of_tokens
        rows = rows._replace(
            dropout=tuple(filled(shape, to[tokens], value[tokens]) for value in values)
        )
    if replays and (experts := batch.routed_experts) is not None:
        unknown = np.iinfo(experts.dtype).max
        placed = np.full((*shape, *experts.shape[2:]), unknown, experts.dtype)
        # Given responses have none. Responses that share a prompt write the same places.
        known = tokens & (experts < unknown).any(axis=(2, 3))
        placed.reshape(-1, *experts.shape[2:])[to[known]] = experts[known]
        rows = rows._replace(experts=placed)
    shard_of = chosen.row_of % num_rows // chosen.rows_per_shard
    shard_tokens = np.bincount(shard_of, chosen.lengths, plan.num_shards).astype(np.int64)
    return Layout(rows, chosen.num_micro, slots, shard_tokens)


class Sequences(NamedTuple):
    """Numbers of tokens of the sequences of a batch."""

    same_prompt: Bool[np.ndarray, " B"]  # whether the sequence before has the same prompt
    prompts: Int[np.ndarray, " B"]
    responses: Int[np.ndarray, " B"]
    slots: Int[np.ndarray, " B"]  # response tokens that the policy produced


class Arrangement(NamedTuple):
    """Sequences in bundles, and bundles in rows: M' places of micro-batches of R rows."""

    bundle_of: Int[np.ndarray, " B"]  # of each sequence, ascending
    lengths: Int[np.ndarray, " N"]  # columns of each bundle
    row_of: Int[np.ndarray, " N"]  # of each bundle
    num_micro: int
    num_places: int
    rows_per_shard: int
    num_columns: int
    num_slots: int
    pairs: float  # of columns for which attention computes scores, on a shard

    def cost(self, attention_columns: float) -> float:
        """Time of a pass, in columns of the products: those of each row, and their attention."""
        columns = self.num_micro * self.rows_per_shard * self.num_columns
        return columns + self.pairs / (attention_columns or math.inf)


def _cheapest(
    sequences: Sequences, batch: RolloutBatch, plan: RowPlan, attention_columns: float
) -> Arrangement:
    """Bundles of one sequence each; or rows filled with larger ones, if that costs less.

    Which of nearly equal costs is the lowest changes from batch to batch, and each arrangement is
    a program. So the widest rows of those within NEARLY_EQUAL are taken.
    """
    columns, response_columns = batch.token_ids.shape[1], batch.response_mask.shape[1]
    longest = int((sequences.prompts + sequences.responses).max())
    num_columns = longest - 1
    longest = plan.split_evenly(bucket(longest, columns))
    if (
        plan.micro_batch_tokens
    ):  # a batch may have more columns, of which none has a longer sequence
        longest = min(longest, plan.micro_batch_tokens)
    most_columns = plan.micro_batch_tokens or longest * (plan.micro_batch_size // plan.num_shards)

    def arranged(
        bundle_of: Int[np.ndarray, " B"], pile_of: Int[np.ndarray, " N"], is_shared: bool
    ) -> Arrangement:
        """Bundles of one pile lie in one row."""
        lengths = sequences.prompts[np.unique(bundle_of, return_index=True)[1]]
        lengths = lengths + np.bincount(bundle_of, sequences.responses).astype(np.int64)
        piles = np.bincount(pile_of, lengths).astype(np.int64)
        if plan.pack_sequences:
            num_columns, rows_per_shard = plan.micro_batch_tokens, 1
            row_of, num_micro = packed_rows(piles, num_columns, plan)
            num_places = few_sizes(num_micro)
        else:
            num_columns = longest
            if is_shared:
                num_columns = min(plan.split_evenly(few_sizes(int(piles.max()))), most_columns)
            most_rows = most_columns // num_columns
            if not plan.micro_batch_tokens:
                most_rows = min(most_rows, plan.micro_batch_size // plan.num_shards)
            row_of, num_micro, rows_per_shard = single_rows(piles, most_rows, plan)
            num_places = num_micro
            if is_shared:
                # Empty places cost nothing, so as many as without sharing are nearly always enough.
                num_places = max(few_sizes(num_micro), found[0].num_micro)
        row_of = row_of[pile_of]
        pairs = float(num_micro * rows_per_shard * num_columns**2)
        platform = platform_of(plan.mesh)
        if block := block_columns(num_columns, platform, plan.mesh.shape["sequence"]):
            pairs = (pairs + num_micro * rows_per_shard * num_columns * block) / 2
            if is_shared or plan.pack_sequences:
                pairs = min(pairs, _seen_in_blocks(sequences, bundle_of, block) / plan.num_shards)
        slots_used = max(int(np.bincount(row_of[bundle_of], sequences.slots).max()), 1)
        if is_shared:
            num_slots = min(few_sizes(slots_used), num_columns)
        else:
            num_slots = bucket(slots_used, num_columns if plan.pack_sequences else response_columns)
        return Arrangement(
            bundle_of, lengths, row_of, num_micro, num_places, rows_per_shard, num_columns,
            plan.split_evenly(num_slots), pairs,
        )  # fmt: skip

    alone = np.arange(len(batch.token_ids))
    found: list[Arrangement] = []
    found.append(arranged(alone, alone, is_shared=False))
    while attention_columns and sequences.same_prompt.any() and num_columns < most_columns:
        num_columns = min(few_sizes(num_columns + 1), most_columns)
        found.append(arranged(*_filled_rows(sequences, num_columns), is_shared=True))
    costs = [each.cost(attention_columns) for each in found]
    return found[max(i for i, cost in enumerate(costs) if cost <= NEARLY_EQUAL * min(costs))]


def _filled_rows(
    sequences: Sequences, num_columns: int
) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " N"]]:
    """The bundle of each sequence and the row of each bundle; rows fill in the sequences' order."""
    bundle_of, row_of, row, free = [], [], -1, 0
    for same, prompt, response, _ in zip(*(column.tolist() for column in sequences)):
        if not same or response > free:
            if prompt + response > free:
                row, free = row + 1, num_columns
            row_of.append(row)
            free -= prompt
        bundle_of.append(len(row_of) - 1)
        free -= response
    return np.array(bundle_of), np.array(row_of)


def _seen_in_blocks(sequences: Sequences, bundle_of: Int[np.ndarray, " B"], block: int) -> float:
    """Pairs of columns in the blocks that attention computes, of n + block columns on average."""
    responses = sequences.responses + block
    prompts = sequences.prompts + block
    first_of_bundle = np.diff(bundle_of, prepend=-1) > 0
    of_prompts = prompts[first_of_bundle] ** 2 / 2
    return float(of_prompts.sum() + (responses * (prompts + responses / 2)).sum())


def single_rows(
    lengths: Int[np.ndarray, " N"], most_rows: int, plan: RowPlan
) -> tuple[Int[np.ndarray, " N"], int, int]:
    """The row of each bundle, one per row; the micro-batches; and their rows per shard."""
    shards = plan.num_shards
    fewest = -(-len(lengths) // (most_rows * shards))
    sizes = {n: -(-len(lengths) // (n * shards)) for n in range(fewest, 2 * fewest)}
    # Few empty rows, and then few micro-batches.
    num_micro = min(sizes, key=lambda n: n * sizes[n])
    rows_per_shard = sizes[num_micro]
    if not plan.balance_lengths:
        return np.arange(len(lengths)), num_micro, rows_per_shard
    bin_of = deal(lengths, num_micro * shards, max_sequences=rows_per_shard)
    assert bin_of is not None, "there are as many rows as sequences"
    taken = np.zeros(num_micro * shards, np.int64)
    row_of = np.zeros(len(lengths), np.int64)
    for index, where in enumerate(bin_of):
        row_of[index] = where * rows_per_shard + taken[where]
        taken[where] += 1
    return row_of, num_micro, rows_per_shard


def packed_rows(
    lengths: Int[np.ndarray, " B"], num_columns: int, plan: RowPlan
) -> tuple[Int[np.ndarray, " B"], int]:
    """The row of each bundle, several per row; and the number of micro-batches."""
    row_of = best_fit(lengths, num_columns)
    num_micro = -(-(max(row_of) + 1) // plan.num_shards)
    if plan.balance_lengths:
        # Prefer evenly full rows if the same number of rows holds them; it often does.
        even = deal(lengths, num_micro * plan.num_shards, max_tokens=num_columns)
        row_of = row_of if even is None else even
    return np.array(row_of), num_micro


def deal(
    lengths: Int[np.ndarray, " B"],
    num_bins: int,
    *,
    max_tokens: float | int = math.inf,
    max_sequences: float | int = math.inf,
) -> list[int] | None:
    """The bin of each sequence, dealt longest first to the emptiest; None if one does not fit."""
    bins = [(0, index) for index in range(num_bins)]  # a heap
    counts = [0] * num_bins
    found = [0] * len(lengths)
    for index in longest_first(lengths):
        if not bins or bins[0][0] + lengths[index] > max_tokens:
            return None
        num_tokens, where = bins[0]
        found[index] = where
        counts[where] += 1
        if counts[where] < max_sequences:
            heapq.heapreplace(bins, (num_tokens + int(lengths[index]), where))
        else:
            heapq.heappop(bins)
    return found


def best_fit(lengths: Int[np.ndarray, " B"], max_tokens: int) -> list[int]:
    """Assigns sequences, longest first, to the fullest bin with room, or to a new one.

    It uses at most 11/9 of the fewest possible bins, plus less than one bin.

    Source: D. S. Johnson, Near-optimal bin packing algorithms, 1973 (best fit decreasing).
    """
    spaces: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    found = [0] * len(lengths)
    num_bins = 0
    for index in longest_first(lengths):
        length = int(lengths[index])
        place = bisect.bisect_left(spaces, (length, -1))
        if place < len(spaces):
            space, where = spaces.pop(place)
        else:
            space, where = max_tokens, num_bins
            num_bins += 1
        found[index] = where
        bisect.insort(spaces, (space - length, where))
    return found


def longest_first(lengths: Int[np.ndarray, " B"]) -> Sequence[int]:
    """Indices by descending length; ties by index."""
    return np.argsort(-lengths, kind="stable").tolist()


def few_sizes(count: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: at most a quarter more."""
    step = max(next_power_of_two(count) // 8, 1)
    return -(-count // step) * step
