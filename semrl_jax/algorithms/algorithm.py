"""The interface between the training loop and an algorithm.

An algorithm is a module with these names:

- `Options`: a frozen dataclass whose fields are settings of `config.algorithms`: of `advantage` for
  an algorithm of this package (`semrl_jax/settings/declared.py`), of `options` for any other; see
  `Objective` for the fields that all may share. `__post_init__` checks rules of several fields.
- `needs(options) -> Needs`: what has to be computed. Nothing else is computed or loaded.
- `advantages(rewards, passes, response_mask, options)`: float32 [B, T], before shaping, 0.0 on
  masked-out tokens. `rewards` is [P, G]; with `Needs.turn_rewards`, [P, G, T].
- `token_weights(response_mask, options)`: float32 [B, T] that sums to 1 over a mini-batch.
- `loss(logprobs, entropy, *, old_logprobs, ref_logprobs, advantages, weights, options)`: the share
  of a micro-batch in the loss of its mini-batch, and scalars to be summed like it, `policy/loss`
  among them. Arrays that the algorithm does not need are None. With `Needs.sequence_ids` there is
  one more argument, `sequence_ids`; see `sum_over_sequences`. With `Needs.exact_kl`, `kl`. With
  `Needs.given`, `given`, which is None in a run without given responses.

With `Needs.values`, which trains a critic, two more:

- `returns(rewards, passes, response_mask, options)`: float32 [B, T], what the critic learns.
- `value_loss(values, *, old_values, returns, weights, options)`: as `loss`, for the critic, with
  `critic/loss`.

With `Needs.state`, which is kept from step to step and in checkpoints, two more. `advantages` and
`returns` get the state before the step as one more argument, `state`:

- `first_state(options)`: a dict of numbers or arrays. Scalars are logged as `algorithm/<name>`.
- `next_state(state, rewards, passes, response_mask, options)`: after a step, of the rewards that
  `advantages` got, with the same names, shapes and dtypes (write 1.0, not 1).

With `Needs.selects`, one more, of rewards as they came, without the bonus of the shaping:

- `selected(rewards, passes, response_mask, options)`: bool [P, G], which responses are trained on.

With `Needs.prompt_state` there is a state of each prompt: `first_state` gives that of one, and the
functions above get the states of the prompts of the batch, with P as the first axis of each leaf.

The functions are pure and run under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from configs.default import get_config
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import check_fields
from semrl_jax.support.modules import load_module, running

PARTS = ("Options", "needs", "advantages", "token_weights", "loss")
PARTS_FOR = {"values": ("returns", "value_loss"), "state": ("first_state", "next_state")}
PARTS_FOR["prompt_state"] = PARTS_FOR["state"]
PARTS_FOR["selects"] = ("selected",)
# Scalars of the update itself.
RESERVED = {
    f"{model}/{name}"
    for model in ("policy", "critic")
    for name in ("grad_norm", "update_skipped", "learning_rate")
}


State = dict[str, Any]  # a pytree of arrays


class Needs(NamedTuple):
    """What an algorithm needs in addition to the policy's own log-probabilities."""

    groups: bool = False  # several responses per prompt, see `least_group`
    # For the loss, log-probabilities of the policy at the start of the update, or of the frozen
    # reference; and which sequence of its row each token belongs to.
    old_logprobs: bool = False
    reference: bool = False
    sequence_ids: bool = False
    # KL(policy || reference) of each token over the whole vocabulary, for the loss, with gradient;
    # the update computes it in place of `ref_logprobs`.
    exact_kl: bool = False
    values: bool = False  # a critic's, of each token; it is trained together with the policy
    state: bool = False  # something that is kept from step to step
    # The log-probabilities in `Passes`, for the advantages, returns or state. They cost a pass
    # before the update, which otherwise computes them itself.
    early_old_logprobs: bool = False
    early_reference: bool = False
    # The rewards at the last tokens of turns and steps, see `placed_rewards`, with `Passes.spans`.
    turn_rewards: bool = False
    positive_rewards: bool = False  # a reward below 0 ends the run
    plain_rewards: bool = False  # without a bonus, such as for a comparison with a threshold
    given: bool = False  # for the loss, which tokens are of given responses
    given_apart: bool = False  # given responses do not count in the statistics of their groups
    # `ref_logprobs` are the policy's own before the update, under the prompts of
    # `data.teacher_input`; no reference is loaded for them.
    own_teacher: bool = False
    prompt_state: bool = False  # something that is kept of each prompt
    least_group: int = 2  # responses per prompt with `groups`
    spans: bool = False  # `Passes.spans`, in addition to the rewards of responses
    selects: bool = False  # leaves responses out of the update; `Passes.selected` are the others

    @property
    def keeps(self) -> bool:
        """Whether anything is kept from step to step."""
        return self.state or self.prompt_state


class Spans(NamedTuple):
    """The parts of responses that have rewards: turns of an episode, or steps of a response."""

    rewards: Float[Array, "B T"]  # float32, at the last token of each part, 0.0 elsewhere
    ends: Bool[Array, "B T"]  # True on these tokens


class Passes(NamedTuple):
    """What is known before the update; None if not needed.

    The first three are float32 results of forward passes.
    """

    old_logprobs: Float[Array, "B T"] | None = None  # nats
    ref_logprobs: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None  # before each token, in the unit of the rewards
    spans: Spans | None = None
    selected: Bool[Array, "P G"] | None = None


class UnusableRewards(UserError):
    """Rewards that the algorithm cannot use."""

    agreed = True  # every process has the same rewards, so every process raises it


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A module and its options; hashable, so that it can be static under `jax.jit`."""

    module: ModuleType
    options: Any

    @property
    def needs(self) -> Needs:
        return self.module.needs(self.options)

    def check_rewards(
        self,
        rewards: Float[np.ndarray, "P G"],
        of_spans: Sequence[Float[np.ndarray, " _"] | None] | None = None,
        num_failed: int = 0,
    ) -> None:
        """UserError if the rewards of a batch have no meaning for the algorithm.

        `of_spans`: of the turns or steps of each response, None where nobody judged them.
        `num_failed`: responses for which the verifier failed, and of which this says nothing.
        """
        judged = [found for found in of_spans or () if found is not None]
        name = f"algorithms.name={self.module.__name__.rpartition('.')[2]!r}"
        least = min(array.min(initial=0.0) for array in (rewards, *judged))
        if self.needs.positive_rewards and least < 0:
            raise UnusableRewards(
                f"a response or turn has the reward {least:g}, but {name} is for rewards of at "
                "least 0; change the rewards, or choose another algorithm."
            )
        if self.needs.spans and not judged and num_failed < rewards.size:
            raise UnusableRewards(
                f"{name} needs rewards of steps, but no response of the batch has `steps` of its "
                "reward function (docs/verifiers.md); return them, or choose another algorithm."
            )

    def advantages(
        self,
        rewards: Float[Array, "P G *tokens"],
        passes: Passes,
        response_mask: Bool[Array, "B T"],
        state: State | None = None,
    ) -> Float[Array, "B T"]:
        of = self._with_state(self.module.advantages, state)
        return of(rewards, passes, response_mask, self.options)

    def selected(
        self, rewards: Float[Array, "P G"], passes: Passes, response_mask: Bool[Array, "B T"]
    ) -> Bool[Array, "P G"]:
        return self.module.selected(rewards, passes, response_mask, self.options)

    def returns(
        self,
        rewards: Float[Array, "P G *tokens"],
        passes: Passes,
        response_mask: Bool[Array, "B T"],
        state: State | None = None,
    ) -> Float[Array, "B T"]:
        of = self._with_state(self.module.returns, state)
        return of(rewards, passes, response_mask, self.options)

    def token_weights(self, response_mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
        return self.module.token_weights(response_mask, self.options)

    def loss(
        self, logprobs: Float[Array, "*tokens"], entropy: Float[Array, "*tokens"], **values: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        return self.module.loss(logprobs, entropy, **values, options=self.options)

    def value_loss(
        self, values: Float[Array, "*tokens"], **arrays: Array
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        return self.module.value_loss(values, **arrays, options=self.options)

    def first_state(self, num_prompts: int = 0) -> State:
        """NumPy arrays; {} if the algorithm needs no state. A state of prompts has one row each."""
        if not self.needs.keeps:
            return {}
        first = jax.device_get(jax.tree.map(jnp.asarray, self.module.first_state(self.options)))
        if not self.needs.prompt_state:
            return first
        return jax.tree.map(lambda leaf: np.repeat(leaf[None], num_prompts, axis=0), first)

    def next_state(
        self,
        state: State,
        rewards: Float[Array, "P G"],
        passes: Passes,
        response_mask: Bool[Array, "B T"],
    ) -> State:
        return self.module.next_state(state, rewards, passes, response_mask, self.options)

    def _with_state(self, function: Callable[..., Array], state: State | None) -> Callable:
        return functools.partial(function, state=state) if self.needs.keeps else function


def read_options(
    field: str,
    name: str,
    module: ModuleType,
    given: Iterable[tuple[str, str, Any]],
    defaults: Mapping[str, Any],
) -> Any:
    """The `Options` of the module that `field` names, from (path, option, value) of settings.

    An option that the module does not have is ignored if it has its default, by path. Raises
    UserError for another one, for one that the module refuses, or if they are no dataclass.
    """
    if not (isinstance(module.Options, type) and dataclasses.is_dataclass(module.Options)):
        raise UserError(f"{field}={name!r}: Options must be a frozen dataclass.")
    fields = {each.name for each in dataclasses.fields(module.Options) if each.init}
    options: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for path, option, value in given:
        if option in options:
            raise UserError(f"{path}: {option} is set in two sections; keep one.")
        if option in fields:
            options[option], paths[option] = value, path
        elif value != defaults.get(path):
            default = f"set it to its default, {defaults.get(path)!r}"
            raise UserError(
                f"{path}={value!r} is no option of {field}={name!r}, which has "
                f"{', '.join(sorted(fields))}; {default if path in defaults else 'remove it'}."
            )
    with running(field, module, "Options"):
        try:
            check_fields("", options, module.Options)
            found = module.Options(**options)
        except ValueError as error:
            option = str(error).partition("=")[0]
            place = paths.get(option, f"{field.partition('.')[0]}.").removesuffix(option)
            raise UserError(" ".join(f"{place}{error}".split())) from None
        hash(found)  # it is a static argument under `jax.jit`
    return found


def load_algorithm(section: Mapping[str, Any]) -> Algorithm:
    """Loads the algorithm that `config.algorithms` names.

    `name` is a module of this package ("grpo") or of any other ("my_package.my_module"). All fields
    but `importance` and `batch_rules` are options, sections merged. Raises UserError if there is no
    such module, if a part of it is missing, or as `read_options`.
    """
    name = section["name"]
    module = load_module("algorithms.name", name, "semrl_jax.algorithms", PARTS)
    defaults = {path: value for path, _, value in _options(get_config().algorithms.to_dict())}
    options = read_options("algorithms.name", name, module, _options(section), defaults)
    algorithm = Algorithm(module, options)
    with running("algorithms.name", module, "needs"):
        if not isinstance(needs := module.needs(algorithm.options), Needs):
            raise TypeError(f"it must return Needs(...), not {needs!r}")
    for need, parts in PARTS_FOR.items():
        for part in parts:
            if getattr(needs, need) and not hasattr(module, part):
                raise UserError(
                    f"algorithms.name={name!r}: Needs({need}=True), but module {module.__name__} "
                    f"has no {part!r} (docs/extending.md)."
                )
    return algorithm


def check_functions(algorithm: Algorithm, group_size: int) -> None:
    """Traces the functions as the training loop does; UserError if one is not as described."""
    module, options, needs = algorithm.module, algorithm.options, algorithm.needs
    field = "algorithms.name"

    def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def check(part: str, found: Any, *shape: int, dtype: Any = jnp.float32) -> None:
        kind = getattr(found, "dtype", type(found).__name__), getattr(found, "shape", ())
        if kind != (dtype, shape):
            raise UserError(
                f"{field}: {part} of {module.__name__} must be {jnp.dtype(dtype)} of shape {shape} "
                f"here, not {kind[0]} of shape {kind[1]}."
            )

    size = 3 * group_size, 5  # of the batch
    early = needs.early_reference or needs.own_teacher
    needed = (needs.early_old_logprobs, early, needs.values)
    passes = Passes(*(of(*size) if is_needed else None for is_needed in needed))
    mask = of(*size, dtype=jnp.bool_)
    if needs.spans or needs.turn_rewards:
        passes = passes._replace(spans=Spans(of(*size), mask))
    batch = of(3, group_size), passes, mask
    seen = passes
    if needs.selects:
        seen = passes._replace(selected=of(3, group_size, dtype=jnp.bool_))
    credited = of(3, group_size, *size[1:] * needs.turn_rewards), seen, mask
    state: State = {}
    if needs.keeps:
        with running(field, module, "first_state"):
            first = algorithm.first_state(num_prompts=3)
        state = jax.tree.map(lambda leaf: of(*leaf.shape, dtype=leaf.dtype), first)
        with running(field, module, "next_state"):
            after = jax.eval_shape(
                lambda *arrays: module.next_state(*arrays, options), state, *batch
            )
        first, then = (
            jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
            for tree in (state, after)
        )
        if first != then:
            raise UserError(
                f"{field}: next_state of {module.__name__} must keep the names, dtypes and shapes "
                f"of first_state, {first}, but returns {then}."
            )
    extra = {"state": state} if needs.keeps else {}
    for part in ("advantages", "returns")[: 1 + needs.values]:
        function = getattr(module, part)
        with running(field, module, part):
            found = jax.eval_shape(
                lambda *arrays, **state: function(*arrays, options, **state),  # noqa: B023
                *credited,
                **extra,
            )
        check(part, found, *size)
    if needs.selects:
        with running(field, module, "selected"):
            found = jax.eval_shape(lambda *arrays: module.selected(*arrays, options), *batch)
        check("selected", found, 3, group_size, dtype=jnp.bool_)
    with running(field, module, "token_weights"):
        found = jax.eval_shape(lambda mask: module.token_weights(mask, options), mask)
    check("token_weights", found, *size)
    tokens = {
        "old_logprobs": of(2, 7) if needs.old_logprobs else None,
        "ref_logprobs": of(2, 7) if needs.reference and not needs.exact_kl else None,
        "advantages": of(2, 7),
        "weights": of(2, 7),
    }
    if needs.sequence_ids:
        tokens["sequence_ids"] = of(2, 7, dtype=jnp.int32)
    if needs.exact_kl:
        tokens["kl"] = of(2, 7)
    if needs.given:
        tokens["given"] = of(2, 7, dtype=jnp.bool_)
    found = {"loss": ((of(2, 7), of(2, 7)), tokens, "policy/loss")}
    if needs.values:
        targets = {name: of(2, 7) for name in ("old_values", "returns", "weights")}
        found["value_loss"] = (of(2, 7),), targets, "critic/loss"
    names: set[str] = set()
    for part, (positional, named, required) in found.items():
        function = functools.partial(getattr(module, part), options=options)
        with running(field, module, part):
            total, scalars = jax.eval_shape(function, *positional, **named)
        check(f"the {part}", total)
        if required not in scalars:
            raise UserError(f"{field}: scalars of {part} of {module.__name__} lack {required!r}.")
        if taken := sorted(scalars.keys() & (RESERVED | names)):
            raise UserError(
                f"{field}: {part} of {module.__name__} has the scalar {taken[0]!r}, which the "
                "training loop logs itself; rename it."
            )
        names |= scalars.keys()
        for name, value in scalars.items():
            check(f"the scalar {name!r} of {part}", value)


def _options(section: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(dotted path, name, value) of every option."""
    for key, value in section.items():
        if key in ("name", "importance", "batch_rules"):
            continue
        if isinstance(value, Mapping):
            yield from ((f"algorithms.{key}.{name}", name, one) for name, one in value.items())
        else:
            yield f"algorithms.{key}", key, value


def check_options(options: Any, **rules: tuple[bool, str]) -> None:
    """Raises ValueError for the first field that breaks its rule; `rules`: (holds, rule)."""
    for name, (holds, rule) in rules.items():
        if not holds:
            raise ValueError(f"{name}={getattr(options, name)!r} must {rule}.")
