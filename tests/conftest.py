"""Tests run on CPU with 8 devices, rank promotion is an error, array annotations are checked."""

import ctypes
import gc
import os
import pathlib

# Imports make millions of objects that live to the end. See pytest_collection_finish.
gc.disable()

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # BLAS threads beside XLA give wrong products

# Read by the workers that pytest-xdist starts: with an arena for each thread, freed memory stays.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

# Runs of these tests compile the same programs again and again, in this process and in children.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jaxtyping
import pytest

jaxtyping.install_import_hook("semrl_jax", "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("semrl", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("semrl")

pytest_plugins = ("tests.fixtures",)

# The fast suite compiles far more than it computes: without optimisation and with the older
# emitters it takes half as long. The programs are the same to rounding, which these tests allow
# for. `--compile-as-users` leaves it out; the processes that tests start never have it.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"  # the workers keep all cores busy
)

MAX_RESIDENT_BYTES = 2**30  # of a worker at the end of a file; above, it forgets its programs

GOLDEN = pathlib.Path(__file__).parent / "golden"

# With a file to a worker, the longest go first, or the last one would run alone.
LONGEST_FILES = (
    "runs/test_train.py",
    "parity/test_full_step.py",
    "training/test_update.py",
    "metrics/test_spectrum.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--compile-as-users",
        action="store_true",
        help="compile at the default optimisation level, as users do; slower",
    )


def pytest_configure(config):
    """Read when the first program is compiled, so it is not too late."""
    # XLA ends a process that has a flag it does not know: only for releases where they were tried.
    if not config.option.compile_as_users and jax.__version_info__[:2] == (0, 10):
        os.environ["XLA_FLAGS"] += f" {FAST_COMPILATION}"


def pytest_report_header(config):
    level = "default" if config.option.compile_as_users else "none"
    return f"optimisation of compiled programs: {level}"


def pytest_collection_modifyitems(items):
    """Every worker sorts alike; the order within a file stays."""
    rank = {file: index for index, file in enumerate(LONGEST_FILES)}
    tests = pathlib.Path(__file__).parent
    items.sort(key=lambda item: rank.get(item.path.relative_to(tests).as_posix(), len(rank)))


def pytest_collection_finish():
    """No later collection of garbage looks at what the imports made."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs hold gigabytes in the end, and are of little use to the next file.

    They also map memory, of which Linux gives a process 65,530 pieces (vm.max_map_count); one more
    ends in a segmentation fault of the compiler.
    """
    yield
    statm = pathlib.Path("/proc/self/statm")  # Linux; its second number is the resident pages
    if statm.exists():
        resident_bytes = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident_bytes > MAX_RESIDENT_BYTES:
            jax.clear_caches()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Directory of recorded reference values; their origin is noted in its README."""
    return GOLDEN
