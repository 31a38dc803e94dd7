"""Engines with one fault each, for the tests and the benchmark of `semrl_jax.analysis.mismatch`.

An engine is the JAX engine with another architecture, other weights, or a policy that computes a
part of its pass in another way. It samples, so that prefill and decoding both run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from semrl_jax import models
from semrl_jax.analysis.mismatch import Diagnosis, Observation, diagnose, observe_rollouts
from semrl_jax.analysis.mismatch.computation import rounded
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.types import HiddenStateParams, SampleRequest, SamplingParams

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_layers": 4, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_embeddings": True, "rope_theta": 50_000.0},
    "qwen3": {"tie_embeddings": True, "rope_theta": 1e6},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {"tie_embeddings": True, "sliding_window": 12},
}
OLD: dict[str, Any] = {}  # parameters that a stale cache was computed with, by the fault's name


@dataclasses.dataclass(frozen=True)
class OddPolicy(models.Policy):
    """A policy that decodes in another way than it prefills."""

    shift: int = 0  # of the positions of response tokens
    cached: str = ""  # the entry of OLD that the cache of prompts is computed with

    def prefill(self, params, *inputs):
        """See `models.Policy.prefill`."""
        found = super().prefill(params, *inputs)
        if not self.cached:
            return found
        return found._replace(cache=super().prefill(OLD[self.cached], *inputs).cache)

    def extend(self, params, token_ids, positions, *inputs):
        """See `models.Policy.extend`."""
        moved = jnp.where(positions >= 0, positions + self.shift, positions)
        return super().extend(params, token_ids, moved, *inputs)

    def decode(self, params, token_ids, positions, *inputs):
        """See `models.Policy.decode`."""
        return self.extend(params, token_ids[:, None], positions[:, None], *inputs)


class Pair(NamedTuple):
    """What a trainer has, and what its engine has."""

    config: models.DecoderConfig
    params: models.Params
    policy: models.Policy  # the engine's
    engine_params: models.Params
    dtype: str = "float32"  # that the engine is meant to have
    earlier: Mapping[str, models.Params] = MappingProxyType({})
    quantized: bool = False


class Case(NamedTuple):
    """A fault and the right answer: any of `kinds`, and these layers; () has no layer."""

    name: str
    pair: Callable[[], Pair]
    kinds: Sequence[str]
    layers: tuple[int, ...] | None = None  # None: any
    tensor: str = ""  # a part of the finding's tensors


def model(family: str, seed: int) -> tuple[models.DecoderConfig, models.Params]:
    """A random model; biases and scales are random too."""
    config = models.random_config(family, **SIZES)
    config = dataclasses.replace(config, **FAMILIES[family])
    params = models.Policy(config).init(jax.random.key(seed))
    random = np.random.default_rng(seed)

    def moved(path, leaf):
        name = path[-1].key
        if name in ("bias", "scale"):
            return leaf + 0.2 * random.standard_normal(leaf.shape).astype(np.float32)
        return leaf

    return config, jax.tree_util.tree_map_with_path(moved, params)


def observe(pair: Pair, seed: int = 0, count: int = 6, num_tokens: int = 20) -> Observation:
    """Samples from the engine."""
    random = np.random.default_rng(seed)
    requests = [
        SampleRequest(str(i), i, 0, prompt, 7 * i + seed)
        for i, prompt in enumerate(
            random.integers(3, pair.config.vocab_size, 9 + 2 * i, np.int32) for i in range(count)
        )
    ]  # fmt: skip
    client = RolloutClient(
        local=LocalReplica(JaxEngine(pair.policy)), run_id="faults", attempt_id="0",
        progress=lambda _: None,
    )  # fmt: skip
    architecture = pair.policy.config
    try:
        specs = models.tensor_specs(architecture, "float32")
        version = client.sync_weights(
            specs,
            lambda: (
                array
                for _, array in models.iterate_hf_tensors(
                    pair.engine_params, architecture, "float32"
                )
            ),
            step=0,
        )
        layers = tuple(range(architecture.num_layers + 1))
        states = HiddenStateParams(layers, "float32", ("decode", "prefill"))
        rollouts = list(
            client.generate(requests, SamplingParams(num_tokens), states, version=version)
        )
    finally:
        client.close()
    rollouts.sort(key=lambda rollout: rollout.group_id)
    return observe_rollouts(rollouts, pair.config.num_layers)


def diagnosed(pair: Pair, seed: int = 0, **options: Any) -> Diagnosis:
    """What is found in a pair."""
    return diagnose(
        pair.config, pair.params, observe(pair, seed, **options), dtype=pair.dtype,
        earlier=pair.earlier, quantized=pair.quantized,
    )  # fmt: skip


def is_right(case: Case, diagnosis: Diagnosis) -> bool:
    """Whether the first cause is right, and its layers."""
    if not case.kinds:
        return diagnosis.is_healthy
    if not diagnosis.findings:
        return False
    finding = diagnosis.findings[0]
    named = " ".join((finding.what, *finding.alternatives))
    return (
        finding.kind in case.kinds
        and (case.layers is None or finding.layers == case.layers)
        and case.tensor in named
    )


def changed(
    params: models.Params, changes: dict[str, Callable], layer: int | None
) -> models.Params:
    """Parameters with tensors `module/leaf` replaced in one layer, or in all."""
    layers = {name: dict(leaves) for name, leaves in params["layers"].items()}
    for name, change in changes.items():
        module, leaf = name.split("/")
        value = np.array(layers[module][leaf])
        for index in range(len(value)) if layer is None else [layer]:
            value[index] = change(value[index])
        layers[module][leaf] = value
    return params | {"layers": layers}


def in_fp8(config: models.DecoderConfig, params: models.Params) -> models.Params:
    """Parameters whose kernels of layers are rounded to fp8, with a scale for each output."""

    def of(kernel):
        return np.asarray(rounded(jnp.asarray(kernel), "float8/channel"))

    return changed(params, {f"{name}/kernel": of for name in KERNELS}, None)


def moved(params: models.Params, seed: int, size: float) -> models.Params:
    """Parameters some updates earlier or later."""
    random = np.random.default_rng(seed)

    def of(leaf):
        leaf = np.asarray(leaf)
        change = random.standard_normal(leaf.shape).astype(np.float32)
        return leaf + size * (np.abs(leaf).mean() + 1e-3) * change

    return jax.tree.map(of, params)


KERNELS = ("query", "key", "value", "output", "gate", "up", "down")
ALL = tuple(range(SIZES["num_layers"]))


def cases(seed: int, dtype: str = "float32") -> list[Case]:
    """A fault of each of ten kinds; the seed draws layers, tensors, sizes and architectures."""
    random = np.random.default_rng(seed)
    names = list(FAMILIES)

    def drawn(*families):
        return (families or names)[int(random.integers(len(families or names)))]

    layer, size = int(random.integers(4)), float(10 ** random.uniform(-2, -1))

    def engine(config, params, engine_params=None, architecture=None, **options):
        policy = models.Policy(architecture or config, compute_dtype=dtype)
        return Pair(config, params, policy, engine_params or params, dtype, **options)

    def odd(config, params, **options):
        own = {name: options.pop(name) for name in ("shift", "cached") if name in options}
        policy = OddPolicy(config, compute_dtype=dtype, **own)
        return Pair(config, params, policy, params, dtype, **options)

    found = []

    def add(name, pair, kinds, layers=None, tensor=""):
        found.append(Case(f"{name} {seed}", pair, kinds, layers, tensor))

    # 1: a tensor of one layer is that of an earlier version; known, or not known
    family, kernel = drawn(), KERNELS[int(random.integers(7))]
    knows = bool(seed % 2)

    def stale(family=family, kernel=kernel, layer=layer):
        config, params = model(family, seed)
        old = moved(params, seed + 1, size)
        place = np.asarray(old["layers"][kernel]["kernel"])[layer]
        other = changed(params, {f"{kernel}/kernel": lambda _: place}, layer)
        return engine(config, params, other, earlier={"step 0": old} if knows else {})

    kinds = ("stale",) if knows else ("tensor",)
    add("stale tensor", stale, kinds, (layer,), f"{kernel} kernel")
    # 2: rotary base, or its dtype
    family = drawn("qwen2", "llama", "qwen3", "mistral")
    theta = float(random.choice([1e4, 1e5, 5e5, 1e7]))

    def rope(family=family, theta=theta):
        config, params = model(family, seed)
        if theta == config.rope_theta:
            theta *= 3
        other = dataclasses.replace(config, rope_theta=theta)
        return engine(config, params, architecture=other)

    add("rotary base", rope, ("rope_base",), ALL)
    # 3: epsilon of the norms
    family, epsilon = drawn(), float(random.choice([1e-5, 1e-4, 1e-8, 1e-3]))

    def norm(family=family, epsilon=epsilon):
        config, params = model(family, seed)
        return engine(
            config, params, architecture=dataclasses.replace(config, rms_norm_eps=epsilon)
        )

    add("norm epsilon", norm, ("norm_epsilon",), ALL)
    # 4: a bias is missing, of one layer or of all
    bias, where = drawn("query", "key", "value"), None if seed % 3 == 0 else layer

    def unbiased(bias=bias, where=where):
        config, params = model("qwen2", seed)
        return engine(config, params, changed(params, {f"{bias}/bias": np.zeros_like}, where))

    # A bias of the keys shifts all scores of a query alike only without rotary positions.
    layers = ALL if where is None else (where,)
    add("missing bias", unbiased, ("tensor_missing",), layers, f"{bias} bias")
    # 5: the scale of a tensor in fp8; a norm after it would undo the factor
    family, kernel = drawn("qwen2", "llama", "qwen3", "mistral"), KERNELS[int(random.integers(7))]
    factor = float(random.choice([0.5, 2, 1.25]))
    if family == "qwen3" and kernel in ("query", "key"):
        kernel = "value"

    def scaled(family=family, kernel=kernel, layer=layer, factor=factor):
        config, params = model(family, seed)
        healthy = in_fp8(config, params)
        other = changed(healthy, {f"{kernel}/kernel": lambda x: factor * x}, layer)
        return engine(config, healthy, other)

    add("fp8 scale", scaled, ("tensor_scaled",), (layer,), f"{kernel} kernel")
    # 6: prompts in the cache are from before an update
    family = drawn()

    def cached(family=family):
        config, params = model(family, seed)
        old = moved(params, seed + 1, size)
        OLD[f"{family}{seed}{dtype}"] = jax.tree.map(jnp.asarray, old)
        return odd(config, params, cached=f"{family}{seed}{dtype}", earlier={"step 0": old})

    add("stale cache", cached, ("stale_cache",), None)
    # 7: the output matrix
    family = drawn("llama", "qwen3", "qwen2")

    def head(family=family):
        config, params = model(family, seed)
        if config.tie_embeddings:  # an output matrix of its own, from before the last update
            old = moved(params, seed + 1, size)
            matrix = np.asarray(old["embed"]["embedding"]).T
            other = dataclasses.replace(config, tie_embeddings=False)
            return engine(
                config, params, params | {"head": {"kernel": matrix}}, other,
                earlier={"step 0": old} if knows else {},
            )  # fmt: skip
        other = dataclasses.replace(config, tie_embeddings=True)
        rest = {name: leaf for name, leaf in params.items() if name != "head"}
        return engine(config, params, rest, other)

    add("tied head", head, ("head",), ())
    # 8: positions of the response are off
    family, shift = drawn(), 1

    def shifted(family=family, shift=shift):
        config, params = model(family, seed)
        return odd(config, params, shift=shift)

    add("position", shifted, ("positions",), ALL)
    # 9: the window is off by one
    family, step = drawn("mistral", "gemma3_text"), int(random.choice([-1, 1]))
    local = ALL if family == "mistral" else (0, 1, 3)

    def window(family=family, step=step):
        config, params = model(family, seed)
        other = dataclasses.replace(config, sliding_window=config.sliding_window + step)
        return engine(config, params, architecture=other)

    add("window", window, ("window",), local)
    # 10: an adapter is not merged, or twice
    family, times = drawn(), float(random.choice([0.0, 2.0]))

    def adapter(family=family, times=times):
        config, base = model(family, seed)
        lora = models.Lora(("query", "value", "down"), 4, 8.0)
        trained = lora.init(base, seed)
        own = np.random.default_rng(seed)
        for pair in trained["layers"].values():
            pair["lora_b"] = 0.1 * own.standard_normal(pair["lora_b"].shape).astype(np.float32)
        merged = {
            name: lora.scale * np.matmul(leaves["lora_a"], leaves["lora_b"])
            for name, leaves in trained["layers"].items()
        }
        layers = {name: dict(leaves) for name, leaves in base["layers"].items()}
        theirs = {name: dict(leaves) for name, leaves in base["layers"].items()}
        for name, product in merged.items():
            kernel = np.asarray(base["layers"][name]["kernel"])
            layers[name]["kernel"] = kernel + product
            theirs[name]["kernel"] = kernel + times * product
        return engine(
            config, base | {"layers": layers}, base | {"layers": theirs}, earlier={"base": base}
        )

    add("adapter", adapter, ("adapter",), ALL)
    return found


def healthy(seed: int) -> list[Case]:
    """Pairs without a fault in float32, bfloat16 and fp8."""
    family = list(FAMILIES)[seed % len(FAMILIES)]

    def in_dtype(dtype):
        def pair():
            config, params = model(family, seed)
            return Pair(config, params, models.Policy(config, compute_dtype=dtype), params, dtype,
                        earlier={"step 0": moved(params, seed + 1, 0.03)})  # fmt: skip

        return pair

    def quantized():
        config, params = model(family, seed)
        policy = models.Policy(config, compute_dtype="bfloat16")
        return Pair(config, params, policy, in_fp8(config, params), "bfloat16", quantized=True)

    return [
        Case(f"float32 {seed}", in_dtype("float32"), ()),
        Case(f"bfloat16 {seed}", in_dtype("bfloat16"), ()),
        Case(f"fp8 {seed}", quantized, ()),
    ]
