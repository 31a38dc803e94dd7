"""What an engine may compute in another way: each hypothesis is one change of a computation.

There is no list of known faults. The hypotheses are what can be done to any tensor (scale, leave
out, exchange, transpose, round, take from another layer or an earlier version) and to any quantity
of the pass (frequencies, positions, what is seen, epsilon, dtypes). Where a number belongs to a
change, the search fits it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from semrl_jax import models
from semrl_jax.analysis.mismatch.computation import (
    ACTIVATION_NAMES,
    HEAD_AXES,
    NORMS,
    Computation,
    Layer,
    groups_of,
    layer_params,
    output_matrix,
    rounded,
    seen_within,
    window_of,
)
from semrl_jax.models.decoder import NO_WINDOW, rotary_frequencies
from semrl_jax.models.decoder_config import EXPERT_MODULES, DecoderConfig, RopeScaling

Params = models.Params
MOST_WINDOWS = 160  # sizes that are all tried; above, powers of two and those near the model's own
ROUNDINGS = (
    "float8", "float8/channel", "int8", "int8/channel", "bfloat16", "float16",
)  # fmt: skip


class Hypothesis(NamedTuple):
    """One change. `edit(computation, layers, value)` makes it, or returns None if it has none.

    `layers` are those to change, in a change of layers. `grid` are the values from which the search
    fits `value`; empty: there is nothing to fit. `cost` is the rank in which equal explanations
    are preferred; lower is simpler.
    """

    kind: str  # what the cause is called, see CAUSES
    what: str  # the tensor or quantity
    edit: Callable[[Computation, tuple[int, ...], float], Computation | None]
    of_layers: bool
    grid: tuple[float, ...] = ()
    logarithmic: bool = False
    neutral: float = 1.0  # the value that changes nothing
    cost: int = 0
    tensors: tuple[str, ...] = ()  # that it says are other ones, by module/leaf


class Known(NamedTuple):
    """What the trainer has, and knows."""

    config: DecoderConfig
    params: Params
    earlier: Mapping[str, Params]  # earlier versions of the parameters, by what they are called
    num_prompt: Int[np.ndarray, " B"]
    own: Mapping[int, np.ndarray]  # states of the trainer's pass, by layer
    past: Mapping[str, Mapping[int, np.ndarray]]  # the same of the earlier versions
    events: Sequence[int] = ()  # response tokens after which the difference changes


# The causes, and what helps against each. `{what}`, `{value}` and `{layers}` are filled in.
CAUSES = {
    "tensor": (
        "{what} of {layers} is another tensor{value}",
        "send the weights anew, and compare the names and shapes that the engine loads",
    ),
    "tensor_missing": (
        "{what} of {layers} is missing: the engine computes as if it were zero",
        "check that the engine loads this tensor, and that its config.json declares it",
    ),
    "tensor_scaled": (
        "{what} of {layers} is multiplied by {value}",
        "check the scales of the quantisation, and whether a factor is applied twice",
    ),
    "tensor_exchanged": (
        "{what} of {layers} are exchanged",
        "check the order in which the engine fuses or splits tensors",
    ),
    "tensor_transposed": (
        "{what} of {layers} is transposed",
        "check the layout in which the engine loads this tensor",
    ),
    "tensor_of_other_layer": (
        "{what} of {layers} is that of layer {value}",
        "check how the engine numbers its layers",
    ),
    "rounded_weights": (
        "{what} of {layers} is rounded",
        "this is quantisation: switch it off, or expect its mismatch",
    ),
    "stale": (
        "{what} of {layers} is that of {value}: a stale tensor",
        "the engine missed an update; send the weights anew and look at its log",
    ),
    "adapter": (
        "the adapter in {what} of {layers} counts {value} times",
        "0 is an adapter that is not applied, 2 one that is applied twice, or merged and applied",
    ),
    "stale_cache": (
        "keys and values of the {what} in {layers} are those of {value}",
        "clear the engine's cache, also of prefixes, when weights change",
    ),
    "rope_base": (
        "the rotary base in {layers} is {value}",
        "compare rope_theta in the engine's config.json with the trainer's",
    ),
    "rope_scaling": (
        "the rotary frequencies in {layers} are {what}{value}",
        "compare rope_scaling in the engine's config.json with the trainer's",
    ),
    "rope_dtype": (
        "the rotary {what} in {layers}",
        "let the engine compute rotary positions in float32",
    ),
    "rope_pairs": (
        "rotary positions in {layers} turn {what}",
        "the engine has another layout of rotary pairs than the weights",
    ),
    "positions": (
        "positions in {layers} are off by {value} from {what} on",
        "check where the engine begins to count positions, and what padding counts",
    ),
    "window": (
        "attention in {layers} is in {what} of {value} tokens",
        "compare sliding_window and layer_types in the engine's config.json with the trainer's",
    ),
    "mask": ("in {layers}, {what}{value}", "check the engine's attention mask and its cache"),
    "score_scale": (
        "attention scores in {layers} are multiplied by {value}",
        "compare head_dim and query_pre_attn_scalar in the engine's config.json",
    ),
    "experts": (
        "experts in {layers} have {what}",
        "compare num_experts_per_tok and norm_topk_prob in the engine's config.json, and the "
        "order in which it loads experts",
    ),
    "heads": (
        "heads in {layers} use {what}",
        "check how the engine orders heads, and repeats key and value heads",
    ),
    "norm_epsilon": (
        "the epsilon of {what} in {layers} is {value}",
        "compare rms_norm_eps in the engine's config.json with the trainer's",
    ),
    "norm_offset": (
        "norms in {layers} multiply by {what}",
        "the engine takes the weights for those of another family of models",
    ),
    "norm_missing": (
        "{what} of {layers} is left out",
        "the engine takes the model for one of another family; compare model_type",
    ),
    "activation": (
        "the activation in {layers} is {what}",
        "compare hidden_act in the engine's config.json with the trainer's",
    ),
    "layer_order": (
        "{layers}: {what}{value}",
        "check the order in which the engine has its layers",
    ),
    "cache_dtype": (
        "keys and values in {layers} are kept in {what}",
        "let the engine keep its cache in its compute dtype",
    ),
    "embedding": (
        "the embedding {what}{value}",
        "check the embedding that the engine loads, and its scale",
    ),
    "ids_shifted": (
        "token ids are shifted by {value} {what}",
        "compare the tokenizers, and which token each row belongs to",
    ),
    "head": (
        "the output matrix {what}{value}",
        "compare tie_word_embeddings, and whether lm_head was sent",
    ),
    "temperature": (
        "logits are divided by {value}",
        "compare raw log-probabilities, or sample at temperature 1",
    ),
    "softcap": ("the cap of the logits {what}{value}", "compare final_logit_softcapping"),
    "logits_dtype": ("logits are rounded to {what}", "let the engine compute logits in float32"),
    "dtype": (
        "the engine computes in {what}, and {value} was expected",
        "set the engine's dtype, or expect the mismatch of this one",
    ),
    "not_finite": (
        "{what} that the engine gave is not finite at {value}",
        "look at the engine's log, and whether its dtype overflows: float16 ends at 65504",
    ),
    "unknown": (
        "{layers}: another computation, which no hypothesis explains{value}",
        "compare the code of these layers, and send the weights anew",
    ),
}


def hypotheses(known: Known, first: int, last: int) -> Iterator[Hypothesis]:
    """All changes of the states from `first` to `last`; L + 1 are the log-probabilities."""
    config = known.config
    if first < config.num_layers and last > 0:
        yield from _of_positions(known)
        yield from _of_attention(known)
        yield from _of_pass(known)
        yield from _of_tensors(known, max(first, 0))
        yield from _of_versions(known)
        yield from _of_other_responses(known)
    if first < 0:
        yield from _of_embedding(known)
    if last >= config.num_layers:
        yield from _of_final_norm(known)
    if last > config.num_layers:
        yield from _of_head(known)


def each(change: Callable[[Layer, int, float], Layer | None]):
    """An edit of a computation from a change of one layer."""

    def edit(computation, layers, value):
        changed = 0
        for index in layers:
            layer = change(computation.layers[index], index, value)
            if layer is not None:
                computation, changed = computation.with_layer(index, layer), changed + 1
        return computation if changed else None

    return edit


def _layerwise(kind, what, change, **options) -> Hypothesis:
    return Hypothesis(kind, what, each(change), True, **options)


def _at(values, kind, what, change, neutral=-1.0, **options) -> Iterator[Hypothesis]:
    """A change of layers with each of some values, none of which is fitted."""
    for value in values:
        yield _layerwise(kind, what, change, grid=(float(value),), neutral=neutral, **options)


def _with_final(kind, what, change, final, **options) -> Iterator[Hypothesis]:
    """A change of layers; and the same, with `final(computation, value)` of the final norm."""
    yield _layerwise(kind, what, change, **options)
    of_layers = each(change)

    def edit(computation, layers, value):
        if len(computation.layers) - 1 not in layers:
            return None
        found = of_layers(computation, layers, value)
        return None if found is None else final(found, value)

    yield Hypothesis(kind, what, edit, True, **options)


def _set(**fields):
    """A change of fields of the whole computation."""
    return lambda computation, _value: computation._replace(**fields)


def _value_of(field):
    """A change of a field of the whole computation, whose value is fitted."""
    return lambda computation, value: computation._replace(**{field: value})


def _how(**changes):
    def change(layer, _index, _value):
        how = layer.how._replace(**changes)
        return None if how == layer.how else layer._replace(how=how)

    return change


def _of_positions(known: Known) -> Iterator[Hypothesis]:
    config, half = known.config, known.config.head_dim // 2

    def is_local(index):
        return config.local_rope_theta is not None and window_of(config, index) is not None

    def frequencies(layer, index, **changes):
        own = dataclasses.replace(config, **changes)
        window = jnp.int32(0 if is_local(index) else NO_WINDOW)
        return layer._replace(frequencies=rotary_frequencies(own, window))

    def base(layer, index, value):
        name = "local_rope_theta" if is_local(index) else "rope_theta"
        return frequencies(layer, index, **{name: value})

    grid = tuple(10.0 ** (power / 4) for power in range(8, 33))
    yield _layerwise("rope_base", "", base, grid=grid, logarithmic=True, neutral=config.rope_theta)

    def scaled(layer, _index, value):
        return layer._replace(frequencies=layer.frequencies * value)

    yield _layerwise(
        "rope_scaling", "multiplied by ", scaled, grid=(0.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0),
        cost=1,
    )  # fmt: skip
    if config.rope_scaling is not None:
        yield _layerwise(
            "rope_scaling", "not scaled",
            lambda layer, index, _: frequencies(layer, index, rope_scaling=None),
        )  # fmt: skip

    known_scaling = config.rope_scaling or RopeScaling("llama3", 1.0)
    if known_scaling.rope_type == "llama3":

        def factor(layer, index, value):
            scaling = dataclasses.replace(known_scaling, factor=value)
            return frequencies(layer, index, rope_scaling=scaling)

        yield _layerwise(
            "rope_scaling", "scaled as Llama 3's, by a factor of ", factor,
            grid=(2.0, 4.0, 8.0, 16.0, 32.0), logarithmic=True, neutral=known_scaling.factor,
            cost=1,
        )  # fmt: skip

    def partly(layer, _index, value):
        kept = jnp.arange(half) < round(value * half)
        return layer._replace(frequencies=jnp.where(kept, layer.frequencies, 0.0))

    for share in (0.25, 0.5, 0.75):
        yield _layerwise(
            "rope_scaling", f"zero beyond a share of {share}",
            lambda layer, index, _, share=share: partly(layer, index, share),
        )  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        yield _layerwise("rope_dtype", f"angles are in {dtype}", _how(rounds_angles=dtype))
        yield _layerwise(
            "rope_dtype", f"cosines and sines are in {dtype}", _how(rounds_table=dtype)
        )
    yield _layerwise("rope_pairs", "neighbouring features", _how(pairs="neighbours"))
    for name in ("query", "key"):
        yield _layerwise("rope_pairs", f"only the {name} heads", _how(rotated=(name,)))
    yield _layerwise("rope_pairs", "no heads", _how(rotated=()))

    def stopped(layer, _index, value):
        """Positions that begin anew with the response, or stay there."""
        first = known.num_prompt[:, None]
        count = np.arange(layer.positions.shape[1])[None]
        late = count - first if value else np.broadcast_to(first, layer.positions.shape)
        positions = jnp.where(jnp.asarray(count >= first), jnp.asarray(late), layer.positions)
        return layer._replace(positions=positions.astype(jnp.float32))

    for value, what in ((1.0, "they begin anew with"), (0.0, "they stay the same in")):
        yield _layerwise(
            "positions", f"the response, because {what} it,", stopped, grid=(value,), neutral=-1.0,
            cost=2,
        )  # fmt: skip

    # Rotary positions are relative: a shift counts only from some token on.
    places = {
        "the response": known.num_prompt,
        "the last prompt token": known.num_prompt - 1,
        "the second response token": known.num_prompt + 1,
    }
    for what, first in places.items():

        def moved(layer, index, shift, first=first):
            later = np.arange(layer.positions.shape[1])[None] >= first[:, None]
            positions = layer.positions + jnp.float32(shift) * later
            seen, size = layer.seen, window_of(config, index)
            if size is not None:
                distance = positions[:, :, None] - positions[:, None, :]
                seen = seen_within(positions.shape[1], None) & (distance < size)
            return layer._replace(positions=positions, seen=seen)

        cost = 1 + (what != "the response")
        yield from _at((1, -1, 2, -2), "positions", what, moved, neutral=0.0, cost=cost)


def _of_attention(known: Known) -> Iterator[Hypothesis]:
    config = known.config
    num_tokens = int(known.num_prompt.max()) + 2

    @each
    def window_in(layer, index, value):
        count, own = layer.seen.shape[1], window_of(config, index)
        if round(value) == own or (round(value) >= count and (own is None or own >= count)):
            return None
        seen = jnp.broadcast_to(seen_within(count, round(value)), layer.seen.shape)
        return layer._replace(seen=seen)

    def window(computation, layers, value):
        """Where some layers have a window, it is theirs that is another one."""
        local = tuple(layer for layer in layers if window_of(config, layer) is not None)
        return window_in(computation, local or layers, value)

    own, count = config.sliding_window, known.own[0].shape[1]
    sizes = {*range(1, min(count, MOST_WINDOWS)), *(2**k for k in range(14))}
    sizes |= {own - 1, own, own + 1, own // 2, 2 * own} if own else set()
    options = {"of_layers": True, "neutral": -1.0}
    for size in sorted(size for size in sizes if 0 < size < count):
        yield Hypothesis("window", "a window", window, grid=(float(size),), cost=1, **options)
    if own:
        yield Hypothesis("window", "a window", window, grid=(2.0**20,), **options)
        if config.full_attention_layers:
            yield Hypothesis("window", "a window", window_in, grid=(float(own),), **options)

    def without_first(layer, _index, value):
        hidden = jnp.arange(layer.seen.shape[2]) < round(value)
        own_key = jnp.eye(layer.seen.shape[1], dtype=bool)[None]
        return layer._replace(seen=layer.seen & (~hidden[None, None] | own_key))

    what = "the first tokens are not seen: "
    yield from _at((1, 2, 3, 4), "mask", what, without_first, neutral=0.0, cost=1)

    def both_ways(layer, _index, _value):
        inside = np.arange(layer.seen.shape[1])[None] < known.num_prompt[:, None]
        return layer._replace(seen=layer.seen | jnp.asarray(inside[:, :, None] & inside[:, None]))

    yield _layerwise("mask", "prompt tokens also see later ones", both_ways)

    def without_own(layer, _index, _value):
        own_key = jnp.eye(layer.seen.shape[1], dtype=bool)[None]
        first = jnp.arange(layer.seen.shape[1])[None, :, None] == 0
        return layer._replace(seen=layer.seen & (~own_key | first))

    yield _layerwise("mask", "tokens do not see themselves", without_own)

    def without_prompt(layer, _index, _value):
        place = np.arange(layer.seen.shape[1])[None]
        hidden = (place < known.num_prompt[:, None])[:, None] & (
            place >= known.num_prompt[:, None]
        )[:, :, None]
        return layer._replace(seen=layer.seen & ~jnp.asarray(hidden))

    yield _layerwise("mask", "response tokens do not see the prompt", without_prompt)

    def lost(layer, _index, value):
        column = known.num_prompt + round(value)
        place = np.arange(layer.seen.shape[1])[None]
        hidden = (place == column[:, None])[:, None] & (place > column[:, None])[:, :, None]
        return layer._replace(seen=layer.seen & ~jnp.asarray(hidden))

    places, what = range(-min(num_tokens, 4), 4), "later tokens do not see the one at place "
    yield from _at(places, "mask", what, lost, neutral=-1e9, cost=2)

    def score(layer, _index, value):
        return layer._replace(score_scale=layer.score_scale * value)

    yield _layerwise("score_scale", "", score, grid=(0.25, 0.5, 0.9, 1.1, 2.0, 4.0), cost=1)
    yield from _of_heads(known)
    if config.num_heads > config.num_kv_heads > 1:
        yield _layerwise("heads", "the key heads in turn", _how(tiles_heads=True))
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"):
        yield _layerwise("cache_dtype", dtype, _how(rounds_cache=dtype))


def _of_heads(known: Known) -> Iterator[Hypothesis]:
    """Heads that are left out, in another order, or of an earlier version."""
    config = known.config
    queries, pairs = config.num_heads, config.num_kv_heads

    def moved(names, change):
        """Changes the heads [N, H, ...] of tensors; `change` also gets the tensor's name."""

        def of(layer, index, _value):
            changed = {}
            for name in names:
                for leaf, x in layer.params[name].items():
                    axis = HEAD_AXES[f"{name}/kernel"] if x.ndim > 1 else 0
                    if x.ndim == 1 and name == "output":
                        continue
                    front = jnp.moveaxis(x, axis, 0)
                    heads = front.reshape(-1, config.head_dim, *front.shape[1:])
                    heads = change(heads, f"{name}/{leaf}", index)
                    changed[f"{name}/{leaf}"] = jnp.moveaxis(heads.reshape(front.shape), 0, axis)
            return layer.with_tensors(changed)

        return of

    for names, count in (
        (("query",), queries), (("key",), pairs), (("value",), pairs), (("output",), queries),
        (("key", "value"), pairs), (("query", "output"), queries),
    ):  # fmt: skip
        what = f"{' and '.join(names)} kernel"
        options = {"cost": 2 + len(names), "tensors": tuple(f"{name}/kernel" for name in names)}
        orders = {tuple(np.roll(np.arange(count), shift).tolist()) for shift in (1, -1)}
        orders |= {tuple(range(count))[::-1]}
        grouped = np.arange(count).reshape(-1, max(count // pairs, 1))
        orders |= {tuple(grouped.T.ravel().tolist())}
        if count % 2 == 0:  # such as one that rows of two devices, or halves, were joined in
            orders |= {tuple(np.arange(count).reshape(2, -1).T.ravel().tolist())}
        near = itertools.combinations(range(count), 2)
        for one, other in near if count <= 4 else zip(range(count), range(1, count)):
            order = list(range(count))
            order[one], order[other] = other, one
            orders.add(tuple(order))
        for order in sorted(orders - {tuple(range(count))}):

            def ordered(heads, _name, _index, order=order):
                return heads[np.array(order)]

            shown = ", ".join(map(str, order))
            yield _layerwise(
                "heads", f"the {what} of heads {shown} in turn", moved(names, ordered), **options
            )
        if len(names) > 1:
            continue
        for head in range(count):

            def without(heads, _name, _index, head=head):
                return heads.at[head].set(0.0)

            yield _layerwise(
                "tensor_missing", f"head {head} of {what}", moved(names, without), **options
            )
            for label, earlier in known.earlier.items():

                def before(heads, name, index, head=head, earlier=earlier):
                    module, leaf = name.split("/")
                    old = layer_params(config, earlier, index)[module][leaf]
                    old = jnp.moveaxis(old, HEAD_AXES.get(name, 0), 0).reshape(heads.shape)
                    return heads.at[head].set(old[head])

                yield _layerwise(
                    "stale", f"head {head} of {what}|{label}", moved(names, before), **options
                )


def _of_pass(known: Known) -> Iterator[Hypothesis]:
    config = known.config
    grid = tuple(10.0**power for power in range(-12, 0))

    def epsilon_of(names):
        def epsilon(layer, _index, value):
            return layer._replace(epsilon={**layer.epsilon, **dict.fromkeys(names, value)})

        return epsilon

    options = {"grid": grid, "logarithmic": True, "neutral": config.rms_norm_eps}
    declared, heads = config.declared, ("query_norm", "key_norm")
    norms = [("attention_norm",), ("mlp_norm",)]
    norms += [heads, *((name,) for name in heads)] if declared.query_key_norm else []
    norms += [("attention_post_norm",), ("mlp_post_norm",)] if declared.post_norms else []
    for names in norms:
        what = " and ".join(names).replace("_", " ")
        yield _layerwise("norm_epsilon", what, epsilon_of(names), cost=1, **options)
    yield from _with_final(
        "norm_epsilon", "the norms", epsilon_of(NORMS),
        _value_of("final_epsilon"), **options,
    )  # fmt: skip
    for has, what in ((True, "1 + weight"), (False, "the weight alone")):
        changes = _how(offset_norms=has), _set(final_offset=has)
        yield from _with_final("norm_offset", what, *changes)
    if declared.query_key_norm:
        for kept, what in (((), "queries and keys"), (("key",), "queries"), (("query",), "keys")):
            yield _layerwise("norm_missing", f"the norm of {what}", _how(normed_heads=kept))
        yield _layerwise(
            "layer_order", "queries and keys are normed after the rotation",
            _how(norms_rotated=True),
        )  # fmt: skip
    if declared.post_norms:
        yield _layerwise(
            "norm_missing", "the norm after attention and feed-forward", _how(post_norms=False)
        )
    for name in ACTIVATION_NAMES:
        yield _layerwise("activation", name, _how(activation=name))
    if config.experts:
        yield from _of_experts(config)
    yield _layerwise("layer_order", "applied twice", _how(times=2))
    yield _layerwise("layer_order", "skipped", _how(times=0))

    def instead(layer, index, other):
        if index == other:
            return None
        return layer._replace(params=layer_params(config, known.params, round(other)))

    what = "with the tensors of layer "
    yield from _at(range(config.num_layers), "layer_order", what, instead, cost=1)


def _of_experts(config: DecoderConfig) -> Iterator[Hypothesis]:
    """The choice of experts, their weights, and their order."""
    experts = config.experts

    def routed(**changes):
        own = dataclasses.replace(config, experts=dataclasses.replace(experts, **changes))
        return lambda layer, *_: (
            None if layer.how.is_dense else layer._replace(how=layer.how._replace(config=own))
        )

    chosen = experts.experts_per_token
    for count in {chosen - 1, chosen + 1, 2 * chosen, 1} - {0, chosen}:
        if count <= experts.num_experts:
            yield _layerwise(
                "experts", f"{count} of them per token", routed(experts_per_token=count), cost=1
            )
    what = "their probabilities as they are" if experts.normalize_weights else "weights of sum 1"
    yield _layerwise("experts", what, routed(normalize_weights=not experts.normalize_weights))
    for name in ("router", "expert_gate", "expert_up", "expert_down", "all"):
        names = EXPERT_MODULES[1:] if name == "all" else (name,)
        for shift in (1, -1):

            def turned(layer, _index, _value, names=names, shift=shift):
                if layer.how.is_dense:
                    return None
                axes = {name: 1 if name == "router" else 0 for name in names}
                own = {f"{name}/kernel": axis for name, axis in axes.items()}
                tensors = layer.tensors()
                return layer.with_tensors(
                    {name: jnp.roll(tensors[name], shift, axis) for name, axis in own.items()}
                )

            yield _layerwise(
                "experts", f"another order in {' '.join(names).replace('_', ' ')}", turned, cost=2,
                tensors=tuple(f"{name}/kernel" for name in names),
            )  # fmt: skip


def _of_tensors(known: Known, layer: int) -> Iterator[Hypothesis]:
    config = known.config
    sample = layer_params(config, known.params, min(layer, config.num_layers - 1))
    tensors = {f"{m}/{leaf}": x for m, leaves in sample.items() for leaf, x in leaves.items()}

    def replaced(names, change):
        def of(layer, _index, value):
            own = layer.tensors()
            changed = {name: change(own[name], value) for name in names if name in own}
            return layer.with_tensors(changed) if changed else None

        return of

    for what, names in groups_of(tensors).items():
        yield _layerwise(
            "tensor_scaled", what, replaced(names, lambda x, value: x * value),
            grid=(0.0, 0.5, 2.0), cost=3, tensors=names,
        )  # fmt: skip

    def all_rounded(dtype):
        def of(layer, _index, _value):
            own = {
                name: rounded(x, dtype)
                for name, x in layer.tensors().items()
                if "8" not in dtype or (name.endswith("kernel") and not name.startswith("router"))
            }
            return layer.with_tensors(own)

        return of

    for dtype in ROUNDINGS:
        if "8" in dtype:
            yield _layerwise("rounded_weights", f"every kernel, to {dtype},", all_rounded(dtype))
            continue

        def rounded_norm(computation, _value, dtype=dtype):
            return computation._replace(final_scale=rounded(computation.final_scale, dtype))

        what = f"every tensor, to {dtype},"
        yield from _with_final("rounded_weights", what, all_rounded(dtype), rounded_norm)
    for name, tensor in tensors.items():
        what = name.replace("/", " ")
        yield _layerwise(
            "tensor_scaled", what, replaced((name,), lambda x, value: x * value),
            grid=(0.0, 0.5, 2.0, -1.0), cost=2, tensors=(name,),
        )  # fmt: skip
        if name.endswith("/scale"):
            one = 0.0 if config.declared.offset_norms else 1.0
            yield _layerwise(
                "norm_missing", f"the weight of {name.removesuffix('/scale')}",
                replaced((name,), lambda x, _, one=one: jnp.full_like(x, one)), cost=2,
                tensors=(name,),
            )  # fmt: skip
        if tensor.ndim == 2:
            for dtype in ROUNDINGS:
                yield _layerwise(
                    "rounded_weights", f"{what}, to {dtype},",
                    replaced((name,), lambda x, _, dtype=dtype: rounded(x, dtype)), cost=3,
                    tensors=(name,),
                )  # fmt: skip
        if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]:
            yield _layerwise(
                "tensor_transposed", what, replaced((name,), lambda x, _: x.T), cost=2,
                tensors=(name,),
            )  # fmt: skip

            def scales_transposed(x, _value):
                scale = jnp.max(jnp.abs(x), axis=0)
                return x / scale[None, :] * scale[:, None]

            yield _layerwise(
                "tensor_scaled", f"{what}, whose scales of outputs are taken for its inputs,",
                replaced((name,), scales_transposed), cost=2, tensors=(name,),
            )  # fmt: skip

        def taken(layer, index, other, name=name):
            found = layer_params(config, known.params, round(other))
            module, leaf = name.split("/")
            if index == other or module not in found or name not in layer.tensors():
                return None
            return layer.with_tensors({name: found[module][leaf]})

        options = {"cost": 3, "tensors": (name,)}
        yield from _at(range(config.num_layers), "tensor_of_other_layer", what, taken, **options)
    for one, other in itertools.combinations(tensors, 2):
        if tensors[one].shape == tensors[other].shape:

            def exchanged(layer, _index, _value, one=one, other=other):
                own = layer.tensors()
                if one not in own or other not in own:
                    return None
                return layer.with_tensors({one: own[other], other: own[one]})

            what = f"{one.replace('/', ' ')} and {other.replace('/', ' ')}"
            yield _layerwise("tensor_exchanged", what, exchanged, cost=2, tensors=(one, other))


def _of_versions(known: Known) -> Iterator[Hypothesis]:
    config = known.config
    for label, earlier in known.earlier.items():
        kind = "adapter" if label == "base" else "stale"

        def mixed(names, earlier=earlier):
            def of(layer, index, value):
                old, own = layer_params(config, earlier, index), layer.tensors()
                changed = {}
                for name in names or own:
                    module, leaf = name.split("/")
                    if name in own and module in old and leaf in old[module]:
                        before = old[module][leaf]
                        changed[name] = before + value * (own[name] - before)
                if not any((changed[name] != own[name]).any() for name in changed):
                    return None
                return layer.with_tensors(changed)

            return of

        tensors = layer_names(config, known.params)
        grid = (0.0, 2.0, 0.5) if kind == "adapter" else (0.0,)
        options = {"grid": grid, "neutral": 1.0}

        def mixed_norm(computation, value, earlier=earlier):
            before = earlier["final_norm"]["scale"]
            scale = before + value * (known.params["final_norm"]["scale"] - before)
            return computation._replace(final_scale=scale)

        yield from _with_final(kind, f"every tensor|{label}", mixed(()), mixed_norm, **options)
        parts = {name.replace("/", " "): (name,) for name in tensors}
        for what, names in {**parts, **groups_of(dict.fromkeys(tensors))}.items():
            yield _layerwise(
                kind, f"{what}|{label}", mixed(names), cost=1 + (len(names) > 1), tensors=names,
                **options,
            )  # fmt: skip

        places = {"prompt": known.num_prompt, "prompt but its last token": known.num_prompt - 1}
        for count in known.events:  # an update while responses were sampled
            places[f"prompt and {count} response tokens"] = known.num_prompt + count
        for (place, event), old in itertools.product(places.items(), (False, True)):

            def cached(layer, index, _value, earlier=earlier, event=event, old=old, label=label):
                return layer._replace(
                    how=layer.how._replace(gives_old=old),
                    before=layer_params(config, earlier, index),
                    before_x=jnp.asarray(known.past[label][index]),
                    event=jnp.asarray(event),
                )

            yield _layerwise(
                "stale_cache", f"{place}|{label}", cached, cost=1 + (place != "prompt") + old
            )


def _of_other_responses(known: Known) -> Iterator[Hypothesis]:
    """A cache that belongs to another response."""
    for shift in (1, -1):

        def cached(layer, index, _value, shift=shift):
            return layer._replace(
                before=layer.params,
                before_x=jnp.roll(jnp.asarray(known.own[index]), shift, axis=0),
                event=jnp.asarray(known.num_prompt),
            )

        yield _layerwise("stale_cache", "prompt|another response", cached, cost=2)


def layer_names(config: DecoderConfig, params: Params) -> list[str]:
    """The names module/leaf of the tensors of all layers."""
    found: dict[str, None] = {}
    for index in range(config.num_layers):
        for module, leaves in layer_params(config, params, index).items():
            found |= dict.fromkeys(f"{module}/{leaf}" for leaf in leaves)
    return list(found)


def _whole(kind, what, change, **options) -> Hypothesis:
    def edit(computation, _layers, value):
        return change(computation, value)

    return Hypothesis(kind, what, edit, False, **options)


def _of_embedding(known: Known) -> Iterator[Hypothesis]:
    vocabulary = known.config.vocab_size

    def shifted(computation, value):
        return computation._replace(ids=(computation.ids + round(value)) % vocabulary)

    for shift in (1, -1, 2, -2):
        yield _whole("ids_shifted", "in the vocabulary", shifted, grid=(float(shift),), neutral=0.0)

    def moved(computation, value):
        ids = np.roll(computation.ids, round(value), axis=1)
        return computation._replace(ids=ids)

    for shift in (1, -1):
        yield _whole("ids_shifted", "rows", moved, grid=(float(shift),), neutral=0.0)
    yield _whole(
        "embedding", "is multiplied by ",
        lambda x, value: x._replace(embedding_scale=x.embedding_scale * value),
        grid=(0.0, known.config.hidden_size**0.5, known.config.hidden_size**-0.5, 2.0, 0.5),
        cost=1,
    )  # fmt: skip
    for label, earlier in known.earlier.items():
        change = _set(embedding=earlier["embed"]["embedding"])
        yield _whole("embedding", f"is that of {label}", change)
    for dtype in ROUNDINGS:
        yield _whole(
            "embedding", f"is rounded to {dtype}",
            lambda x, _, dtype=dtype: x._replace(
                embedding=rounded(jnp.asarray(x.embedding), dtype)
            ),
            cost=1,
        )  # fmt: skip
    if "head" in known.params:
        yield _whole(
            "embedding", "is the output matrix",
            lambda x, _: x._replace(embedding=known.params["head"]["kernel"].T),
        )  # fmt: skip


def _of_final_norm(known: Known) -> Iterator[Hypothesis]:
    grid = tuple(10.0**power for power in range(-12, 0))
    options = {"grid": grid, "logarithmic": True, "neutral": known.config.rms_norm_eps, "cost": 1}
    yield _whole("norm_epsilon", "the final norm", _value_of("final_epsilon"), **options)
    yield _whole(
        "tensor_scaled", "the final norm",
        lambda x, value: x._replace(final_scale=x.final_scale * value), grid=(0.0, 0.5, 2.0, -1.0),
        cost=2, tensors=("final_norm/scale",),
    )  # fmt: skip
    yield _whole(
        "norm_offset", "another offset", lambda x, _: x._replace(final_offset=not x.final_offset)
    )
    yield _whole(
        "norm_missing", "the weight of the final norm",
        lambda x, _: x._replace(final_scale=jnp.ones_like(x.final_scale)),
        tensors=("final_norm/scale",),
    )  # fmt: skip
    for label, earlier in known.earlier.items():
        change = _set(final_scale=earlier["final_norm"]["scale"])
        yield _whole("stale", f"final norm|{label}", change, tensors=("final_norm/scale",))


def _of_head(known: Known) -> Iterator[Hypothesis]:
    config = known.config
    grid = (0.5, 0.7, 0.9, 1.1, 1.5, 2.0)
    yield _whole("temperature", "", _value_of("temperature"), grid=grid, cost=1)
    cap = config.final_logit_softcap
    if cap:
        yield _whole("softcap", "is left out", _set(softcap=None))
    options = {"grid": (5.0, 10.0, 20.0, 30.0, 50.0), "logarithmic": True, "neutral": cap or -1.0}
    yield _whole("softcap", "is ", _value_of("softcap"), cost=2, **options)
    if not config.tie_embeddings:
        yield _whole("head", "is the embedding", _set(matrix=known.params["embed"]["embedding"]))
    for label, earlier in known.earlier.items():
        yield _whole(
            "head", f"is that of {label}",
            lambda x, _, earlier=earlier: x._replace(matrix=output_matrix(config, earlier)),
        )  # fmt: skip
        change = _set(matrix=earlier["embed"]["embedding"])
        yield _whole("head", f"is the embedding of {label}", change, cost=1)
    for dtype in ROUNDINGS:
        yield _whole(
            "head", f"is rounded to {dtype}",
            lambda x, _, dtype=dtype: x._replace(matrix=rounded(jnp.asarray(x.matrix).T, dtype).T),
            cost=1,
        )  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        yield _whole("logits_dtype", dtype, _set(rounds_logits=dtype))

    def neighbour(computation, value):
        return computation._replace(targets=np.roll(computation.targets, round(value), axis=1))

    def shifted(computation, value):
        targets = (computation.targets + round(value)) % config.vocab_size
        return computation._replace(targets=targets)

    for shift in (1, -1):
        yield _whole("ids_shifted", "rows", neighbour, grid=(float(shift),), neutral=0.0)
        yield _whole("ids_shifted", "in the vocabulary", shifted, grid=(float(shift),), neutral=0.0)
