"""Pure advantage estimators, policy losses and KL estimators."""

from semrl_jax.algorithms.gae import generalized_advantages, whiten
from semrl_jax.algorithms.groups import (
    broadcast_to_tokens,
    group_relative_advantages,
    zero_variance_group_fraction,
)
from semrl_jax.algorithms.importance import check_importance, importance_weights
from semrl_jax.algorithms.kl import kl_estimate, penalised_rewards, update_kl_coefficient
from semrl_jax.algorithms.losses import policy_loss, token_weights, weighted_sum
from semrl_jax.algorithms.surrogates import SURROGATES, Bounds, sum_over_sequences
from semrl_jax.algorithms.values import explained_variance, value_loss
from semrl_jax.support.choices import AGGREGATIONS, IMPORTANCE_LEVELS, KL_ESTIMATORS

__all__ = [
    "AGGREGATIONS",
    "IMPORTANCE_LEVELS",
    "KL_ESTIMATORS",
    "SURROGATES",
    "Bounds",
    "broadcast_to_tokens",
    "check_importance",
    "explained_variance",
    "generalized_advantages",
    "group_relative_advantages",
    "importance_weights",
    "kl_estimate",
    "penalised_rewards",
    "policy_loss",
    "sum_over_sequences",
    "token_weights",
    "update_kl_coefficient",
    "value_loss",
    "weighted_sum",
    "whiten",
    "zero_variance_group_fraction",
]
