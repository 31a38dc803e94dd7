"""Metrics of the groups of a batch, from the mean hidden states of their responses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.metrics import Measurement, MetricKey, elliptical_novelty, lidar, log_determinant
from semrl_jax.metrics.names import FINAL_LAYER, GROUP_INDICATOR
from semrl_jax.sampling.scoring import Scored
from semrl_jax.training.probes import Probe, Seen, Tools

_novelty = jax.jit(elliptical_novelty)
_diversity = jax.jit(log_determinant)


def probe(tools: Tools) -> Probe | None:
    metrics = tools.config.metrics
    return Groups(tuple(metrics.of_groups), metrics.layers) if metrics.of_groups else None


@dataclasses.dataclass
class Groups(Probe):
    """The metrics that `metrics.of_groups` names."""

    names: Sequence[str]
    layers: Sequence[int]

    def before(self, seen: Seen) -> Seen:
        metrics, found = group_indicators(self.names, seen.scored, self.layers)
        scalars = {f"metrics/{name}": value for name, value in found.items()}
        return seen.with_metrics(metrics).with_scalars(scalars)


def group_indicators(
    names: Sequence[str], scored: Scored, layers: Sequence[int]
) -> tuple[dict[MetricKey, Measurement], dict[str, float]]:
    """Measures the groups in the final layer.

    The mean states are divided by their length for `elliptical_novelty` and `log_determinant`. For
    `lidar`, the groups are the classes.

    The batch is ordered by group; `layers` are those of its mean states. Given responses are left
    out.

    Returns the [B] `elliptical_novelty`, which is not valid in a group of one response or with a
    state that is not finite; and for the log `groups/log_determinant`, the mean over the groups,
    and `groups/lidar`, without those that do not exist.
    """
    if not names or not scored:
        return {}, {}
    states, mask = _by_group(scored, layers.index(FINAL_LAYER))
    exists = mask.copy()
    mask[exists] = [not item.rollout.is_given for item in scored]
    states = np.where(mask[..., None], states, 0.0)
    finite = np.isfinite(states).all(axis=(1, 2))
    lengths = np.linalg.norm(states, axis=-1, keepdims=True)
    unit = states / np.where(lengths > 0, lengths, 1.0)
    metrics, scalars = {}, {}
    if GROUP_INDICATOR in names:
        valid = mask & (finite & (mask.sum(axis=1) > 1))[:, None]
        novelties = np.stack([_novelty(rows, of) for rows, of in zip(unit, mask)])
        columns = np.where(valid, novelties, 0.0)[exists], valid[exists]
        metrics[MetricKey(GROUP_INDICATOR)] = Measurement(*columns)
    if "log_determinant" in names and finite.any():
        volumes = [_diversity(rows, of) for rows, of in zip(unit[finite], mask[finite])]
        scalars["groups/log_determinant"] = float(np.mean(volumes))
    if "lidar" in names and (rank := float(lidar(jnp.asarray(states), jnp.asarray(mask)))):
        scalars["groups/lidar"] = rank
    return metrics, scalars


def _by_group(
    scored: Scored, layer: int
) -> tuple[Float[np.ndarray, "G N D"], Bool[np.ndarray, "G N"]]:
    """The mean states of each group, zeros after its last response, and which of them exist."""
    groups = itertools.groupby(scored, key=lambda item: item.rollout.group_id)
    sizes = np.array([sum(1 for _ in group) for _, group in groups])
    mask = np.arange(sizes.max()) < sizes[:, None]
    states = np.zeros((*mask.shape, scored.mean_states.shape[-1]), np.float32)
    states[mask] = scored.mean_states[:, layer]
    return states, mask
