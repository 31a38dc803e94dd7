"""Adapters for tests of engines, and a client that sends them as a run does."""

import itertools

import jax
import numpy as np

from semrl_jax import models
from tests.rollout.engines.responses import full_forward


def adapted(config, base, size, lora, seed=1):
    """The base with an adapter whose second matrices have numbers of this size."""
    random = np.random.default_rng(seed)
    own = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape, np.float32), lora.shapes(base)
    )
    for pair in own["layers"].values():
        pair["lora_a"] /= np.sqrt(pair["lora_a"].shape[1], dtype=np.float32)
        pair["lora_b"] *= np.float32(size)
    return models.adapted(own, lora.base(base))


class Sender:
    """A connected client, and the weights of a step as a run sends them."""

    def __init__(self, client, config, dtype="float32"):
        self.client, self.config, self.dtype = client, config, dtype
        self.num_whole = 0  # passes over a base

    def send(self, params, step, unmerged=True):
        config, dtype = self.config, self.dtype
        specs = models.tensor_specs(config, dtype)
        if not unmerged:
            return self.client.sync_weights(
                specs, lambda: _of(models.iterate_hf_tensors(params, config, dtype)), step=step
            )
        adapter = models.adapter_of(params, config)

        def read():
            self.num_whole += 1
            base = models.iterate_base_tensors(params, config, dtype)
            return itertools.chain(_of(base), read_adapter())

        def read_adapter():
            return _of(models.iterate_adapter_tensors(params, config))

        return self.client.sync_weights(
            specs + adapter.specs(specs), read, step=step, adapter=adapter,
            read_adapter=read_adapter,
        )  # fmt: skip

    def sample(self, version, requests, sampling, **options):
        found = self.client.generate(requests, sampling, version=version, **options)
        return sorted(found, key=lambda each: each.sample_id)


def mismatch(config, rollouts, params, dtype):
    """The mean absolute difference of log-probabilities between engine and trainer."""
    found = full_forward(models.Policy(config, dtype), params, rollouts)
    differences = [np.abs(rollout.rollout_logprobs - own) for rollout, _, own in found]
    return float(np.concatenate(differences).mean())


def _of(tensors):
    return (array for _, array in tensors)
