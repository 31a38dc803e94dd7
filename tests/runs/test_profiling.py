"""Profiles of steps: which are recorded, and what is in the files."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from semrl_jax.runs import train
from semrl_jax.runs.lifecycle import profiled
from semrl_jax.support.clock import Clock
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")
work = jax.jit(lambda x: jnp.sin(x).sum())


def takes(steps, fail_in=None):
    for step in steps:
        with Clock()("update"):
            work(jnp.ones(64)).block_until_ready()
        if step == fail_in:
            raise RuntimeError("failed")
        yield step


def recorded(directory):
    """Step numbers and names in the only Perfetto file."""
    (file,) = directory.glob("plugins/profile/*/perfetto_trace.json.gz")
    assert list(file.parent.glob("*.xplane.pb")), "TensorBoard and XProf read this one"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {int(e["args"]["step_num"]) for e in events if "step_num" in e.get("args", {})}
    return steps, {event.get("name") for event in events}


@pytest.mark.parametrize(
    ("first_step", "steps", "expected"),
    [(0, range(1, 3), {1, 2}), (2, range(1, 4), {2, 3}), (0, range(4, 6), {4})],
    ids=["in the middle", "resumed inside", "ended inside"],
)
def test_only_the_named_steps_are_recorded(first_step, steps, expected, tmp_path):
    results = profiled(takes(range(first_step, 5)), first_step, steps, tmp_path)
    assert list(results) == list(range(first_step, 5))
    found, names = recorded(tmp_path)
    # A training that ends inside the range has a marker for the attempt to take one more step.
    assert found - {5} == expected
    assert {"step", "update"} <= names


def test_no_steps_record_nothing(tmp_path):
    assert list(profiled(takes(range(3)), 0, range(0), tmp_path)) == [0, 1, 2]
    assert not list(tmp_path.iterdir())


def test_a_step_that_fails_is_recorded(tmp_path):
    with pytest.raises(RuntimeError, match="failed"):
        list(profiled(takes(range(3), fail_in=1), 0, range(1, 3), tmp_path))
    assert recorded(tmp_path)[0] == {1}


@pytest.mark.slow
def test_a_run_writes_the_profile_of_its_phases(tmp_path):
    config = tiny_config()
    config.evaluation.every_steps = 0
    config.profile.steps = "1:2"
    assert train(config, str(tmp_path / "run")) == 0
    steps, names = recorded(tmp_path / "run" / "profile")
    assert steps == {1}
    assert {"sync_weights", "sample", "update"} <= names
