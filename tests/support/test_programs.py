"""Programs in threads: compiled once, one per core of a CPU, results in the order of the calls."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from semrl_jax.support import programs
from semrl_jax.support.programs import compiled_once, num_side_by_side, side_by_side
from tests.cases import raised
from tests.training.test_packing import mesh_of


def counting():
    """A jitted function that threads would trace together, and the shapes it was traced for."""
    traced = []

    @compiled_once
    @functools.partial(jax.jit, static_argnames="scale")
    def program(x, *, scale=1):
        traced.append((x.shape, scale))
        time.sleep(0.05)  # longer than the threads take to start
        return scale * x

    return program, traced


def test_threads_share_one_compilation():
    program, traced = counting()
    found = side_by_side(program, [(np.full(3, k, np.float32),) for k in range(4)])
    assert traced == [((3,), 1)]
    np.testing.assert_array_equal(found, [[k] * 3 for k in range(4)])
    program(jnp.ones(2))
    program(jnp.ones(2), scale=2)
    program(np.ones(2, np.float32), scale=2)
    assert traced == [((3,), 1), ((2,), 1), ((2,), 2)]


def test_other_shapes_do_not_wait():
    both = threading.Barrier(2, timeout=20)

    @compiled_once
    @jax.jit
    def program(x):
        both.wait()  # each is traced while the other is
        return x

    found = side_by_side(program, [(np.ones(1),), (np.ones(2),)])
    assert [len(x) for x in found] == [1, 2]


def test_a_failed_compilation_is_tried_again():
    @compiled_once
    @jax.jit
    def program(x):
        if not failures:
            failures.append(x.shape)
            raise ValueError("once")
        return x

    failures = []
    raised(ValueError, "once", program, np.ones(1))
    assert program(np.ones(1)) == 1


def test_methods_of_the_jitted_function_stay():
    program, traced = counting()
    program(np.ones(2))
    assert program._cache_size() == 1 and program.__name__ == "program"
    program.clear_cache()
    assert program._cache_size() == 0
    program(np.ones(2))
    assert len(traced) == 2


def test_only_one_cpu_device_has_programs_side_by_side(monkeypatch):
    monkeypatch.setattr(programs, "usable_cores", lambda: 6)
    assert num_side_by_side(mesh_of(1)) == 6
    assert num_side_by_side(mesh_of(2)) == 1
    assert num_side_by_side(None) == 6  # the default device
