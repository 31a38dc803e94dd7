"""Tests run on CPU with 8 devices, rank promotion is an error, array annotations are checked."""

import gc
import os
import pathlib

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # BLAS threads beside XLA give wrong products

# Runs of these tests compile the same programs again and again, in this process and in children.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jaxtyping
import pytest

jaxtyping.install_import_hook("semrl_jax", "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("semrl", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("semrl")

# Every compiled program maps memory, of which Linux gives a process 65,530 pieces
# (vm.max_map_count); one more ends in a segmentation fault of the compiler.
MAX_MAPS = 25_000

# The fast suite compiles far more than it computes: without optimisation and with the older
# emitters it takes half as long. The programs are the same to rounding, which these tests allow
# for. The slow suites, and the processes that tests start, compile as users do.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

GOLDEN = pathlib.Path(__file__).parent / "golden"


def pytest_configure(config):
    """Read when the first program is compiled, so it is not too late."""
    # XLA ends a process that has a flag it does not know: only for releases where they were tried.
    if "not slow" in config.option.markexpr and jax.__version_info__[:2] == (0, 10):
        os.environ["XLA_FLAGS"] += f" {FAST_COMPILATION}"


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forgets compiled programs once there are many."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Directory of recorded reference values; their origin is noted in its README."""
    return GOLDEN
