"""Floors of a training step: matrix products, generation and an update in plain JAX loops.

benchmarks/step.py runs this in addition to the systems that it compares. The loops do the least
work that gives the same result. They have no service, no ragged lengths, no masks except the causal
one, and no checks. They show what XLA reaches on this machine, not what is possible at all.

- Products: the rate of float32 matrix products, at three shapes that make up most of the update:
  all tokens of the batch through the feed-forward layer, and the responses through the head.
- Generation: a prefill and one scan per segment of the cache, which grows `SEGMENTS` times. A token
  costs one uniform number: its block of the vocabulary, then its place in the block, are found in
  cumulative sums of probabilities. The log-probabilities of the tokens are returned.
- Update: the gradient of the clipped objective, summed over micro-batches, and an Adam step.
"""

import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.protocol import Driver

SEGMENTS = 4  # 1 reads the whole cache at every token; more than 4 gave nothing
MATMUL_S = 0.15  # seconds of products per shape
Params = Any


class Sizes(NamedTuple):
    """Sizes of the model and the step; hashable, so that programs can depend on them."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    theta: float
    epsilon: float
    responses: int
    prompt: int
    response: int
    micro: int  # responses of a micro-batch

    @classmethod
    def of(cls, work: dict[str, Any]) -> "Sizes":
        """From the work of benchmarks/step.py."""
        config = json.loads((pathlib.Path(work["model"]) / "config.json").read_text())
        return cls(
            config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"],
            config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"],
            float((config.get("rope_parameters") or config)["rope_theta"]), config["rms_norm_eps"],
            len(work["prompts"]) * work["group_size"], work["prompt_tokens"],
            work["response_tokens"], work["micro_batch_size"],
        )  # fmt: skip

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def forward_flops(self) -> float:
        """Operations of one forward pass over the batch: 2 per weight and token, attention over the
        causal half, the head only for response tokens."""
        tokens = self.responses * (self.prompt + self.response)
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        weights = self.layers * self.width * (2 * queries + 2 * keys + 3 * self.inner)
        attention = 2 * self.layers * queries * (self.prompt + self.response) / 2
        head = self.responses * self.response * self.width * self.vocab
        return 2.0 * (tokens * (weights + attention) + head)

    @property
    def update_flops(self) -> float:
        """Forward, and twice that backward; nothing is recomputed."""
        return 3 * self.forward_flops


def init(sizes: Sizes) -> Params:
    """Random weights, tied; biases of the attention as in Qwen2."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape, scale=0.02), jnp.float32)

    qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.head
    layer = {
        "qkv": (sizes.width, qkv), "bias": (qkv,), "out": (sizes.heads * sizes.head, sizes.width),
        "up": (sizes.width, 2 * sizes.inner), "down": (sizes.inner, sizes.width),
        "norm1": (sizes.width,), "norm2": (sizes.width,),
    }  # fmt: skip
    return {
        "layers": [{k: normal(*shape) for k, shape in layer.items()} for _ in range(sizes.layers)],
        "embed": normal(sizes.vocab, sizes.width),
        "norm": jnp.ones(sizes.width),
    }


def normed(x: jax.Array, weight: jax.Array, sizes: Sizes) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + sizes.epsilon) * weight


def rotated(x: jax.Array, positions: jax.Array, sizes: Sizes) -> jax.Array:
    """x [B, T, heads, H] with rotary positions [T]."""
    angles = positions[:, None] * sizes.theta ** (-jnp.arange(0, sizes.head, 2) / sizes.head)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def projections(p: Params, x: jax.Array, positions: jax.Array, sizes: Sizes):
    """Queries [B, T, K, G, H]; keys and values [B, T, K, H]."""
    batch, length, _ = x.shape
    both = normed(x, p["norm1"], sizes) @ p["qkv"] + p["bias"]
    both = both.reshape(batch, length, -1, sizes.head)
    q, k, v = jnp.split(both, [sizes.heads, sizes.heads + sizes.kv_heads], 2)
    q = rotated(q, positions, sizes).reshape(batch, length, sizes.kv_heads, -1, sizes.head)
    return q, rotated(k, positions, sizes), v


def finished(p: Params, x: jax.Array, attended: jax.Array, sizes: Sizes) -> jax.Array:
    """The rest of a layer after its attention."""
    x = x + attended.reshape(*x.shape[:2], -1) @ p["out"]
    gate, up = jnp.split(normed(x, p["norm2"], sizes) @ p["up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def layer(p: Params, x: jax.Array, sizes: Sizes):
    """A layer over whole sequences from position 0; also the keys and values."""
    positions = jnp.arange(x.shape[1])
    q, k, v = projections(p, x, positions, sizes)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * sizes.head**-0.5
    weights = jax.nn.softmax(jnp.where(positions[:, None] >= positions, scores, -1e30), -1)
    return finished(p, x, jnp.einsum("bkgts,bskh->btkgh", weights, v), sizes), k, v


# ------------------------------------------------------------------------------------- the update


@jax.custom_vjp
def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax at the tokens; its gradient needs no scatter."""
    return _logprobs_forward(logits, tokens)[0]


def _logprobs_forward(logits, tokens):
    total = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return chosen - total, (logits, tokens, total)


def _logprobs_backward(kept, gradient):
    logits, tokens, total = kept
    is_token = jnp.arange(logits.shape[-1]) == tokens[..., None]
    return gradient[..., None] * (is_token - jnp.exp(logits - total[..., None])), None


token_logprobs.defvjp(_logprobs_forward, _logprobs_backward)


def loss(params: Params, ids: jax.Array, advantages: jax.Array, sizes: Sizes) -> jax.Array:
    """Sum of the clipped objective over the response tokens of ids [B, T]."""
    x = params["embed"][ids]
    for p in params["layers"]:
        x, _, _ = layer(p, x, sizes)
    states = normed(x[:, sizes.prompt - 1 : -1], params["norm"], sizes)
    logprobs = token_logprobs(states @ params["embed"].T, ids[:, sizes.prompt :])
    ratios = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    gains = advantages[:, None]
    return -jnp.sum(jnp.minimum(ratios * gains, jnp.clip(ratios, 0.8, 1.2) * gains))


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-6))


@functools.partial(jax.jit, static_argnames="sizes", donate_argnums=(0, 1))
def update(params: Params, state: Any, ids: jax.Array, advantages: jax.Array, sizes: Sizes):
    """One optimiser step over micro-batches."""

    def add(total, micro):
        gradient = jax.grad(loss)(params, *micro, sizes)
        return jax.tree.map(jnp.add, total, gradient), None

    micros = (ids.reshape(-1, sizes.micro, ids.shape[1]), advantages.reshape(-1, sizes.micro))
    gradient, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micros)
    changes, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, changes), state


# ------------------------------------------------------------------------------------- generation


def sample(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token per row of [B, V] and its log-probability, by inverse CDF in blocks of V^0.5."""
    rows, vocab = logits.shape
    width = 1 << (vocab.bit_length() // 2)
    mass = jnp.exp(logits - logits.max(-1, keepdims=True))
    mass = jnp.pad(mass, ((0, 0), (0, -vocab % width))).reshape(rows, -1, width)
    sums = jnp.cumsum(mass.sum(-1), -1)
    drawn = jax.random.uniform(key, (rows, 1)) * sums[:, -1:]
    block = jnp.minimum(jnp.sum(sums <= drawn, -1), sums.shape[1] - 1)
    before = jnp.where(block > 0, sums[jnp.arange(rows), block - 1], 0.0)
    inside = mass[jnp.arange(rows), block]
    places = jnp.sum(before[:, None] + jnp.cumsum(inside, -1) <= drawn, -1)
    place = jnp.minimum(places, width - 1)
    chosen = inside[jnp.arange(rows), place]
    return jnp.minimum(block * width + place, vocab - 1), jnp.log(chosen) - jnp.log(sums[:, -1])


@functools.partial(jax.jit, static_argnames="sizes")
def generate(params: Params, prompts: jax.Array, key: jax.Array, sizes: Sizes):
    """Tokens and log-probabilities, [T, B] each."""
    head = params["embed"].T

    def step(carry, index):
        tokens, cache, key = carry
        key, own = jax.random.split(key)
        position = sizes.prompt + index - 1
        x, kept = params["embed"][tokens][:, None], []
        for p, (keys, values) in zip(params["layers"], cache):
            q, k, v = projections(p, x, position[None], sizes)
            at = (0, 0, position, 0)
            keys = jax.lax.dynamic_update_slice(keys, k.swapaxes(1, 2), at)
            values = jax.lax.dynamic_update_slice(values, v.swapaxes(1, 2), at)
            # Sums of products are faster here than small matrix products.
            q = q[:, 0, :, :, None]  # [B, K, G, 1, H]
            scores = jnp.sum(q * keys[:, :, None], -1) * sizes.head**-0.5
            scores = jnp.where(jnp.arange(keys.shape[2]) <= position, scores, -1e30)
            weights = jax.nn.softmax(scores, -1)
            x = finished(p, x, jnp.sum(weights[..., None] * values[:, :, None], -2), sizes)
            kept.append((keys, values))
        found = sample(normed(x[:, 0], params["norm"], sizes) @ head, own)
        return (found[0], kept, key), found

    x, cache = params["embed"][prompts], []
    for p in params["layers"]:
        x, k, v = layer(p, x, sizes)
        cache.append((k.swapaxes(1, 2), v.swapaxes(1, 2)))
    key, own = jax.random.split(key)
    first = sample(normed(x[:, -1], params["norm"], sizes) @ head, own)
    carry, found, start = (first[0], cache, key), [jax.tree.map(lambda a: a[None], first)], 1
    for segment in range(SEGMENTS):
        end = 1 + (sizes.response - 1) * (segment + 1) // SEGMENTS
        grow = sizes.prompt + end - 1 - carry[1][0][0].shape[2]
        pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, grow), (0, 0)))
        carry = (carry[0], jax.tree.map(pad, carry[1]), carry[2])
        carry, more = jax.lax.scan(step, carry, jnp.arange(start, end))
        found.append(more)
        start = end
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


# --------------------------------------------------------------------------------------- measured


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def products(sizes: Sizes) -> Callable[[], float]:
    """A function that measures the rate of products, in GFLOP/s."""
    tokens = sizes.responses * (sizes.prompt + sizes.response)
    shapes = [
        (tokens, sizes.width, 2 * sizes.inner),
        (tokens, sizes.inner, sizes.width),
        (sizes.responses * sizes.response, sizes.width, sizes.vocab),
    ]
    product = jax.jit(jnp.matmul)
    pairs = [(jnp.ones((m, k)), jnp.ones((k, n))) for m, k, n in shapes]
    flops = [2 * m * k * n for m, k, n in shapes]
    repeats = []
    for pair in pairs:
        seconds(lambda: product(*pair))  # noqa: B023 - called at once
        repeats.append(max(1, int(MATMUL_S / seconds(lambda: product(*pair)))))  # noqa: B023

    def measure() -> float:
        took = 0.0
        for pair, count in zip(pairs, repeats):
            # One after the other: a second product in flight would share the cores.
            took += sum(seconds(lambda: product(*pair)) for _ in range(count)) / count  # noqa: B023
        return sum(flops) / took / 1e9

    return measure


def main() -> None:
    driver = Driver()
    work, sizes = driver.work, Sizes.of(driver.work)
    if work["end_token_ids"]:  # ragged: only the rate of products, at the sizes of a micro-batch
        from benchmarks import real_model

        rate = products(sizes._replace(responses=sizes.micro))
        lengths = work["prompt_lengths"]
        flops = real_model.floor_flops(work["model"], lengths, sizes.responses)
        driver.report(versions={}, prompt_tokens=lengths, **flops)
        while True:
            driver.wait()
            driver.report(gflops=rate())
    rng = np.random.default_rng(0)
    ids = rng.integers(0, sizes.vocab, (sizes.responses, sizes.prompt + sizes.response), np.int32)
    ids, advantages = jnp.asarray(ids), jnp.asarray(rng.normal(size=sizes.responses), jnp.float32)
    params = init(sizes)
    trained = [jax.tree.map(jnp.copy, params)]
    trained.append(OPTIMIZER.init(trained[0]))
    rate = products(sizes)
    driver.report(
        versions={},
        num_params=sum(leaf.size for leaf in jax.tree.leaves(params)),
        prompt_tokens=work["prompt_lengths"],
        update_flops=sizes.update_flops,
    )
    key = jax.random.key(0)

    def train() -> Any:
        trained[:] = update(*trained, ids, advantages, sizes)
        return trained

    while True:
        driver.wait()
        key, own = jax.random.split(key)
        driver.report(
            gflops=rate(),
            rollout_s=seconds(lambda: generate(params, ids[:, : sizes.prompt], own, sizes)),  # noqa: B023
            update_s=seconds(train),
            num_tokens=sizes.responses * sizes.response,
        )


if __name__ == "__main__":
    main()
