"""Tests run on CPU with 8 devices. Rank promotion is an error. See CHECK_ANNOTATIONS below."""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pathlib
import sys
import time

# Imports create millions of objects that live until the end. See pytest_collection_finish.
gc.disable()

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# With several BLAS threads and XLA in one process, products are wrong.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# For the workers that pytest-xdist starts: with one arena per thread, freed memory is not returned.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

# Tests compile the same programs many times, in this process and in child processes.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Without compiled sources, each worker compiles all test files again at every run: 5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import hypothesis
import jaxtyping
import pytest

# With the checks of array annotations, a suite takes more than twice as long. In .ci/run, one stage
# has them.
if os.environ.get("CHECK_ANNOTATIONS") == "1":
    checked = jaxtyping.jaxtyped

    def check_arrays(*, typechecker):
        """The decorator of the import hook; it leaves functions without arrays as they are."""

        def decorate(function):
            annotations = map(str, getattr(function, "__annotations__", {"": "Array"}).values())
            has_arrays = any("Array" in text or "ndarray" in text for text in annotations)
            return checked(function, typechecker=typechecker) if has_arrays else function

        return decorate

    jaxtyping.jaxtyped = check_arrays
    jaxtyping.install_import_hook("semrl_jax", "beartype.beartype")

import jax
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("semrl", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("semrl")

pytest_plugins = ("tests.fixtures",)

# The fast suite spends far more time on compilation than on computation. Without optimisation and
# with the older emitters it takes half as long. The programs' results are equal up to rounding,
# which these tests allow. Processes of tests/launch do the same; a run with an empty cache takes
# less than half as long. `--compile-as-users` switches this off. The main command of the README,
# which .ci/run executes, and the processes of other tests compile as users do.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"  # the workers keep all cores busy
)

# Limit for the resident memory of a worker at the end of a file; above it, programs are dropped.
# Imports alone take 0.9 to 1.1 GiB. The workers share a part of that.
MAX_RESIDENT_BYTES = int(1.3 * 2**30)

GOLDEN = pathlib.Path(__file__).parent / "golden"

# Each worker takes whole files. The longest files come first, so that none runs alone at the end.
# They begin with the longest files of the slow suite. In the fast suite, three workers share two
# cores, so of three files in a row the first mostly waits, and the others compute.
LONGEST_FILES = (
    "launch/test_real_model.py",
    "launch/test_processes.py",
    "jobs/test_replay.py",
    "runs/test_algorithms.py",
    "runs/test_train.py",
    "launch/test_kills.py",
    "cluster/test_peers.py",
    "library/test_trainer.py",
    "parity/test_full_step.py",
    "rollout/client/test_client.py",
    "rollout/engines/test_jax.py",
    "rollout/http/test_openai.py",
    "environments/test_pool.py",
    "models/test_directory.py",
    "models/test_families.py",
    "rollout/client/test_scheduling.py",
    "analysis/test_mismatch.py",
    "metrics/test_batch.py",
    "environments/tools/test_code.py",
    "metrics/test_extremes.py",
    "metrics/test_defects.py",
    "tinker/test_server.py",
    "training/test_update.py",
    "algorithms/test_estimators.py",
    "environments/test_journal.py",
    "metrics/test_spectrum.py",
    "shaping/test_options.py",
    "rewards/test_pool.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--compile-as-users",
        action="store_true",
        help="compile at the default optimisation level, as users do; slower",
    )


def pytest_configure(config):
    """Sets XLA flags. XLA reads them when the first program is compiled, which comes later."""
    # XLA ends a process with an unknown flag, so only releases where the flags were tested get it.
    if jax.__version_info__[:2] == (0, 10):
        # XLA aborts a process whose eight devices do not meet in 40 s. 2 busy cores need more.
        os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
        if not config.option.compile_as_users:
            os.environ["XLA_FLAGS"] += f" {FAST_COMPILATION}"
            # To create and delete a context of MLIR takes a fifth of the time of a small program.
            mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def pytest_sessionstart(session):
    """Imports all test files, in each worker from another one on, so that workers share the work.

    In a fresh checkout, compiling them takes 5 s. A worker finds what the others have compiled.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker and session.config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        root = pathlib.Path(__file__).parents[1]
        files = sorted(root.glob("tests/**/test_*.py"))
        start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        for file in files[start:] + files[:start]:
            # The collection tells errors, and which files are skipped.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Skips what begins after the time that a slow machine has; the summary of `-rs` counts it."""
    if time.time() > float(os.environ.get("TESTS_END_AT", "inf")):
        pytest.skip("TESTS_END_AT, which .ci/run sets, is over")


def pytest_report_header(config):
    level = "default" if config.option.compile_as_users else "none"
    return f"optimisation of compiled programs: {level}"


def pytest_collection_modifyitems(items):
    """Sorts files in the same way in every worker; the order within a file does not change."""
    rank = {file: index for index, file in enumerate(LONGEST_FILES)}
    tests = pathlib.Path(__file__).parent
    items.sort(key=lambda item: rank.get(item.path.relative_to(tests).as_posix(), len(rank)))


def pytest_collection_finish():
    """Excludes the objects that imports created from all later garbage collections.

    Tracing creates so many objects that the default threshold, 700, costs 4 % of the suite.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Drops compiled programs after a file. They take gigabytes; the next file rarely needs them.

    They also use memory maps. Linux allows 65,530 per process (vm.max_map_count). One more causes a
    segmentation fault of the compiler.
    """
    yield
    statm = pathlib.Path("/proc/self/statm")  # Linux; its second number is the resident pages
    if statm.exists():
        resident_bytes = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident_bytes > MAX_RESIDENT_BYTES:
            jax.clear_caches()
            getattr(mlir.make_ir_context, "cache_clear", lambda: None)()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Directory of recorded reference values; their origin is noted in its README."""
    return GOLDEN
