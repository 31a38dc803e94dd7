"""Functions of the spectrum of a response and of its prefixes. Each prefix is decomposed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.names import METHODS
from semrl_jax.metrics.nested import prefix_sums
from semrl_jax.metrics.spectrum import PrefixSpectra, symmetric_product, with_float64
from semrl_jax.metrics.valid_rows import AnyArray, Rows, anchor, check_choice, compact
from semrl_jax.metrics.windows import Windows, chunks

# Windows are padded to at most this many sizes, which bounds the compile time.
MAX_SIZES = {jnp.dtype(jnp.float32): 16, jnp.dtype(jnp.float64): 6}

EPSILON = 1e-8  # in units of the hidden states, as in the reference implementation

# Up to here each prefix is decomposed: `prefix_sums` would gain nothing.
MAX_SHORT = 512
# The sums of a response take at most as long as this many decompositions of T x T matrices.
NESTED_DECOMPOSITIONS = 2
# Sums over a spectrum are used if they lack at most this share. A value p counts in the entropy as
# p log(1 / p), so the share is far below the error allowed.
MAX_UNRESOLVED_SUM = 1e-6


def whole_response(
    metric: Metric,
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    method: str,
) -> Float[Array, ""]:
    """A metric of all valid rows, see `Metric.__call__`."""
    check_choice("method", method, METHODS)
    rows = compact(hidden_states, response_mask)
    if metric.of_states:
        return jnp.where(rows.finite, metric.of_states(rows)(rows.num_tokens), 0.0)
    windows = Windows(rows, (), jnp.int32(0), False)
    values, _ = spectral_series(rows, windows, (metric,), (), method=method, centred=metric.centred)
    return values[0]


def spectral_series(
    rows: Rows,
    windows: Windows,
    value_metrics: tuple[Metric, ...],
    series_metrics: tuple[Metric, ...],
    *,
    method: str,
    batched: bool = False,
    centred: bool = True,
) -> tuple[Float[Array, " V"], Float[Array, "K M"]]:
    """Functions of the spectrum: of the whole response, and of every window.

    One Gram matrix and one decomposition per window serve all metrics. A window past the end of the
    response costs nothing, nor does one that is the whole response.

    Args:
      method: "svd": in float64, with an SVD where float64 does not resolve the spectrum. "gram": in
        float32 if that resolves the spectra of the response and of all prefixes, else all in
        float64. Where sums over the spectra suffice for the metrics (`of_sums`) and are faster,
        they are used for windows of more than 512 tokens instead, see `nested`.
      batched: whether `vmap` measures the responses side by side; see `symmetric_eigenvalues`.
      centred: as all of the metrics are.
    """
    num_rows = rows.states.shape[0]
    if num_rows == 0:
        values, series = (len(value_metrics),), (len(windows.sizes), len(series_metrics))
        return jnp.zeros(values, jnp.float32), jnp.zeros(series, jnp.float32)
    measure = with_float64(
        _measure,
        batched=batched,
        sizes=windows.sizes if series_metrics else (),
        window_rows=windows.rows.states.shape[0],
        value_metrics=value_metrics,
        series_metrics=series_metrics,
        method=method,
        centred=centred,
    )
    values, series = measure(rows, windows.rows.num_tokens, windows.num_windows)
    if not series_metrics:
        series = jnp.zeros((len(windows.sizes), 0), jnp.float32)
    return values, series


def _measure(
    rows: Rows,
    window_tokens: Int[Array, "*B"],
    num_windows: Int[Array, "*B"],
    *,
    method: str,
    over_batch: bool = False,
    **static,
) -> tuple[Float[Array, "*B V"], Float[Array, "*B K M"]]:
    """Values and series of responses; `over_batch`: all arrays have a leading batch axis."""
    decompose = functools.partial(_decompose, method=method, over_batch=over_batch)
    num_short = _num_short(*rows.states.shape[-2:], method=method, **static)
    if num_short is None:
        return decompose(rows, window_tokens, num_windows, **static)
    sizes, value_metrics = static["sizes"], static["value_metrics"]
    by_sums = all(metric.of_sums for metric in value_metrics)

    def short():
        head = rows.states[..., :MAX_SHORT, :], jnp.minimum(rows.num_tokens, MAX_SHORT)
        return _measure(
            rows._replace(states=head[0], num_tokens=head[1]),
            head[1],
            jnp.minimum(num_windows, num_short),
            method=method,
            over_batch=over_batch,
            **static | {"sizes": sizes[:num_short], "window_rows": MAX_SHORT},
        )

    def long():
        function = functools.partial(
            _measure_long,
            sizes=sizes,
            num_short=num_short,
            value_metrics=value_metrics if by_sums else (),
            series_metrics=static["series_metrics"],
        )
        return jax.vmap(function)(rows) if over_batch else function(rows)

    def whole():
        only_values = {"sizes": (), "series_metrics": ()}
        return decompose(rows, window_tokens, num_windows, **static | only_values)[0]

    is_long = rows.num_tokens > MAX_SHORT
    values, series = short()
    long_values, long_series, resolved = _if_any(is_long, long)
    if not by_sums:
        long_values = _if_any(is_long, whole)
    values = jnp.where(is_long[..., None], long_values, values)
    series = jnp.concatenate([series, long_series], axis=-2)
    unresolved = is_long & ~resolved
    in_float64 = functools.partial(_decompose, method="float64", over_batch=over_batch)
    again = _if_any(unresolved, lambda: in_float64(rows, window_tokens, num_windows, **static))
    return (
        jnp.where(unresolved[..., None], again[0], values),
        jnp.where(unresolved[..., None, None], again[1], series),
    )


def _if_any(condition: Bool[Array, "*B"], function: Callable[[], Any]) -> Any:
    """The arrays that a function returns; zeros if the condition holds nowhere."""
    shapes = jax.eval_shape(function)
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(jnp.any(condition), function, zeros)


def _num_short(
    num_rows: int,
    width: int,
    *,
    method: str,
    sizes: tuple[int, ...],
    series_metrics: tuple[Metric, ...],
    centred: bool,
    **_,
) -> int | None:
    """How many windows are short; None if `prefix_sums` would not be faster for the others."""
    long = [size for size in sizes if size > MAX_SHORT]
    cost = sum(min(size, width) ** 3 for size in (*long, num_rows))  # of the decompositions
    faster = long and cost > NESTED_DECOMPOSITIONS * num_rows**3
    possible = method == "gram" and centred and all(metric.of_sums for metric in series_metrics)
    if not (possible and faster and width > MAX_SHORT):
        return None
    return len(sizes) - len(long)


def _measure_long(
    rows: Rows,
    *,
    sizes: tuple[int, ...],
    num_short: int,
    value_metrics: tuple[Metric, ...],
    series_metrics: tuple[Metric, ...],
) -> tuple[Float[Array, " V"], Float[Array, "K M"], Bool[Array, ""]]:
    """The response and its later windows; whether sums resolve all of their spectra."""
    states = anchor(rows._replace(states=rows.states.astype(jnp.float64)), sizes[0])
    gram = symmetric_product(states)
    sums = prefix_sums(gram, rows.num_tokens, states.shape[1], MAX_SHORT + 1)
    scale = rows.scale.astype(sums.total.dtype)
    # The response itself is the last entry.
    tokens = jnp.append(jnp.asarray(sizes[num_short:], jnp.int32), rows.num_tokens)
    sums = jax.tree.map(lambda x: x[jnp.maximum(tokens - 1, 0)], sums)
    enough = sums.unresolved <= MAX_UNRESOLVED_SUM * sums.total
    enough &= sums.total > EPSILON / scale
    found = [
        metric.of_sums(sums, scale, tokens, rows.states.shape[1]).astype(jnp.float32)
        for metric in (*value_metrics, *series_metrics)
    ]
    values, series = found[: len(value_metrics)], found[len(value_metrics) :]
    values = jnp.stack([of_all[-1] for of_all in values]) if values else jnp.zeros(0, jnp.float32)
    series = jnp.stack([of_all[:-1] for of_all in series], axis=1)
    # A window of one token has no spectrum.
    unused = (tokens > rows.num_tokens) | (tokens < 2)
    return values, series, jnp.all(enough | unused) | ~rows.finite


def _decompose(*arrays, method: str, over_batch: bool, **static):
    """`_measure_in` by either method; `over_batch`: all arrays have a leading batch axis."""

    def measure(dtype: type):
        function = functools.partial(_measure_in, dtype=dtype, exact=method == "svd", **static)
        return jax.vmap(function)(*arrays) if over_batch else function(*arrays)

    if method != "gram":
        return measure(jnp.float64)[:2]
    values, series, resolved = measure(jnp.float32)

    def again():
        repeated = measure(jnp.float64)[:2]
        if not over_batch:
            return repeated
        new_series = jnp.where(resolved[:, None, None], series, repeated[1])
        return jnp.where(resolved[:, None], values, repeated[0]), new_series

    return jax.lax.cond(jnp.all(resolved), lambda: (values, series), again)


def _measure_in(
    rows: Rows,
    window_tokens: Int[Array, ""],
    num_windows: Int[Array, ""],
    *,
    sizes: tuple[int, ...],
    window_rows: int,
    value_metrics: tuple[Metric, ...],
    series_metrics: tuple[Metric, ...],
    exact: bool,
    centred: bool,
    dtype: type,
) -> tuple[Float[Array, " V"], Float[Array, "K M"], Bool[Array, ""]]:
    """Values, series of prefixes of the last `window_tokens` rows, and whether dtype suffices."""
    num_rows, width = rows.states.shape
    strict = any(metric.needs_all_values for metric in value_metrics)
    first_row = rows.num_tokens - window_tokens
    states = rows._replace(states=rows.states.astype(dtype))
    if centred:
        anchored = anchor(states, sizes[0] if sizes else num_rows, first_row)
    else:
        anchored = states.states
    whole = PrefixSpectra(anchored, centred=centred)
    prefixes = whole if window_rows == num_rows else whole.part(first_row, window_rows)

    def of_first(spectra, size, num_tokens, active, metrics, before=None):
        active = active & (num_tokens >= 2)
        spectrum = spectra(size, num_tokens, active, strict=strict, exact=exact, before=before)
        scale = rows.scale.astype(dtype)
        values = [
            metric.of_spectrum(spectrum.sigma, scale, num_tokens, width) for metric in metrics
        ]
        values = jnp.stack(values).astype(jnp.float32)
        return jnp.where(active, values, 0.0), spectrum.resolved

    everything, resolved = of_first(
        whole, num_rows, rows.num_tokens, rows.finite, (*value_metrics, *series_metrics)
    )
    values, of_whole = everything[: len(value_metrics)], everything[len(value_metrics) :]
    if not sizes:
        return values, jnp.zeros((0, len(series_metrics)), jnp.float32), resolved
    unresolved = ~resolved  # then float64 measures the windows

    def of_window(index: Int[Array, ""], size: int, before=None):
        num_tokens = jnp.asarray(sizes, jnp.int32)[index]
        is_whole = num_tokens == rows.num_tokens
        active = (index < num_windows) & ~is_whole & ~unresolved
        found, resolved = of_first(prefixes, size, num_tokens, active, series_metrics, before)
        return jnp.where(is_whole, of_whole, found), resolved

    parts, all_resolved, before = [], [resolved[None]], None
    for start, stop in chunks(len(sizes), MAX_SIZES[jnp.dtype(dtype)]):
        size = sizes[stop - 1]
        if size > width:
            before = prefixes.scatter(sizes[start], before)
        one = functools.partial(of_window, size=size, before=before)
        indices = jnp.arange(start, stop, dtype=jnp.int32)
        if stop - start == 1:
            part, resolved = jax.tree.map(lambda x: x[None], one(indices[0]))
        else:
            part, resolved = jax.lax.map(one, indices)
        parts.append(part)
        all_resolved.append(resolved)
    return values, jnp.concatenate(parts), jnp.all(jnp.concatenate(all_resolved))
