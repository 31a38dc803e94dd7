"""Finds the layers that an engine computes in another way, and the hypothesis that explains them.

The states that an engine gives cut its pass into segments. Each segment is computed from the
engine's own states at its begin, so that a difference counts where it arises and not where it ends.
With all layers a segment is one layer. A segment whose difference is above what rounding explains
is computed again under each hypothesis. The cause is the one that leaves the least difference; it
explains the segment if only rounding is left. If none does, each tensor is set free and fitted to
three of four tokens: the others tell whether another tensor would explain it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax import models
from semrl_jax.analysis.mismatch.computation import Computation, computation_of, groups_of, normed
from semrl_jax.analysis.mismatch.hypotheses import CAUSES, Hypothesis, Known, hypotheses
from semrl_jax.analysis.mismatch.observed import DTYPES, Observation

# Unit roundoff as a part of that of bfloat16, whose effect is measured.
UNITS = {"float32": 2.0**-16, "bfloat16": 1.0, "float16": 2.0**-3}
# Root mean square of the differences of a part, divided by what two dtypes give there. Healthy
# engines stay below: 2.4 in float32 and 1.3 in bfloat16 were the largest (benchmarks/mismatch.py).
LIMITS = {"float32": 5.0, "bfloat16": 2.0, "float16": 2.0}
LEAST = {"state": 2e-7, "logprob": 1e-6}  # of a float32 sum in another order: relative, nats
STEPS = 5  # of the fit of a number
MOST_FREE = 2**22  # entries of a tensor that is fitted
FREE_STEPS = 8  # of such a fit
NUM_DIRECTIONS = 100  # of conjugate gradients in a step


class Segment(NamedTuple):
    """A part of the pass: states `first` to `last`; -1 before the embedding, L + 1 log-probs."""

    first: int
    last: int

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layers that it has, but for the number of the last ones."""
        return tuple(range(max(self.first, 0), self.last))

    def name(self, count: int) -> str:
        """In words, for a model of `count` layers."""
        parts = ["embedding"] if self.first < 0 else []
        layers = [layer for layer in self.layers if layer < count]
        if layers:
            parts.append(layer_text(layers))
        if self.first < count <= self.last:
            parts.append("final norm")
        if self.last > count:
            parts.append("log-probabilities")
        return ", ".join(parts)


class Weights(NamedTuple):
    """What checksums say of an engine's tensors, by `<layer>/<module>/<leaf>`.

    `differing` are other ones than the trainer's, with the name of the earlier version that they
    are of, or "". `unknown` were not compared. All others are the trainer's.
    """

    differing: Mapping[str, str]
    unknown: Container[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause.

    Attributes:
      kind: a key of `CAUSES`.
      what: the tensor or the quantity.
      layers: where; empty for the embedding, the final norm and the output matrix.
      value: the number that was fitted, or what belongs to the cause; None without one.
      explained: share of the difference that the cause explains, up to 1.
      alternatives: other names of the same change; the numbers cannot tell them apart.
      detail: what else is known, such as the heads that differ.
    """

    kind: str
    what: str
    layers: tuple[int, ...]
    value: float | str | None
    explained: float
    alternatives: tuple[str, ...] = ()
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The cause and the way out."""
        cause, way_out = CAUSES[self.kind]
        value = "" if self.value is None else number(self.value)
        what, _, label = self.what.partition("|")
        if self.kind in ("stale", "stale_cache"):
            value = label
        text = cause.format(what=what, layers=layer_text(self.layers), value=value)
        text += f" ({self.detail})" if self.detail else ""
        if self.alternatives:
            text += f"; equal in effect: {', '.join(self.alternatives)}"
        share = "" if self.explained > 0.99 else f" [explains {100 * self.explained:.0f}%]"
        return f"{text[0].upper()}{text[1:]}{share}. Way out: {way_out}."


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
      segments: all parts of the pass.
      ratios: the difference of each, divided by its rounding; root mean squares.
      findings: the causes, the first one first; empty if rounding explains all.
      dtype: of the engine's states, as their bits tell.
      states: relative difference of the engine's states from the trainer's own pass [B, N] by
        layer; NaN where there is none. Contains what earlier layers cause.
      logprobs: the difference engine - trainer, nats.
      local: the relative difference that each segment adds [B, N], by its last state.
      noise: the root mean square of `local` that rounding gives, by last state.
      limit: the largest ratio that rounding explains.
    """

    segments: tuple[Segment, ...]
    ratios: tuple[float, ...]
    findings: tuple[Finding, ...]
    dtype: str
    states: Mapping[int, Float[np.ndarray, "B N"]]
    logprobs: Float[np.ndarray, "B N"]
    local: Mapping[int, Float[np.ndarray, "B N"]]
    noise: Mapping[int, float]
    limit: float

    @property
    def is_healthy(self) -> bool:
        """Whether dtypes explain the difference."""
        return not self.findings

    @property
    def sentence(self) -> str:
        """The causes, or that there is none."""
        if self.findings:
            return " ".join(finding.sentence for finding in self.findings)
        worst = max(self.ratios, default=0.0)
        return (
            f"Rounding in {self.dtype or 'the dtypes'} explains the difference: where it is "
            f"largest, it is {worst:.2g} times rounding, and up to {self.limit:g} is usual."
        )


def _all_states(computation: Computation) -> dict[int, np.ndarray]:
    """The states of a pass, by number."""
    found, x = {}, None
    for index in range(len(computation.layers) + 1):
        x = computation.states(index - 1, index, x)
        found[index] = np.asarray(x, np.float32)
    return found


def number(value: float | str) -> str:
    """A fitted number, in few digits."""
    return value if isinstance(value, str) else f"{value:.6g}"


def layer_text(layers: Sequence[int]) -> str:
    """Layers in words."""
    if not layers:
        return "the model"
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


class _Trial(NamedTuple):
    """A hypothesis with its value in some layers, and the difference that it leaves."""

    hypothesis: Hypothesis
    layers: tuple[int, ...]
    value: float
    left: float  # root mean square


def diagnose(
    config: models.DecoderConfig,
    params: models.Params,
    observation: Observation,
    *,
    dtype: str = "float32",
    earlier: Mapping[str, models.Params] | None = None,
    weights: Weights | None = None,
    quantized: bool = False,
    temperature: float = 1.0,
    advance: Callable[[], None] = lambda: None,
    status: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Compares what an engine gave with the trainer's pass, and names the cause.

    Args:
      params: the trainer's, float32.
      dtype: that the engine is meant to compute in.
      earlier: earlier versions of the parameters by name; "base" is the model without its adapter.
      weights: what the checksums of the engine's tensors say; None: nobody asked the engine.
      quantized: whether the engine is meant to round the kernels of its layers.
      temperature: of the engine's log-probabilities.
      advance: called when a part of `segments_of` has been compared.
      status: called with a text before the cause of a part is searched, which takes longer.
    """
    given = config, params, observation, dtype, earlier or {}, weights, temperature
    search = _Search(*given, advance, status)
    if quantized:
        search.quantize()
    return search.diagnosis()


def segments_of(config: models.DecoderConfig, observation: Observation) -> tuple[Segment, ...]:
    """The parts of the pass, between the states that the engine gave."""
    known = [layer for layer in sorted(observation.states) if layer <= config.num_layers]
    has_logprobs = bool(np.isfinite(observation.logprobs).any())
    ends = [-1, *known, *[config.num_layers + 1] * has_logprobs]
    return tuple(Segment(a, b) for a, b in itertools.pairwise(ends))


class _Search:
    def __init__(
        self, config, params, observation, dtype, earlier, weights, temperature, advance, status
    ):
        self.advance, self.status = advance, status
        self.config, self.observation, self.expected = config, observation, dtype
        params, earlier = jax.tree.map(jnp.asarray, (params, dict(earlier)))
        self.weights = weights
        self.dtype = observation.dtype or dtype
        self.limit = LIMITS[self.dtype]
        inputs = observation.ids, observation.targets
        self.exact = computation_of(config, params, *inputs)._replace(temperature=temperature)
        self.own = self.exact.in_dtype(self.dtype)
        self.coarse = self.exact.in_dtype("bfloat16")
        self.segments = segments_of(config, observation)
        self.reference = _all_states(self.exact)
        past = {
            name: _all_states(computation_of(config, each, *inputs))
            for name, each in earlier.items()
        }
        self.known = Known(config, params, earlier, observation.num_prompt, self.reference, past)

    def quantize(self) -> None:
        """Takes kernels that are rounded as the engine's for healthy.

        If the engine rounds in a way of its own, differences of the size of fp8 are.
        """
        layers = tuple(range(self.config.num_layers))
        parts = [s for s in self.segments if self._decoder_layers(s)]
        best, least = None, np.inf
        for hypothesis in hypotheses(self.known, 0, 1):
            if hypothesis.kind != "rounded_weights" or hypothesis.tensors:
                continue
            computation = hypothesis.edit(self.own, layers, 1.0)
            left = [self.left(computation, s, self.begin(s)) / self.noise(s, self.begin(s))
                    for s in parts]  # fmt: skip
            if parts and np.median(left) < least:
                best, least = hypothesis, float(np.median(left))
        if best is None:
            return
        if least > self.limit:
            self.coarse = best.edit(self.coarse, layers, 1.0)
            return
        self.own, self.exact, self.coarse = (
            best.edit(each, layers, 1.0) for each in (self.own, self.exact, self.coarse)
        )

    def begin(self, segment: Segment) -> np.ndarray | None:
        """The state at which a segment begins: the engine's, where it is known."""
        if segment.first < 0:
            return None
        given, ours = self.observation.states[segment.first], self.reference[segment.first]
        return np.where(np.isfinite(given), given, ours)

    def computed(self, computation: Computation, segment: Segment, x) -> Array:
        """The end of a segment: states [B, N, D], or log-probabilities [B, N]."""
        count = self.config.num_layers
        last = min(segment.last, count)
        x = None if x is None else jnp.asarray(x)
        if segment.first < last:
            x = computation.states(segment.first, last, x)
        if segment.last > count:
            return jnp.asarray(computation.logprobs(x))
        return x.astype(jnp.float32)

    def given(self, segment: Segment) -> np.ndarray:
        if segment.last > self.config.num_layers:
            return self.observation.logprobs
        return self.observation.states[segment.last]

    def rows(self, segment: Segment) -> Bool[np.ndarray, "B N"]:
        """The tokens at which the engine gave the end of a segment, in finite numbers."""
        given = self.given(segment)
        known = np.isfinite(given) if given.ndim == 2 else np.isfinite(given).all(axis=2)
        return known & self.observation.is_token

    @functools.cached_property
    def norms(self) -> dict[int, np.ndarray]:
        return {
            layer: np.maximum(np.linalg.norm(x, axis=2), 1e-30)
            for layer, x in self.reference.items()
        }

    def differences(self, segment: Segment, one, other) -> np.ndarray:
        """Per token: relative to the norm of the state, or in nats."""
        difference = np.asarray(one, np.float32) - np.asarray(other, np.float32)
        if difference.ndim == 2:
            return np.abs(difference)
        return np.linalg.norm(difference, axis=2) / self.norms[segment.last]

    def left_by(self, computation: Computation, segment: Segment, x) -> np.ndarray:
        """The difference per token that a computation leaves."""
        return self.differences(
            segment, self.computed(computation, segment, x), self.given(segment)
        )

    def left(self, computation: Computation, segment: Segment, x) -> float:
        """Its root mean square."""
        value = _rms(self.left_by(computation, segment, x)[self.rows(segment)])
        return value if np.isfinite(value) else np.inf

    def noise(self, segment: Segment, x) -> float:
        """The difference that rounding makes, root mean square, in the engine's dtype."""
        parts = [self.computed(each, segment, x) for each in (self.exact, self.coarse)]
        value = _rms(self.differences(segment, *parts)[self.rows(segment)]) * UNITS[self.dtype]
        kind = "logprob" if segment.last > self.config.num_layers else "state"
        return max(value, LEAST[kind] * max(len(segment.layers), 1) ** 0.5)

    def diagnosis(self) -> Diagnosis:
        local, noises, ratios, bad = {}, {}, [], []
        for segment in self.segments:
            x = self.begin(segment)
            found = self.left_by(self.own, segment, x)
            local[segment.last] = np.where(self.rows(segment), found, np.nan)
            values = found[self.rows(segment)]
            noises[segment.last] = self.noise(segment, x)
            ratio = _rms(values) / noises[segment.last] if values.size else 0.0
            ratios.append(ratio if np.isfinite(ratio) else np.inf)
            if not ratios[-1] <= self.limit:
                bad.append(segment)
            self.advance()
        found, findings = self.observation.dtype, []
        if found and DTYPES.index(found) < DTYPES.index(self.expected):
            findings.append(Finding("dtype", found, (), self.expected, 1.0))
        findings += self._explained(bad)
        findings += self._unseen(findings)
        findings = [*self._not_finite(), *findings]
        states = {
            layer: np.where(
                np.isfinite(given).all(axis=2) & self.observation.is_token,
                np.linalg.norm(given - self.reference[layer], axis=2) / self.norms[layer],
                np.nan,
            )
            for layer, given in self.observation.states.items()
        }
        ours = self.exact.logprobs(jnp.asarray(self.reference[self.config.num_layers]))
        logprobs = np.where(self.observation.is_token, self.observation.logprobs - ours, np.nan)
        return Diagnosis(
            self.segments, tuple(ratios), tuple(findings), self.observation.dtype, states,
            logprobs, local, noises, self.limit,
        )  # fmt: skip

    def _not_finite(self) -> Iterator[Finding]:
        """The first states with an infinite value, which is left out of all comparisons."""
        count = self.config.num_layers
        for layer, given in sorted(self.observation.states.items()):
            broken = (np.isinf(given).any(axis=2) & self.observation.is_token).sum()
            if broken:
                what = "the final state" if layer >= count else f"the input of layer {layer}"
                value = f"{broken} of {self.observation.is_token.sum()} tokens"
                yield Finding("not_finite", what, (), value, 1.0)
                return

    def _unseen(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Tensors whose checksums differ, in layers where no cause was found.

        They compute nearly the same, or something else hides them.
        """
        explained = {layer for finding in findings for layer in finding.layers}
        of: dict[tuple[str, str], list[int]] = {}  # layers by tensor and version
        for name, label in (self.weights.differing if self.weights else {}).items():
            layer, _, tensor = name.partition("/")
            if layer.isdigit() and int(layer) not in explained:
                of.setdefault((tensor.replace("/", " "), label), []).append(int(layer))
            elif not layer.isdigit() and not any(not finding.layers for finding in findings):
                of.setdefault((name.replace("/", " "), label), [])
        by_layers: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for (what, label), layers in of.items():
            by_layers.setdefault((tuple(layers), label), []).append(what)
        for (layers, label), names in by_layers.items():
            kind = "adapter" if label == "base" else "stale" if label else "tensor"
            what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            what += f"|{label}" if label else ""
            value = 0.0 if kind == "adapter" else None
            detail = "by its checksum" if len(names) == 1 else "by their checksums"
            yield Finding(kind, what, layers, value, 1.0, (), detail)

    def _explained(self, bad: Sequence[Segment]) -> list[Finding]:
        """The causes of the segments with a difference, in the order of the pass."""
        used: list[_Trial] = []  # explain earlier segments
        groups: dict[tuple, list[tuple[_Trial, float]]] = {}
        same: dict[tuple, list[_Trial]] = {}
        alone: dict[tuple, Finding] = {}
        for segment in bad:
            self.status(f"searches the cause in {segment.name(self.config.num_layers)}")
            x = self.begin(segment)
            rounding, whole = self.noise(segment, x), self.left(self.own, segment, x)
            noise = self.limit * rounding
            again = [self._again(trial, segment, x) for trial in used]
            good = [trial for trial in again if trial and trial.left <= max(noise, 0.01 * whole)]
            equal: list[_Trial] = []
            if good:
                best = min(good, key=lambda trial: trial.left)
            else:
                best, equal = self._searched(segment, x, whole, noise)
            left = np.inf if best is None else best.left
            if left > noise and (several := self._several(segment, x, noise)) is not None:
                best, equal, left = several, [], several.left
            finding, share = None, _share(left, whole, rounding)
            if left > max(noise, 0.01 * whole):
                finding = self._freed(segment, x, whole, rounding)
            is_open = left > noise and not (finding and finding.explained > 0.999)
            if is_open and (pair := self._paired(segment, x, best, whole, noise)):
                for trial in pair:
                    key = trial.hypothesis.kind, trial.hypothesis.what, round(trial.value, 6)
                    groups.setdefault(key, []).append((trial, 1.0))
                    same.setdefault(key, [])
                continue
            if left > max(noise, 0.01 * whole):
                if finding is None and share < 0.75:
                    finding = self._by_elimination(segment)
                if finding is not None and (share < 0.75 or finding.explained > share):
                    key = "alone", finding.kind, finding.what
                    layers = alone[key].layers if key in alone else ()
                    groups[key] = []
                    alone[key] = dataclasses.replace(finding, layers=(*layers, *finding.layers))
                    continue
            else:
                used.append(best)
            key = best.hypothesis.kind, best.hypothesis.what, round(best.value, 6)
            share = 1.0 if left <= noise else _share(left, whole, rounding)
            groups.setdefault(key, []).append((best, share))
            same.setdefault(key, equal)
        found = [
            alone[key] if key in alone else self._finding(entries, same[key])
            for key, entries in groups.items()
        ]
        found = [self._widened(each, groups[key], bad) for each, key in zip(found, groups)]
        for label in self.known.earlier:  # an engine that missed a whole update
            whole = [each for each in found if each.what == f"every tensor|{label}"]
            if whole and len(whole[0].layers) == self.config.num_layers:
                texts = f"is that of {label}", f"is the embedding of {label}"
                found = [*whole, *(x for x in found if x not in whole and x.what not in texts)]
        return found

    def _widened(
        self, finding: Finding, entries: Sequence[tuple[_Trial, float]], bad: Sequence[Segment]
    ) -> Finding:
        """A finding of the pass in all layers, if it would not show in the others.

        Settings hold in all layers. An epsilon, for one, shows in those with small states only.
        """
        if not entries or entries[0][0].hypothesis.tensors or not finding.layers:
            return finding
        (trial, _), hidden = entries[0], []
        for segment in self.segments:
            layers = self._decoder_layers(segment)
            if segment in bad or not layers:
                continue
            x = self.begin(segment)
            computation = trial.hypothesis.edit(self.own, layers, trial.value)
            left = np.nan if computation is None else self.left(computation, segment, x)
            if computation is None or left == self.left(self.own, segment, x):
                continue  # the layer has no such setting, or this value of it
            if not left <= self.limit * self.noise(segment, x):
                return finding
            hidden += layers
        if not hidden:
            return finding
        detail = f"in {layer_text(hidden)} rounding hides it"
        layers = tuple(sorted({*finding.layers, *hidden}))
        return dataclasses.replace(finding, layers=layers, detail=detail)

    def _again(self, trial: _Trial, segment: Segment, x) -> _Trial | None:
        hypothesis = trial.hypothesis
        if hypothesis.of_layers and not set(self._decoder_layers(segment)):
            return None
        return self._tried(hypothesis, segment, x, self._decoder_layers(segment), (trial.value,))

    def _decoder_layers(self, segment: Segment) -> tuple[int, ...]:
        return tuple(layer for layer in segment.layers if layer < self.config.num_layers)

    def _searched(
        self, segment: Segment, x, whole: float, noise: float
    ) -> tuple[_Trial | None, list[_Trial]]:
        """The best trial of all hypotheses, and those that cannot be told from it."""
        layers = self._decoder_layers(segment)
        places = [layers]
        if len(layers) > 1:
            places += [(layer,) for layer in layers]
        trials: list[_Trial] = []
        for place in places:
            if place != layers and trials and min(t.left for t in trials) <= noise:
                break
            known = self.known._replace(events=self._events(segment, x))
            for hypothesis in hypotheses(known, segment.first, segment.last):
                if not self._is_possible(hypothesis, place):
                    continue
                if not hypothesis.of_layers and place != layers:
                    continue
                trial = self._tried(hypothesis, segment, x, place)
                if trial is not None:
                    trials.append(trial)
        if not trials:
            return None, []
        least = min(trial.left for trial in trials)
        # A value that only rounding tells from another one is no reason to prefer it.
        near = [trial for trial in trials if trial.left <= max(1.2 * least, 0.6 * noise)]
        best = min(near, key=lambda trial: (trial.hypothesis.cost, trial.left))
        equal = [
            trial for trial in near
            if trial is not best and trial.layers == best.layers
            and trial.left <= max(1.05 * best.left, 0.3 * noise)
        ]  # fmt: skip
        return best, equal if best.left < 0.3 * whole else []

    def _events(self, segment: Segment, x) -> list[int]:
        """How many response tokens precede the clearest changes of the difference's size."""
        found = self.left_by(self.own, segment, x)
        places = np.arange(found.shape[1])[None] - self.observation.num_prompt[:, None]
        kept = self.rows(segment) & (places >= 0)
        counts = range(places[kept].max(initial=0) + 1)
        sizes = [found[kept & (places == count)] for count in counts]
        levels = [np.log(each.mean() + 1e-30) if each.size else np.nan for each in sizes]
        changes = {
            count: abs(np.nanmean(levels[:count]) - np.nanmean(levels[count:]))
            * min(count, len(levels) - count) ** 0.5
            for count in counts[1:-1]
        }
        return sorted(changes, key=changes.get, reverse=True)[:2]

    def _paired(
        self, segment: Segment, x, first: _Trial | None, whole: float, noise: float
    ) -> list[_Trial] | None:
        """A second cause on top of the likeliest one, if both leave only rounding."""
        if first is None or not first.left < 0.9 * whole:
            return None
        own = self.own

        def on(trial: _Trial, work):
            self.own = trial.hypothesis.edit(own, trial.layers, trial.value)
            try:
                return work()
            finally:
                self.own = own

        second, _ = on(first, lambda: self._searched(segment, x, first.left, noise))
        if second is None or not second.left < 0.5 * first.left:
            return None
        hypothesis, layers = first.hypothesis, first.layers
        first = on(second, lambda: self._tried(hypothesis, segment, x, layers)) or first
        left = min(first.left, second.left)
        return [first, second] if left <= noise else None

    def _several(self, segment: Segment, x, noise: float) -> _Trial | None:
        """Several tensors of one layer from one earlier version, if they explain the segment."""
        layers = self._decoder_layers(segment)
        single = [
            hypothesis
            for hypothesis in hypotheses(self.known, segment.first, segment.last)
            if hypothesis.kind in ("stale", "adapter") and len(hypothesis.tensors) == 1
            and hypothesis.of_layers and self._is_possible(hypothesis, layers)
        ]  # fmt: skip
        for label in dict.fromkeys(each.what.partition("|")[2] for each in single):
            rest = [each for each in single if each.what.partition("|")[2] == label]
            chosen: list[Hypothesis] = []
            left = self.left(self.own, segment, x)
            while rest and left > noise:
                tried = []
                for each in rest:
                    edit = _together([*chosen, each])
                    computation = edit(self.own, layers, 0.0)
                    found = np.inf if computation is None else self.left(computation, segment, x)
                    tried.append((found, rest.index(each)))
                least, place = min(tried)
                if not least < left:
                    break
                left = least
                chosen.append(rest.pop(place))
            if chosen and left <= noise:
                names = sorted(each.what.partition("|")[0] for each in chosen)
                what = f"each of {', '.join(names)}|{label}"
                joined = chosen[0]._replace(what=what, edit=_together(chosen))
                return _Trial(joined, layers, 0.0, left)
        return None

    def _is_possible(self, hypothesis: Hypothesis, layers: Sequence[int]) -> bool:
        """Whether the checksums of the engine's tensors allow it."""
        if self.weights is None or not hypothesis.tensors:
            return True
        names = {f"{layer}/{name}" for layer in layers for name in hypothesis.tensors}
        names |= set(hypothesis.tensors)
        return any(name in self.weights.differing or name in self.weights.unknown for name in names)

    def _tried(
        self, hypothesis: Hypothesis, segment: Segment, x, layers, grid: Sequence[float] = ()
    ) -> _Trial | None:
        """A hypothesis with the value that leaves the least difference; None: it has none here."""

        def left(value):
            computation = hypothesis.edit(self.own, layers, value)
            return None if computation is None else self.left(computation, segment, x)

        values = grid or hypothesis.grid or (hypothesis.neutral,)
        found = [(left(value), value) for value in values]
        found = [pair for pair in found if pair[0] is not None]
        if not found:
            return None
        best, value = min(found)
        if len(hypothesis.grid) > 1 and not grid:
            best, value = self._fitted(hypothesis, segment, x, layers, best, value)
        return _Trial(hypothesis, layers, value, best)

    def _fitted(self, hypothesis, segment, x, layers, best, value) -> tuple[float, float]:
        """Gauss-Newton steps from the best value of the grid, then the nearest simple number."""
        rows = self.rows(segment)
        norms = None if segment.last > self.config.num_layers else self.norms[segment.last]

        def vector(point):
            number = float(np.exp(point)) if hypothesis.logarithmic else point
            computation = hypothesis.edit(self.own, layers, number) or self.own
            found = np.asarray(self.computed(computation, segment, x), np.float64)
            found = found - self.given(segment)
            if norms is not None:
                found = found / norms[:, :, None]
            return found[rows].ravel()

        point = float(np.log(value)) if hypothesis.logarithmic else value
        length = 0.5 if hypothesis.logarithmic else 0.05
        for _ in range(STEPS):
            here = vector(point)
            slope = (vector(point + length) - here) / length
            size = slope @ slope
            if not np.isfinite(size) or size == 0.0:
                break
            step = float(np.clip(-(slope @ here) / size, -1.0, 1.0))
            there = vector(point + step)
            if not there @ there < here @ here:
                length /= 8
                continue
            point, length = point + step, min(max(abs(step) / 4, 1e-3), length)
        number = float(np.exp(point)) if hypothesis.logarithmic else point

        def left(number):
            return self.left(hypothesis.edit(self.own, layers, number) or self.own, segment, x)

        best, value = min((best, value), (left(number), number))
        simpler = [float(f"{value:.{digits}g}") for digits in (1, 2, 3, 4)]
        if abs(value) < 0.1 and not hypothesis.logarithmic:
            simpler.insert(0, 0.0)
        for simple in simpler:
            if simple == value:
                continue
            again = left(simple)
            if again <= max(1.05 * best, 0.5 * self.noise(segment, x)):
                return again, simple
        return best, value

    def _finding(self, entries: Sequence[tuple[_Trial, float]], equal: Sequence[_Trial]) -> Finding:
        """The finding of trials of one hypothesis in several segments.

        Of hypotheses that are equal in effect, a change of the pass is likelier in all layers, and
        one of a tensor in some of them.
        """
        trial = entries[0][0]
        layers = tuple(sorted({layer for each, _ in entries for layer in each.layers}))
        is_whole = 1 < len(layers) == self.config.num_layers
        others = sorted(
            (each for each in (trial, *equal) if each.hypothesis.of_layers),
            key=lambda each: (bool(each.hypothesis.tensors) == is_whole, each.hypothesis.cost),
        )
        if trial.hypothesis.of_layers and equal:
            trial, *equal = others
        hypothesis, value = trial.hypothesis, trial.value
        kind, what = hypothesis.kind, hypothesis.what
        if hypothesis.of_layers:  # a change may not concern all of them, such as one of a window
            edited = hypothesis.edit(self.own, layers, value) or self.own
            pairs = zip(edited.layers, self.own.layers)
            differs = {index for index, (one, other) in enumerate(pairs) if one is not other}
            layers = tuple(layer for layer in layers if layer in differs) or layers
        shown = value if hypothesis.grid else None
        if kind == "tensor_scaled" and value == 0.0:
            kind, shown = "tensor_missing", None
        if kind in ("stale", "stale_cache"):
            shown = None
        if kind == "window" and value > 1e5:
            shown = "unlimited"
        if kind in ("layer_order", "tensor_of_other_layer", "ids_shifted", "positions"):
            shown = shown if shown is None else str(round(shown))
        if kind == "adapter":
            what = what.partition("|")[0]
        names = tuple(dict.fromkeys(_name(other) for other in equal))
        names = tuple(name for name in names if name != _name(trial))[:6]
        explained = min(1.0, *(share for _, share in entries))
        return Finding(kind, what, layers if hypothesis.of_layers else (), shown, explained, names)

    def _by_elimination(self, segment: Segment) -> Finding:
        """What differs where no hypothesis explains it."""
        count = self.config.num_layers
        if segment.last == 0:
            rows = self.rows(segment)
            found = self.left_by(self.own, segment, None)
            limit = self.limit * self.noise(segment, None)
            ids = sorted(set(self.observation.ids[rows & (found > limit)].tolist()))
            shown = ", ".join(map(str, ids[:5])) + (" and more" if len(ids) > 5 else "")
            return Finding("embedding", "differs", (), "", 1.0, (), f"at token ids {shown}")
        if segment.first == count:
            return Finding("head", "is another one", (), None, 1.0)
        return Finding("unknown", "", self._decoder_layers(segment), None, 0.0)

    def _freed(self, segment: Segment, x, whole: float, rounding: float) -> Finding | None:
        """What must be another one in a layer, by fits to three of four tokens.

        It explains the other tokens. The fewest numbers that explain all are the best explanation.
        """
        layers = self._decoder_layers(segment)
        if len(layers) != 1 or segment.last > self.config.num_layers or segment.first < 0:
            return None
        (index,), rows = layers, self.rows(segment)
        fitted_rows = rows & (np.arange(rows.shape[1]) % 4 != 0)
        own = self.own.layers[index]
        free = {name: value for name, value in own.free().items() if value.size <= MOST_FREE}
        places = {name: (name,) for name in free}
        for what, names in groups_of(own.tensors()).items():
            if what not in ("every kernel", "every norm") and set(names) <= set(free):
                places[what] = names

        def rank(what):  # an engine has scales of outputs rather than of inputs
            return sum(free[name].size for name in places[what]), what.endswith(" by input")

        found: list[tuple[float, str, dict[str, Array]]] = []
        for what in sorted(places, key=rank):
            good = [name for left, name, _ in found if left <= self.limit * rounding]
            if good and rank(what)[0] > rank(good[0])[0]:
                break
            names = tuple(name.partition(" by ")[0] for name in places[what])
            possible = Hypothesis("tensor", what, None, True, tensors=names)
            if what != "frequencies" and not self._is_possible(possible, (index,)):
                continue
            fitted = self._fitted_free(segment, x, index, free, places[what], fitted_rows)
            left = self.left_by(self.own.with_layer(index, own.with_free(fitted)), segment, x)
            found.append((_rms(left[rows & ~fitted_rows]), what, fitted))
        if not found:
            return None
        equal = [each for each in found if each[0] <= self.limit * rounding]
        near = max(1.25 * min(left for left, *_ in found), self.limit * rounding)
        left, what, fitted = min(
            (each for each in found if each[0] <= near), key=lambda each: (rank(each[1]), each[0])
        )
        others = tuple(name.replace("/", " ") for _, name, _ in equal if name != what)
        explained = _share(left, whole, rounding)
        # A tensor with more inputs than tokens is explained in part, and all others nearly nothing.
        others_left = [each[0] for each in found if not set(places[what]) & set(places[each[1]])]
        second = _share(min(others_left, default=whole), whole, rounding)
        is_part = " by " not in what and explained > max(0.4, 2 * second)
        if not (explained > 0.75 or is_part):
            return None
        if what not in free:
            return Finding("tensor", what, (index,), None, explained, others)
        before, after = (np.asarray(values[what]) for values in (free, fitted))
        finding = _of_free(self.config, what, index, before, after, explained)
        return dataclasses.replace(finding, alternatives=others)

    def _fitted_free(self, segment, x, index, free, names, rows) -> dict[str, Array]:
        """Least squares of the relative differences at some tokens, by Gauss-Newton."""
        norms = self.norms[segment.last][:, :, None]
        weight = jnp.asarray(np.where(rows[:, :, None], 1.0 / norms, 0.0), jnp.float32)
        target = jnp.asarray(np.nan_to_num(self.given(segment)))
        layer, final = self.exact.layers[index], None
        if segment.last == self.config.num_layers:
            final = self.exact.final_scale, self.exact.final_epsilon
        how = layer.how._replace(has_slopes=True)
        moves = {name: float(name in names) for name in free}
        for _ in range(FREE_STEPS):
            moved, before, after = _free_step(
                how, layer._replace(how=None), free, moves, jnp.asarray(x), target, weight, final
            )
            if not after < before:
                break
            free = moved
            if after > 0.9 * before:
                break
        return free


@functools.partial(jax.jit, static_argnums=0)
def _free_step(how, layer, free, moves, x, target, weight, final):
    """A Gauss-Newton step of the entries of `Layer.free` with `moves` 1, and not of those with 0.

    Returns them, and the sums of squares before and after. One program serves all entries.
    """

    def moved(step, share=1.0):
        return jax.tree.map(lambda x, change, moves: x + moves * share * change, free, step, moves)

    def error(step):
        y = layer._replace(how=how).with_free(moved(step))(x)
        if final is not None:
            y = normed(y, *final, how.offset_norms, how.dtype)
        return (y - target) * weight

    start = jax.tree.map(jnp.zeros_like, free)
    here, forward = jax.linearize(error, start)
    backward = jax.linear_transpose(forward, start)
    gradient = jax.tree.map(jnp.negative, backward(here)[0])
    step, _ = jax.scipy.sparse.linalg.cg(
        lambda step: backward(forward(step))[0], gradient, maxiter=NUM_DIRECTIONS
    )
    shares = jnp.array([1.0, 0.5, 0.2, 0.05])

    def left_by(share):
        return jnp.sum(error(jax.tree.map(lambda change: share * change, step)) ** 2)

    left = jax.lax.map(left_by, shares)
    best = jnp.argmin(left)
    return moved(step, shares[best]), jnp.sum(here**2), left[best]


def _of_free(config, name: str, layer: int, given, fitted, explained: float) -> Finding:
    """The finding of an entry of `Layer.free` that explains a difference."""
    tensor, _, by = name.partition(" by ")
    what = tensor.replace("/", " ")
    change = fitted - given
    few = np.flatnonzero(np.abs(change) > 0.2 * np.abs(change).max()) if change.ndim == 1 else ()
    if name == "frequencies":
        ratios = fitted / given
        shown = f"{number(float(ratios.min()))} to {number(float(ratios.max()))}"
        return Finding("rope_scaling", "multiplied by ", (layer,), shown, explained)
    if by:
        kept = fitted[few] if len(few) <= max(len(fitted) // 2, 1) else fitted
        shown = f"{kept.min():.3g} to {kept.max():.3g}, by {by}"
        if np.ptp(kept) < 0.05 * np.abs(kept).max() or np.abs(kept).max() < 0.01:
            shown = f"{kept.mean():.4g}"
        if len(kept) < len(fitted):
            shown += f" in {by}s {', '.join(map(str, few[:8].tolist()))}"
        return Finding("tensor_scaled", what, (layer,), shown, explained)
    return Finding(
        "tensor", what, (layer,), None, explained, (), _change(config, name, given, fitted)
    )


def _together(chosen: Sequence[Hypothesis]):
    """The edit of several hypotheses, one after the other."""

    def edit(computation, layers, value):
        for each in chosen:
            computation = each.edit(computation, layers, value) or computation
        return computation

    return edit


def _share(left: float, whole: float, rounding: float) -> float:
    """The share of a difference that is explained, without its rounding."""
    if not np.isfinite(left):
        return 0.0
    return 1.0 - min(max(left**2 - rounding**2, 0.0) / max(whole**2 - rounding**2, 1e-30), 1.0)


def _name(trial: _Trial) -> str:
    what = trial.hypothesis.what.partition("|")[0] or trial.hypothesis.kind.replace("_", " ")
    return f"{what} ({number(trial.value)})" if trial.hypothesis.grid else what


def _change(config, name: str, tensor: np.ndarray, fitted: np.ndarray) -> str:
    """Which part of a tensor differs, and how."""
    change = fitted - tensor
    size = float(np.sum(change**2))
    if not size:
        return ""
    parts = [f"relative change {np.linalg.norm(change) / np.linalg.norm(tensor):.2g}"]
    module = name.split("/")[0]
    axis = {"query": -1, "key": -1, "value": -1, "output": 0}.get(module)
    if axis is not None and change.shape[axis] % config.head_dim == 0:
        heads = np.moveaxis(change, axis, 0).reshape(change.shape[axis] // config.head_dim, -1)
        of_heads = np.sum(heads**2, axis=1) / size
        order = np.argsort(of_heads)[::-1]
        few = order[: max(len(order) // 2, 1)]
        count = int(np.searchsorted(np.cumsum(of_heads[order]), 0.9)) + 1
        if len(order) > 1 and count <= len(few):
            parts.append(f"in heads {', '.join(map(str, sorted(order[:count].tolist())))}")
    flat = np.sort(np.abs(change).ravel() ** 2)[::-1]
    if flat[0] > 0.8 * size:
        place = np.unravel_index(np.argmax(np.abs(change)), change.shape)
        parts.append(f"in the one entry {tuple(int(i) for i in place)}")
    return ", ".join(parts)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0
