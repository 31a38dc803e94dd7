"""The cores of a process and of its children."""

import os
import subprocess
import sys

import pytest

from semrl_jax.support import cores
from tests.cases import refused


@pytest.fixture
def four(monkeypatch):
    """This process may use the cores 2, 3, 5 and 7; what it is bound to is recorded."""
    bound = []
    cores._first_cores.cache_clear()
    monkeypatch.setattr(cores, "_helper_cores", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 5, 3, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, found: bound.append(list(found)))
    yield bound
    cores._first_cores.cache_clear()


def test_the_trainer_and_its_children_share_no_core(four):
    cores.leave_cores(3, 1, in_turn=False)
    assert four == [[2]]
    assert [cores.cores_of_child(number, 1) for number in range(3)] == [(7,), (5,), (3,)]
    assert [cores.cores_of_child(number, 2) for number in range(1)] == [(5, 7)]
    assert cores.cores_of_child(0, 0) == ()
    assert cores.helper_cores() == (3, 5, 7)
    cores.leave_cores(3, 1, in_turn=True)
    assert cores.helper_cores() == (2, 3, 5, 7)


def test_without_a_number_nothing_is_bound(four):
    cores.leave_cores(3, 0, in_turn=False)
    assert four == [] and cores.helper_cores() == ()


@pytest.mark.parametrize("of", [(4, 1), (2, 2), (1, 9)])
def test_the_trainer_keeps_a_core(four, of):
    refused("leaves the trainer none of its 4", cores.leave_cores, *of, in_turn=False)


def test_a_system_without_binding_says_so(four, monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    refused(r"set rollout.jax_process_cores=0", cores.bind, [2])


def test_a_process_is_bound():
    own = min(os.sched_getaffinity(0))
    code = f"from semrl_jax.support import cores; cores.bind([{own}]); print(cores.usable_cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"
