"""The interface between the training loop and an algorithm.

An algorithm is a module with these names:

- `Options`: a frozen dataclass that checks itself. Its fields are settings of `config.algorithms`:
  `advantage.*`, `loss.*`, `aggregation`, and `options.*` for all others.
- `needs(options) -> Needs`: what has to be computed. Nothing else is computed or loaded.
- `advantages(rewards, passes, response_mask, options)`: float32 [B, T], before shaping, 0.0 on
  masked-out tokens. `rewards` is [P, G].
- `token_weights(response_mask, options)`: float32 [B, T] that sums to 1 over a mini-batch.
- `loss(logprobs, entropy, *, old_logprobs, ref_logprobs, advantages, weights, options)`: the share
  of a micro-batch in the loss of its mini-batch, and scalars to be summed like it. `policy/loss` is
  one of the scalars. Arrays that the algorithm does not need are None. With
  `Needs.sequence_ids` there is one more argument, `sequence_ids`; see `sum_over_sequences`.

The functions are pure and run under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from configs.default import get_config
from semrl_jax.errors import UserError
from semrl_jax.modules import load_module, running

PARTS = ("Options", "needs", "advantages", "token_weights", "loss")
# Scalars of the update itself.
RESERVED = {"policy/grad_norm", "policy/update_skipped", "policy/learning_rate"}


class Needs(NamedTuple):
    """What an algorithm needs in addition to the policy's own log-probabilities.

    Attributes:
      groups: at least two responses per prompt.
      old_logprobs: log-probabilities of the policy at the start of the update.
      reference: log-probabilities of the frozen reference.
      sequence_ids: which sequence of its row each token belongs to, for the loss.
    """

    groups: bool = False
    old_logprobs: bool = False
    reference: bool = False
    sequence_ids: bool = False


class Passes(NamedTuple):
    """Results of forward passes over the batch, float32 nats; None if not needed."""

    old_logprobs: Float[Array, "B T"] | None = None
    ref_logprobs: Float[Array, "B T"] | None = None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A module and its options; hashable, so that it can be static under `jax.jit`."""

    module: ModuleType
    options: Any

    @property
    def needs(self) -> Needs:
        return self.module.needs(self.options)

    def advantages(
        self, rewards: Float[Array, "P G"], passes: Passes, response_mask: Bool[Array, "B T"]
    ) -> Float[Array, "B T"]:
        return self.module.advantages(rewards, passes, response_mask, self.options)

    def token_weights(self, response_mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
        return self.module.token_weights(response_mask, self.options)

    def loss(
        self, logprobs: Float[Array, "*tokens"], entropy: Float[Array, "*tokens"], **values: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        return self.module.loss(logprobs, entropy, **values, options=self.options)


def load_algorithm(section: Mapping[str, Any]) -> Algorithm:
    """Loads the algorithm that a config names.

    Args:
      section: `config.algorithms`. `name` is a module of this package ("grpo") or of any other
        ("my_package.my_module"). All fields but `importance` and `batch_rules` are options,
        sections merged. An
        option that the module does not have is ignored if it has its default.

    Raises:
      UserError: if there is no such module, if a part of it is missing, or for an option that the
        module does not have or refuses.
    """
    name = section["name"]
    module = load_module("algorithms.name", name, "semrl_jax.algorithms", PARTS)
    if not (isinstance(module.Options, type) and dataclasses.is_dataclass(module.Options)):
        raise UserError(f"algorithms.name={name!r}: Options must be a frozen dataclass.")
    fields = {field.name for field in dataclasses.fields(module.Options) if field.init}
    options: dict[str, Any] = {}
    paths: dict[str, str] = {}
    defaults = {path: value for path, _, value in _options(get_config().algorithms.to_dict())}
    for path, option, value in _options(section):
        if option not in fields:
            if value == defaults.get(path):  # an option of GRPO that the user did not set
                continue
            raise UserError(
                f"{path}={value!r} is no option of algorithms.name={name!r}, which has "
                f"{', '.join(sorted(fields))}; remove it."
            )
        if option in options:
            raise UserError(f"{path}: {option} is set in two sections; keep one.")
        options[option], paths[option] = value, path
    with running("algorithms.name", module, "Options"):
        try:
            algorithm = Algorithm(module, module.Options(**options))
        except ValueError as error:
            option = str(error).partition("=")[0]
            section = paths.get(option, "algorithms.").removesuffix(option)
            raise UserError(" ".join(f"{section}{error}".split())) from None
        hash(algorithm)  # it is a static argument under `jax.jit`
    with running("algorithms.name", module, "needs"):
        if not isinstance(needs := module.needs(algorithm.options), Needs):
            raise TypeError(f"it must return Needs(...), not {needs!r}")
    return algorithm


def check_functions(algorithm: Algorithm, group_size: int) -> None:
    """Traces the functions of an algorithm as the training loop calls them.

    Raises:
      UserError: if one of them fails, or does not return what this module describes.
    """
    module, options, needs = algorithm.module, algorithm.options, algorithm.needs
    field = "algorithms.name"

    def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def check(part: str, found: Any, *shape: int) -> None:
        kind = getattr(found, "dtype", type(found).__name__), getattr(found, "shape", ())
        if kind != (jnp.float32, shape):
            raise UserError(
                f"{field}: {part} of {module.__name__} must be float32 of shape {shape} here, not "
                f"{kind[0]} of shape {kind[1]}."
            )

    size = 3 * group_size, 5  # of the batch
    passes = Passes(
        of(*size) if needs.old_logprobs else None, of(*size) if needs.reference else None
    )
    mask = of(*size, dtype=jnp.bool_)
    with running(field, module, "advantages"):
        found = jax.eval_shape(
            lambda *arrays: module.advantages(*arrays, options), of(3, group_size), passes, mask
        )
    check("advantages", found, *size)
    with running(field, module, "token_weights"):
        found = jax.eval_shape(lambda mask: module.token_weights(mask, options), mask)
    check("token_weights", found, *size)
    arrays = {"advantages": of(2, 7), "weights": of(2, 7)}
    arrays |= {name: found and of(2, 7) for name, found in passes._asdict().items()}
    if needs.sequence_ids:
        arrays["sequence_ids"] = of(2, 7, dtype=jnp.int32)
    with running(field, module, "loss"):
        total, scalars = jax.eval_shape(
            lambda *values, **arrays: module.loss(*values, **arrays, options=options),
            of(2, 7),
            of(2, 7),
            **arrays,
        )
    check("the loss", total)
    if "policy/loss" not in scalars:
        raise UserError(f"{field}: the scalars of loss of {module.__name__} lack 'policy/loss'.")
    if taken := sorted(scalars.keys() & RESERVED):
        raise UserError(
            f"{field}: loss of {module.__name__} has the scalar {taken[0]!r}, which the training "
            "loop logs itself; rename it."
        )
    for name, value in scalars.items():
        check(f"the scalar {name!r} of loss", value)


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
