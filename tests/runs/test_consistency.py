"""Processes with different settings or code are refused before a run, and exit in order."""

import concurrent.futures
import hashlib
import time

import pytest

from semrl_jax.cluster.peers import Peers
from semrl_jax.runs import lifecycle
from semrl_jax.runs.consistency import check_same, function_hash
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.tiny import tiny_config


def test_both_processes_report_a_refusal_and_neither_counts_as_lost(pair, monkeypatch, tmp_path):
    configs = tiny_config(), tiny_config()
    configs[1].training.learning_rate = 0.5
    place = {id(config): (peers, None) for config, peers in zip(configs, pair)}
    monkeypatch.setattr(lifecycle, "join_others", lambda config, *rest: place[id(config)])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(lifecycle.train, config, str(tmp_path / "run")) for config in configs]
        for call in calls:
            refused("learning_rate=0", call.result, timeout=60)
    deadline = time.monotonic() + 10
    # Each process sends "bye" before it disconnects, so the other does not count it as lost.
    while not all(link.left for peers in pair for link in peers._links.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (tmp_path / "run").exists()


def test_the_phase_timeout_must_exceed_the_call_timeout():
    config = tiny_config()
    config.distributed.update(coordinator="127.0.0.1:9", num_processes=2, process_id=1)
    assert config.distributed.phase_timeout_s > config.rollout.call_timeout_s  # the defaults
    config.rollout.call_timeout_s = config.distributed.phase_timeout_s
    refused("phase_timeout_s=10800 must be above", lifecycle.join_others, config, {})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("importlib.metadata.version", lambda name: "1.0", "version of sympy='1.0'"),
        ("platform.python_version", lambda: "3.0.0", "version of Python='3.0.0'"),
        ("code_hash", lambda: "f00", "code='f00'"),
        ("jax.local_device_count", lambda: 77, "devices='77 cpu'"),
    ],
)
def test_each_difference_is_named(name, value, told, monkeypatch):
    """The values of process 0 are gathered before the change, those of process 1 after it."""
    config = tiny_config()
    values = []

    class Two(Peers):
        def gather(self, phase, own):
            values.append(own)
            return [values[0], own]

    check_same(Two(), config)
    monkeypatch.setattr(f"semrl_jax.runs.consistency.{name}", value)
    with pytest.raises(UserError) as caught:
        check_same(Two(), config)
    *_, own = values
    assert told in [f"{key}={found!r}" for key, found in own.items()]
    key = told.split("=")[0]
    assert own[key] != values[0][key] and "process 0 has" in str(caught.value)


def test_the_module_of_a_reward_function_is_read_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "scores" / "deep.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").write_text("raise SystemExit('imported')")
    module.write_text("raise SystemExit('imported')")
    first = function_hash("scores.deep:score")
    assert first == hashlib.sha256(module.read_bytes()).hexdigest()
    module.write_text("def score(response, reference): return 1.0")
    assert function_hash("scores.deep:score") not in ("", first)
    assert function_hash("scores.missing:score") == function_hash("missing.deep:score") == ""
    assert function_hash("") == ""
