"""A user's metric that is wrong is refused in one line before training."""

import sys
import types

import jax.numpy as jnp
import pytest

from semrl_jax.metrics import Metric
from semrl_jax.metrics.batch import check_users_metrics
from semrl_jax.metrics.metric import load_metric
from semrl_jax.metrics.names import check_metrics
from semrl_jax.support.errors import UserError


def of_states(value):
    return Metric(min_tokens=1, of_states=lambda rows: lambda num_rows: value)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (of_states(jnp.zeros(3)), "."),
        (Metric(min_tokens=1, of_states=lambda: 1), "TypeError"),
        (Metric(min_tokens=1, of_spectrum=lambda sigma: sigma), "TypeError"),
        (of_states(jnp.float32(1)), ""),
    ],
)
def test_a_wrong_metric_is_refused(metric, message, monkeypatch):
    module = types.ModuleType("users.metric")
    module.METRIC = metric
    monkeypatch.setitem(sys.modules, "users", types.ModuleType("users"))
    monkeypatch.setitem(sys.modules, "users.metric", module)
    load_metric.cache_clear()
    if not message:
        return check_users_metrics(("effective_rank", "users.metric"), 8, stride=4)
    with pytest.raises(
        UserError, match=f"metrics.names: METRIC of users.metric failed.*{message}"
    ) as e:
        check_users_metrics(("effective_rank", "users.metric"), 8, stride=4)
    assert "\n" not in str(e.value)


def test_the_name_of_a_token_indicator_is_taken():
    with pytest.raises(UserError, match="avg_log_probs is an indicator of the tokens"):
        check_metrics("metrics.names", ("mine.avg_log_probs",))
