"""Serves rollouts to trainers over gRPC until SIGTERM or SIGINT.

    SEMRL_ROLLOUT_TOKEN=... python -m launch.rollout --config=configs/quickstart.py --port=50051

With --engine=vllm, in the environment that third_party/vllm_patch/make_env.sh makes, vLLM samples.
The trainer is then given --config.rollout.addresses=127.0.0.1:50051 and the same token, and streams
the weights. The model is config.model.path (its config.json and tokenizer), or the random
architecture of config.model. An address other than loopback demands TLS. Exit codes: 0 ended by a
signal, 1 engine died, 2 wrong setting (one line says which).
"""

import contextlib
import functools
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax import compilation
from semrl_jax.errors import UserError
from semrl_jax.settings.rollout import ENGINES

PROGRESS_EVERY_S = 10.0
MAX_TEMPORARY_PATH = 48  # characters; a socket's may have 107, 57 of them below this one
PARENT_EVERY_S = 0.5  # a look at who the parent is

CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file of the trainer")
ENGINE = flags.DEFINE_string("engine", "jax", f"what samples: one of {ENGINES}")
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to bind")
PORT = flags.DEFINE_integer("port", 50051, "port to bind; 0 takes a free one")
UNTIL_STDIN_CLOSES = flags.DEFINE_boolean(
    "until_stdin_closes", False, "end with the process that holds the other end of standard input"
)
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file; with --tls_key")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file; with --tls_certificate")


def end_with_stdin() -> None:
    """Ends this process as SIGTERM does once standard input closes, in whatever way."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def end_with_parent() -> None:
    """Ends a process that vLLM has made once its parent has ended, in whatever way.

    Left alone, the engine's process and its workers outlive a parent that was killed.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def end_on_signal() -> None:
    """Ends in order where a signal comes before the server has handlers of its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))


def prepare_environment(model_path: str, directory: str) -> None:
    """Sets what JAX, vLLM and the hub read when they are imported; vLLM's own is not overruled.

    directory: for the sockets that vLLM makes and leaves.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerators are vLLM's
    # A fork of a process with JAX in it can hang, and would not end with its parent (see below).
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # vLLM leaves its queues to Python's resource tracker, which removes them and complains.
    warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_RPC_BASE_PATH", directory)
    if not model_path or os.path.isdir(model_path):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def temporary_directory() -> tempfile.TemporaryDirectory:
    """A directory for as long as the replica runs, with a path that sockets can have."""
    too_long = len(tempfile.gettempdir()) > MAX_TEMPORARY_PATH
    return tempfile.TemporaryDirectory(
        prefix="semrl-vllm-",
        dir="/tmp" if too_long else None,
        ignore_cleanup_errors=True,  # what a process that is being killed still makes
    )


def tell_until(listening: threading.Event) -> None:
    """Says every few seconds that vLLM is still starting."""
    started = time.monotonic()

    def tell() -> None:
        while not listening.wait(PROGRESS_EVERY_S):
            print(f"starting vLLM ({time.monotonic() - started:.0f} s)", flush=True)

    threading.Thread(target=tell, name="progress", daemon=True).start()


def main() -> int:
    config = cli.checked_config(CONFIG)
    if ENGINE.value not in ENGINES:
        raise UserError(f"--engine={ENGINE.value!r} must be one of {ENGINES}.")
    end_on_signal()
    with contextlib.ExitStack() as stack:
        return serve(config, stack)


def serve(config: ml_collections.ConfigDict, stack: contextlib.ExitStack) -> int:
    """Serves until a signal; the exit code."""
    if ENGINE.value == "vllm":
        from semrl_jax.rollout.engines.vllm import checked_version

        checked_version()  # before all that takes seconds
        directory = stack.enter_context(temporary_directory())
        prepare_environment(config.model.path, directory)
    from semrl_jax.rollout.engines.base import EngineDeadError
    from semrl_jax.rollout.server import check_place, serve_until_signal
    from semrl_jax.training.policy_setup import build_policy
    from semrl_jax.training.replicas import jax_engine, read_token, vllm_engine

    if UNTIL_STDIN_CLOSES.value:
        end_with_stdin()
    token = read_token(config.rollout.token_file)
    place = {
        "host": HOST.value,
        "port": PORT.value,
        "tls_certificate": TLS_CERTIFICATE.value,
        "tls_key": TLS_KEY.value,
    }
    check_place(**place)  # before the model is read
    compilation.keep_programs()
    policy, tokenizer = build_policy(config)
    listening = threading.Event()

    def announce(line: str) -> None:
        listening.set()
        if parts := getattr(engine, "start_s", None):
            shares = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
            print(f"vLLM started ({shares})")
        print(line, flush=True)

    stack.callback(listening.set)
    stack.enter_context(compilation.watching(functools.partial(print, flush=True)))
    try:
        if ENGINE.value == "vllm":
            engine = vllm_engine(config, policy, tokenizer, pathlib.Path(directory))
            tell_until(listening)
        else:
            engine = jax_engine(config, policy, tokenizer)
        serve_until_signal(
            engine,
            announce=announce,
            token=token,
            **place,
            in_flight=config.rollout.in_flight,
            stall_timeout_s=config.rollout.stall_timeout_s,
        )
    except EngineDeadError as error:
        print(f"python -m launch.rollout: {error}")
        return 1
    return 0


if __name__ == "__mp_main__":  # spawned by vLLM, which imports this file before anything of its own
    end_with_parent()
if __name__ == "__main__":
    cli.run(main, __doc__)
