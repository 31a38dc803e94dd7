"""How probes are found and combined; those of a run are seen in tests/runs."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax.cluster.peers import Peers
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.runs import validate
from semrl_jax.sampling.batch_scalars import metric_scalars
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import module_names
from semrl_jax.training.probes import (
    BUILT_IN,
    NOTHING,
    PassNeeds,
    Probe,
    Probes,
    Seen,
    Tools,
    load_probes,
)
from tests.cases import refused
from tests.fixtures import make_scored
from tests.tiny import tiny_config
from tests.training.test_packing import batch_of
from tests.training.test_plan import plan_of

KEY = MetricKey("length")


@dataclasses.dataclass
class Lengths(Probe):
    """Adds a metric before the update, and a scalar of it after."""

    every: int

    def needs(self, step):
        return PassNeeds(entropies=step % self.every == 0)

    def before(self, seen):
        lengths = [len(item.rollout.response_ids) for item in seen.scored]
        values = np.array(lengths, np.float32)
        return seen.with_metrics({KEY: Measurement(values, values > 0)})

    def after(self, seen):
        return {"response/longest": np.max(seen.scored.metrics[KEY].value)}


def probe(tools):
    """This file is a user's module."""
    return {"lengths": Lengths(2), "none": None, "text": "Lengths"}[tools.config.metrics.names[0]]


def loaded(config, name="lengths"):
    config.metrics.names = (name,)
    config.metrics.probes = (__name__,)
    return load_probes(Tools(config, plan_of(config), Peers(), None, None))


SEEN = Seen(0, Scored([make_scored(i) for i in range(4)]), batch_of([(3, 2)] * 4))


def test_every_module_of_the_package_is_a_probe():
    assert set(BUILT_IN) == set(module_names("semrl_jax.training.probes"))


def test_probes_add_needs_metrics_and_scalars():
    probes = Probes([(sys.modules[__name__], Lengths(every)) for every in (2, 3)])
    needed = [probes.needs(step) for step in range(4)]
    assert [needs != NOTHING for needs in needed] == [True, False, True, True]
    assert needed[0] == PassNeeds(entropies=True)
    seen = probes.before(SEEN.with_scalars({"metrics/own": 1.0}))
    assert seen.scored.metrics[KEY].value.tolist() == [2.0] * 4
    scalars = probes.after(seen)
    assert scalars == {"metrics/own": 1.0, "response/longest": 2.0}
    assert type(scalars["response/longest"]) is float


def test_mistakes_in_a_users_probe_are_named(config):
    loaded(config, "none")
    refused(r"probe\(tools\) must return a .*Probe or None, not str", loaded, config, "text")
    refused(r"probes: probe of .*test_probes failed .KeyError", loaded, config, "other")
    probes = loaded(config)
    with pytest.raises(UserError, match=r"metrics.probes: before of .*test_probes failed"):
        probes.before(SEEN._replace(scored=[None]))
    config = tiny_config()
    for name, reason in (("tests.nothing", "cannot be imported"), ("tests.tiny", "has no 'probe'")):
        config.metrics.probes = (name,)
        refused(f"metrics.probes='{name}'.*{reason}", validate, config)


def test_the_shaping_uses_what_a_users_probe_declares(monkeypatch):
    module = sys.modules[__name__]
    config = tiny_config()
    config.metrics.probes = (__name__,)
    config.shaping.guidance = "length"
    refused(r"shaping uses 'length', which is unknown.*INDICATORS", validate, config)
    monkeypatch.setattr(module, "INDICATORS", ("length",), raising=False)
    validate(config)
    assert Probes([(module, Lengths(2))]).before(SEEN).scored.metrics[KEY].value.tolist() == [2] * 4
    with pytest.raises(UserError, match="INDICATORS has 'length', but `before` gives no such"):
        Probes([(module, Probe())]).before(SEEN)


def test_log_probabilities_are_those_of_the_pass_or_else_of_the_update():
    ours = np.zeros((4, 2), np.float32)
    trained = np.arange(4)[:, None] < np.array([2, 2])
    seen = SEEN
    assert seen.updated(None, trained).logprobs is None
    after = seen.updated(ours, trained)
    assert after.logprobs is ours
    np.testing.assert_array_equal(after.counted, trained)
    passed = seen._replace(logprobs=ours + 1, counted=~trained)
    assert passed.updated(ours, trained) is passed


def test_columns_are_what_numpy_makes_arrays_of():
    for values, valid in (
        ([1, 2, 3, 4], [1, 0, 1, 1]),
        (jnp.arange(1, 5), jnp.array([True, False, True, True])),
    ):
        found = SEEN.with_metrics({KEY: Measurement(values, valid)}).scored
        scalars = metric_scalars(found)
        assert scalars["metrics/length/mean"] == pytest.approx(8 / 3)
        assert scalars["metrics/length/valid_fraction"] == 0.75
        assert [type(column) for column in found.metrics[KEY]] == [np.ndarray] * 2


@pytest.mark.parametrize("shape", [(3,), (), (4, 1)])
def test_a_column_of_another_shape_names_the_probe(shape):
    class Wrong(Probe):
        def before(self, seen):
            return seen.with_metrics({KEY: Measurement(np.ones(shape), np.ones(shape, bool))})

    probes = Probes([(sys.modules[__name__], Wrong())])
    refused(r"before of .*test_probes failed .ValueError: .*'length'", probes.before, SEEN)
