"""The system's own path over recorded rollouts, from a saved directory to new parameters."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from semrl_jax import models
from semrl_jax.algorithms import broadcast_to_tokens, group_relative_advantages
from semrl_jax.algorithms.algorithm import Passes, load_algorithm
from semrl_jax.algorithms.credit import Memory, assign_credit
from semrl_jax.cluster.peers import Peers
from semrl_jax.metrics import flatten
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.rewards import Verdict
from semrl_jax.runs.setup import optimizer_of
from semrl_jax.sampling.batch_rewards import group_rewards
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.shaping import ShapingState, compute_signal, init_shaping_state
from semrl_jax.training.learner import Critic, Learner
from semrl_jax.training.packing import row_plan
from semrl_jax.training.passes import PassPlan, credit_rules
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.rollout_batch import credited_tokens, pad_batch
from semrl_jax.types import Rollout, RolloutBatch
from tests.parity.models import EOS, PAD
from tests.training.updates import update_policy

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Model:
    """A policy and its reference, both read from directories that transformers saved."""

    policy: models.Policy
    params: models.Params
    reference: models.Params

    @classmethod
    def load(cls, directory: pathlib.Path, reference: pathlib.Path) -> Model:
        architecture = models.load_config(directory)
        return cls(
            models.Policy(architecture),
            models.load_params(directory, architecture),
            models.load_params(reference, architecture),
        )

    def tensors(self, params: models.Params) -> Tensors:
        """Parameters, or anything shaped like them, under their transformers names."""
        pairs = models.iterate_hf_tensors(params, self.policy.config, "float32")
        return {spec.name: array for spec, array in pairs}


def learner(config, model: Model, reference=None, critic: Critic | None = None) -> Learner:
    """The learner of a run of one process, on one device."""
    algorithm = load_algorithm(config.algorithms.to_dict())
    return Learner(
        config=config,
        algorithm=algorithm,
        plan=PassPlan.of(algorithm, config),
        policy=model.policy,
        mesh=models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1]),
        reference=reference,
        optimizer=optimizer_of(config, "training"),
        pad_token_id=0,
        peers=Peers(),
        device_lock=threading.Lock(),
        critic=critic,
    )


def read_rollouts(file: pathlib.Path, group_size: int) -> Scored:
    """The recorded rollouts with their recorded rewards as verdicts."""
    recorded = np.load(file)

    def ragged(name: str, lengths: str) -> Sequence[np.ndarray]:
        return np.split(recorded[name], np.cumsum(recorded[lengths])[:-1])

    scored = []
    for index, (prompt, response, logprobs, reward) in enumerate(
        zip(
            ragged("prompt_ids", "prompt_lengths"),
            ragged("response_ids", "response_lengths"),
            ragged("rollout_logprobs", "response_lengths"),
            recorded["rewards"],
        )
    ):
        group, sample = divmod(index, group_size)
        rollout = Rollout(
            sample_id=f"{group}/{sample}",
            group_id=group,
            sample_index=sample,
            prompt_ids=prompt,
            response_ids=response,
            rollout_logprobs=logprobs,
            rollout_raw_logprobs=None,
            finish_reason="eos" if response[-1] == EOS else "length",
            versions=(),
        )
        verdict = Verdict(float(reward), bool(reward == 1), True, None)
        scored.append(ScoredRollout(rollout, "", "", verdict))
    return Scored(scored)


def shaping_state(
    config: ml_collections.ConfigDict, baselines: Sequence[float] | None
) -> ShapingState:
    """Baselines after some steps, in the order of `shaping.indicators`; None: before the first."""
    state = init_shaping_state(config.shaping.indicators, guidance=config.shaping.guidance)
    if baselines is None:
        return state
    return state._replace(
        baseline=jnp.asarray(baselines, jnp.float32),
        baseline_set=jnp.ones(len(baselines), bool),
        num_updates=jnp.int32(3),
    )


@functools.cache
def cached_measurer(**options) -> Measurer:
    """The same object for the same options, so that the metrics compile once for them."""
    return Measurer(**options)


def measured(
    scored: Scored, states: Sequence[np.ndarray], config: ml_collections.ConfigDict
) -> Scored:
    """Metrics of each response's own states, through the trainer's threads."""
    measurer = cached_measurer(
        max_tokens=config.rollout.max_response_tokens,
        num_threads=config.metrics.num_threads,
        stride=config.metrics.stride,
        window=config.metrics.window,
        method=config.metrics.method,
        names=tuple(config.metrics.names),
    )
    pending = [measurer.submit(rows) for rows in states]
    measurer.flush()
    return scored.with_measured([future.result() for future in pending])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What one update takes, and every intermediate on the way to it by name.

    Of tokens, `found` holds those of all responses in a row, without padding.
    """

    batch: RolloutBatch
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    shaped: jax.Array
    found: dict[str, np.ndarray]


def prepare(
    model: Model,
    scored: Scored,
    baselines: Sequence[float] | None,
    config: ml_collections.ConfigDict,
    old_shift: Sequence[np.ndarray] | None = None,
) -> Prepared:
    """Everything before the update, in the order of the train loop."""
    rewards = group_rewards(scored, config, 0)
    batch = pad_batch(
        [item.rollout for item in scored],
        pad_token_id=PAD,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    mask = batch.response_mask
    options = pass_options(model, config)
    params, reference = jax.device_put((model.params, model.reference))
    old_logprobs, _, own = batch_logprobs(params, batch, **options, with_states=True)
    states = [own[index] for index in range(len(scored))]
    ref_logprobs = batch_logprobs(reference, batch, **options).logprobs
    metrics = measured(scored, states, config).metrics
    state = shaping_state(config, baselines)
    epsilon = config.algorithms.advantage.epsilon
    plain = group_relative_advantages(jnp.asarray(rewards), epsilon=epsilon)
    plain = plain.reshape(-1)
    signal = compute_signal(jax.device_put(metrics), state, **config.shaping)
    algorithm = load_algorithm(config.algorithms.to_dict())
    credit = assign_credit(
        credit_rules(algorithm, config, PassPlan.of(algorithm, config)),
        rewards,
        metrics,
        Passes(old_logprobs, ref_logprobs),
        credited_tokens(batch, scored),
        Memory(state, {}),
    )
    shaped = credit.advantages
    found = flatten(metrics) | {
        "old_logprobs": old_logprobs[mask],
        "ref_logprobs": ref_logprobs[mask],
        "states": np.concatenate(states),
        "advantages": np.asarray(plain),
        "deviations": np.asarray(signal.deviations).T,
        "beta": np.asarray(signal.beta),
        "phi": np.asarray(signal.phi),
        "bonus": np.asarray(shaped - broadcast_to_tokens(plain, jnp.asarray(mask)))[mask],
        "mean_bonus": np.float32(credit.scalars["shaping/bonus/mean"]),
        "shaped_advantages": np.asarray(shaped)[mask],
        "baselines": np.asarray(credit.memory.shaping.baseline),
    }
    if old_shift is not None:
        shift = np.zeros(mask.shape, np.float32)
        shift[mask] = np.concatenate(old_shift)
        old_logprobs = old_logprobs + shift
    return Prepared(batch, old_logprobs, ref_logprobs, shaped, found)


def update(
    model: Model, prepared: Prepared, config: ml_collections.ConfigDict
) -> dict[str, np.ndarray | Tensors]:
    """The optimiser steps on mini-batches of whole groups, `<name>/<index>` of each."""
    params = jax.device_put(model.params)
    optimizer = optimizer_of(config, "training")
    opt_state = optimizer.init(params)
    size = config.training.prompts_per_minibatch * config.rollout.group_size
    found: dict[str, np.ndarray | Tensors] = {}
    for index, first in enumerate(range(0, len(prepared.old_logprobs), size)):
        rows = jax.tree.map(
            lambda leaf: leaf[first : first + size],  # noqa: B023
            (
                prepared.batch,
                prepared.old_logprobs,
                prepared.ref_logprobs,
                np.asarray(prepared.shaped),
            ),
        )
        params, opt_state, scalars, _ = update_policy(
            params,
            opt_state,
            *rows,
            **pass_options(model, config),
            optimizer=optimizer,
            algorithm=load_algorithm(config.algorithms.to_dict()),
        )
        assert not scalars["policy/update_skipped"]
        for name in ("loss", "pg_loss", "entropy", "kl", "clip_fraction", "approx_kl", "grad_norm"):
            found[f"{name}/{index}"] = np.asarray(scalars[f"policy/{name}"])
        for name in ("mu", "nu"):
            found[f"{name}/{index}"] = model.tensors(optax.tree.get(opt_state, name))
    start, after = model.tensors(model.params), model.tensors(params)
    return found | {"changes": {name: after[name] - start[name] for name in start}}


def pass_options(model: Model, config: ml_collections.ConfigDict) -> dict:
    """What every pass over the batch takes."""
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    return {
        "policy": model.policy,
        "temperature": config.rollout.temperature,
        "plan": row_plan(mesh, config.training),
    }
