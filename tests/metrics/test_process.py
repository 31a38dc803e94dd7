"""What needs a process of its own: a deadline, and errors without the annotation checks."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

FOUR_THREADS = """
import concurrent.futures, functools, threading
import jax, numpy as np
from semrl_jax import metrics

states = np.random.default_rng(0).normal(size=(4, 48, 32)).astype(np.float32)
mask = np.ones((4, 48), bool)
programs = [
    jax.jit(jax.vmap(functools.partial(metrics.rank_dynamics, stride=4, method=method)))
    for method in ("gram", "svd")
]
@jax.jit
def other(x):  # keeps the pool busy with products and solvers of its own
    return jax.lax.fori_loop(0, 20, lambda _, x: x @ x / jax.numpy.linalg.norm(x), x)
stop = threading.Event()
def beside():
    while not stop.is_set():
        other(np.ones((256, 256), np.float32)).block_until_ready()
def work(i):
    return [float(jax.block_until_ready(programs[i % 2](states, mask))[0].sum()) for _ in range(20)]
for program in programs:
    assert program(states, mask).effective_rank.shape == (4,)
thread = threading.Thread(target=beside)
thread.start()
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(work, range(4)))
options = {"stride": 12, "names": ("effective_rank",), "method": "gram"}
with metrics.Measurer(max_tokens=48, num_threads=4, **options) as measurer:
    for future in [measurer.submit(np.repeat(rows, 16, axis=1)) for rows in states] * 3:
        measurer.flush()
        assert all(measured.valid for measured in future.result().metrics.values())
stop.set()
thread.join()
assert all(len(set(result)) == 1 for result in results), results
print("returned")
"""

REFUSALS = """
import jax, jax.numpy as jnp, numpy as np
from semrl_jax import metrics

states, mask = np.ones((8, 4), np.float32), np.ones(8, bool)
def batch(states=states[None], mask=mask[None], stride=2, **kwargs):
    return metrics.hidden_state_metrics(states, mask, stride=stride, **kwargs)
def rank(states=states, mask=mask, **kwargs):
    return jax.jit(lambda s, m: metrics.effective_rank(s, m, **kwargs))(states, mask)
def dynamics(stride=2, **kwargs):
    return metrics.rank_dynamics(states, mask, stride=stride, **kwargs)
cases = [
    (lambda: rank(states[0], mask[:4]), "hidden_states has shape (4,)"),
    (lambda: rank(states[None]), "hidden_states has shape (1, 8, 4)"),
    (lambda: rank(np.ones((8, 4), np.int32)), "hidden_states has dtype int32"),
    (lambda: rank(mask=mask[:7]), "response_mask has shape (7,)"),
    (lambda: rank(mask=mask.astype(np.int32)), "response_mask has dtype int32"),
    (lambda: rank(method="qr"), "method='qr'"),
    (lambda: metrics.curvature(states, mask[:7]), "response_mask has shape (7,)"),
    (lambda: metrics.response_entropy(states, mask, method="qr"), "method='qr'"),
    (lambda: metrics.traditional_rank(states, mask * 1.0), "response_mask has dtype float"),
    (lambda: dynamics(stride=0), "stride=0"),
    (lambda: dynamics(stride=2.5), "stride=2.5"),
    (lambda: dynamics(window="all"), "window='all'"),
    (lambda: dynamics(method="qr"), "method='qr'"),
    (lambda: dynamics(stride=-1), "stride=-1"),
    (lambda: batch(states), "hidden_states has shape (8, 4)"),
    (lambda: batch(np.ones((1, 8, 4), int)), "hidden_states has dtype int"),
    (lambda: batch(mask=mask), "response_mask has shape (8,)"),
    (lambda: batch(stride=0), "stride=0"),
    (lambda: batch(window="all"), "window='all'"),
    (lambda: batch(method="qr"), "method='qr'"),
    (lambda: batch(names=("rank",)), "names has 'rank'"),
    (lambda: batch(orders=("rank",)), "orders has 'rank'"),
    (lambda: batch(names=("curvature",), orders=("effective_rank",)), "orders='effective_rank'"),
    (lambda: batch(orders="curvature"), "orders='curvature'"),
    (lambda: batch(names="curvature"), "names='curvature'"),
    (lambda: batch(names=None), "names=None"),
    (lambda: batch(orders=3), "orders=3"),
    (lambda: batch(states=states[None, :, :0]), "hidden_states has shape (1, 8, 0); its width"),
    (lambda: rank(states[:, :0]), "hidden_states has shape (8, 0); its width"),
    (lambda: rank(states.tolist()), "hidden_states is of type list"),
    (lambda: rank(mask=mask.tolist()), "response_mask is of type list"),
    (lambda: metrics.dataset_metrics(states[0], stride=1), "mean_states has shape (4,)"),
    (lambda: metrics.dataset_metrics(states[:, :0], stride=1), "mean_states has shape (8, 0)"),
    (lambda: metrics.dataset_metrics(states.astype(int), stride=1), "mean_states has dtype int"),
]
for call, message in cases:
    try:
        call()
    except ValueError as error:
        assert message in str(error), (message, str(error))
    else:
        raise AssertionError("not refused: " + message)
one = ["effective_rank"]
for accepted in (
    dict(orders=one), dict(stride=jnp.int32(2)),
):
    assert len(jax.eval_shape(lambda: batch(names=one, **accepted))) == 3, accepted
assert jax.eval_shape(lambda: metrics.dataset_metrics(states.tolist(), stride=2, names=one))
far = batch(names=one, stride=10**12)
rank, velocity = (far[metrics.MetricKey("effective_rank", o)] for o in ("value", "velocity"))
assert rank.valid and not velocity.valid
print("refused", len(cases))
"""


def run(program, timeout_s, cores=None):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    if cores is not None:
        # Before JAX is imported, which sizes its pool by the cores it may use.
        program = f"import os; os.sched_setaffinity(0, {set(cores)})\n" + program
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        timeout=timeout_s,
        capture_output=True,
        text=True,
    )


@pytest.mark.soak
@pytest.mark.parametrize("num_cores", [1, 2])
def test_twelve_windows_under_vmap_return_to_four_threads(num_cores):
    # Batched eigen-solvers on CPU wait inside the pool that runs them and never return.
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    if len(cores) < num_cores:
        pytest.skip(f"{num_cores} cores are needed")
    result = run(FOUR_THREADS, timeout_s=120, cores=cores)
    assert result.stdout == "returned\n", result.stderr


@pytest.mark.slow
def test_mistakes_are_refused_while_tracing():
    result = run(REFUSALS, timeout_s=180)
    assert result.stdout.startswith("refused"), result.stderr
