"""Metrics as they are declared, found, named and encoded."""

import json
import pathlib
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import metrics
from semrl_jax.metrics import Measurement, Metric, MetricKey
from semrl_jax.metrics.measurements import decode, encode
from semrl_jax.metrics.metric import load_metric
from semrl_jax.metrics.names import ORDERS, check_metrics
from tests.cases import refused
from tests.oracles import metrics as oracle

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "extending.md").read_text()
CODE = re.search(r"`my_package/mean_norm.py`.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]

OF_SPECTRUM = """
from semrl_jax.metrics import Metric

METRIC = Metric(of_spectrum=lambda sigma, scale, num_rows, width: sigma[0] * scale, min_tokens=2)
"""

keys = st.builds(
    MetricKey,
    st.sampled_from([*metrics.METRICS, "value", "norm_value", "layer"]),
    st.sampled_from(list(ORDERS)),
    st.integers(-1, 99),
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A directory for modules of the test."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users").mkdir()
    load_metric.cache_clear()
    yield tmp_path / "users"
    load_metric.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "users"]:
        del sys.modules[name]


@pytest.mark.parametrize("window", ["exact", pytest.param("later", marks=pytest.mark.slow)])
def test_a_users_metrics_are_measured_with_their_orders(package, window):
    (package / "mean_norm.py").write_text(CODE)
    (package / "largest.py").write_text(OF_SPECTRUM)
    oracles = {
        "mean_norm": lambda rows: np.linalg.norm(rows.astype(np.float64), axis=1).mean(),
        "largest": lambda rows: oracle.singular_values(rows)[0] if len(rows) > 1 else 0.0,
    }
    states = np.random.default_rng(0).normal(size=(3, 20, 6)).astype(np.float32) * 100
    mask = np.arange(20) < np.array([20, 11, 1])[:, None]
    found = metrics.hidden_state_metrics(
        states, mask, stride=4, window=window, names=("users.mean_norm", "users.largest")
    )
    assert found.keys() == {MetricKey(name, order) for name in oracles for order in ORDERS}
    for name, metric in oracles.items():
        for i, rows in enumerate(states[j][mask[j]] for j in range(3)):
            expected = metric(rows), *oracle.orders(oracle.series(metric, rows, 4, window))
            for order, value in zip(ORDERS, expected):
                measured = found[MetricKey(name, order)]
                enough = value is not None and (name, len(rows)) != ("largest", 1)
                assert measured.valid[i] == enough
                # Differences of values near 500.
                np.testing.assert_allclose(measured.value[i], value or 0.0, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    "code, message",
    [
        (None, "cannot be imported (ModuleNotFoundError"),
        ("METRIC = 3", "METRIC must be a semrl_jax.metrics.Metric"),
        ("", "has no 'METRIC'"),
        ("1 / 0", "ZeroDivisionError"),
        (
            "from semrl_jax.metrics import Metric\nMETRIC = Metric(min_tokens=2)",
            "takes one of of_spectrum and of_states",
        ),
    ],
)
def test_a_module_that_is_no_metric_is_refused_in_one_line(package, code, message):
    if code is not None:
        (package / "odd.py").write_text(code)
    assert message in refused(".", load_metric, "users.odd")


@pytest.mark.parametrize(
    "names, message",
    [
        (("luck",), "names has 'luck'; it may have"),
        (("my-package.norm",), "names has 'my-package.norm'"),
        ((3,), "names has 3"),
        (("curvature", "mine.curvature"), "has 'curvature' twice"),
        (("mine.norm_velocity",), "must not end with one of"),
        (("mine.norm_valid",), "must not end with one of"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_loaded(names, message):
    assert message in refused(".", check_metrics, "names", names)
    assert check_metrics("names", ["curvature", "a.b_1"]) == ("curvature", "a.b_1")


@pytest.mark.parametrize("name", metrics.METRICS)
def test_every_metric_of_the_package_is_a_function_too(name):
    assert isinstance(load_metric(name), Metric)
    assert callable(getattr(metrics, name))


@given(keys)
def test_a_label_parses_to_its_key(key):
    assert MetricKey.parse(key.label) == key
    assert key.label.startswith("layer_") == (key.layer != -1)


def test_labels_by_hand():
    assert MetricKey("curvature").label == "curvature"
    assert MetricKey("curvature", "velocity").label == "curvature_velocity"
    assert MetricKey("curvature", "acceleration", 3).label == "layer_3/curvature_acceleration"
    assert MetricKey("curvature").dataset_label == "global/curvature"
    key = MetricKey("curvature", "velocity", 3)
    assert key.dataset_label == "layer_3/cumulative/curvature_velocity"
    for odd in ("", "\n", "layer_9999999/curvature"):
        assert MetricKey.parse(odd).layer == -1


@given(st.dictionaries(keys, st.builds(Measurement, st.floats(allow_nan=False), st.booleans())))
def test_decode_inverts_encode(found):
    scalars = encode(found)
    assert list(scalars) == sorted(scalars) and len(scalars) == 2 * len(found)
    assert all(type(value) is float for value in scalars.values())
    assert decode(json.loads(json.dumps(scalars))) == found
