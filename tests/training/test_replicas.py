"""What a replica says of itself, beside what a run is going to ask it for."""

import dataclasses

import pytest

from semrl_jax.errors import UserError
from semrl_jax.rollout.engines.fake import FakeEngine
from semrl_jax.training import replicas


def test_a_replica_that_cannot_measure_is_refused_before_training(config):
    """As one of an earlier release, which says nothing of metrics and would send none."""
    old = dataclasses.replace(FakeEngine(max_prompts=64, max_response_tokens=64).describe())
    assert old.metric_kinds == ()
    replicas._check_limits(old, config)
    config.metrics.placement = "rollout"
    with pytest.raises(UserError, match=r"measures \[\], but metrics.names has 'effective_rank'"):
        replicas._check_limits(old, config)
    config.metrics.names = ("effective_rank", "curvature")
    able = dataclasses.replace(old, metric_kinds=("curvature", "effective_rank"))
    replicas._check_limits(able, config)
    partly = dataclasses.replace(old, metric_kinds=("effective_rank",))
    with pytest.raises(UserError, match="has 'curvature'; start the replica from this") as caught:
        replicas._check_limits(partly, config)
    assert "\n" not in str(caught.value)
