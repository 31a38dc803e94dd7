"""Serves rollouts to trainers over gRPC until SIGTERM or SIGINT.

    SEMRL_ROLLOUT_TOKEN=... python -m launch.rollout --config=configs/quickstart.py --port=50051

With --engine=vllm, vLLM samples; run it in the environment that third_party/vllm_patch/make_env.sh
makes. Start the trainer with --config.rollout.addresses=127.0.0.1:50051 and the same token; it
streams the weights to the replica. The model is config.model.path (its config.json and tokenizer),
or the architecture of config.model. With --policy=RUN, no trainer is needed: the replica serves
the run's newest checkpoint, and each newer one. With --http_port, OpenAI's clients can ask
http://127.0.0.1:PORT/v1, with the token as their key (docs/clients.md). An address other than
loopback needs TLS: docs/security.md has the commands that make the files.
Exit codes: 0 ended by a signal, 1 the engine died, 2 wrong setting (one line names it).
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
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.fields import config_of_policy
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.settings.rollout import ENGINES, check_quantization
from semrl_jax.support import compilation, cores
from semrl_jax.support.run_directory import names_run

PROGRESS_EVERY_S = 10.0
MAX_TEMPORARY_PATH = 48  # characters; a socket's path has 107 at most, vLLM adds 57
PARENT_EVERY_S = 0.5  # between two checks of the parent process

CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file of the trainer")
POLICY = flags.DEFINE_string(
    "policy", "", "run, checkpoint or Hugging Face directory to serve without a trainer"
)
ENGINE = flags.DEFINE_enum("engine", "jax", ENGINES, "engine that samples")
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to bind")
PORT = flags.DEFINE_integer("port", 50051, "port to bind; 0 takes a free port")
UNTIL_STDIN_CLOSES = flags.DEFINE_boolean(
    "until_stdin_closes", False, "end when standard input closes, as when the parent process ends"
)
CORES = flags.DEFINE_multi_integer("cores", (), "a core that this process may use; repeat the flag")
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file; with --tls_key")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file; with --tls_certificate")
HTTP_PORT = flags.DEFINE_integer(
    "http_port", 0, "port of HTTP: OpenAI's API, health, and counters for Prometheus; 0: none"
)
HTTP_HOST = flags.DEFINE_string(
    "http_host", "127.0.0.1", "address to bind for it; other than loopback, it needs TLS"
)


def end_with_stdin() -> None:
    """Sends this process SIGTERM once standard input closes, for any reason."""
    # Not through sys.stdin: its lock, held by a daemon thread, aborts an exit after a mistake.
    while os.read(0, 2**16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent() -> None:
    """Kills this process, which vLLM started, once its parent has ended, for any reason."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    in_background(wait)


def in_background(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def prepare_environment(model_path: str, directory: str) -> None:
    """Sets the variables that JAX, vLLM and the hub read on import; the user's stay.

    The directory is for the sockets of vLLM, which does not remove them.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # vLLM uses the accelerators
    # A forked process that has JAX loaded can hang. It also does not import this file again, and so
    # would not call `end_with_parent`.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # vLLM leaves its queues to Python's resource tracker, which removes them with a warning.
    warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_RPC_BASE_PATH", directory)
    if not model_path or os.path.isdir(model_path):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def report_until(listening: threading.Event) -> None:
    """Prints every few seconds that vLLM is still starting."""
    started = time.monotonic()
    while not listening.wait(PROGRESS_EVERY_S):
        print(f"starting vLLM ({time.monotonic() - started:.0f} s)", flush=True)


def main() -> int:
    config = cli.checked_config(CONFIG, check_sections)
    if CORES.value:
        cores.bind(CORES.value)
    for number in (signal.SIGTERM, signal.SIGINT):  # until the server has installed its handlers
        signal.signal(number, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack:
        return serve(config, stack)


def serve(config: ml_collections.ConfigDict, stack: contextlib.ExitStack) -> int:
    """Serves until a signal comes; returns the exit code."""
    check_quantization(config, ENGINE.value)
    if ENGINE.value == "vllm":
        from semrl_jax.rollout.engines.vllm import checked_version

        checked_version()  # before anything that takes seconds
        too_long = len(tempfile.gettempdir()) > MAX_TEMPORARY_PATH
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="semrl-vllm-",
                dir="/tmp" if too_long else None,
                ignore_cleanup_errors=True,  # a dying process may still create files
            )
        )
        prepare_environment(config.model.path, directory)
    followed = None
    if POLICY.value:
        from semrl_jax.jobs.serve import Followed

        followed = Followed(POLICY.value, functools.partial(print, flush=True))
        config.model.path = str(followed.source.model)
    elif names_run(config.model.path):
        from semrl_jax.runs.starting_model import source_of

        config.model.path = str(source_of(config.model.path).model)
    from semrl_jax.models.of_config import build_policy, end_token_ids
    from semrl_jax.rollout.building import jax_engine, read_token, vllm_engine
    from semrl_jax.rollout.engines.base import EngineDeadError
    from semrl_jax.rollout.server import Http, check_place, serve_until_signal
    from semrl_jax.support.addresses import is_loopback, url_of

    if UNTIL_STDIN_CLOSES.value:
        in_background(end_with_stdin)
    token = read_token(config.rollout.token_file)
    place = {flag.name: flag.value for flag in (HOST, PORT, TLS_CERTIFICATE, TLS_KEY)}
    # Before the model is read.
    check_place(**place, http_port=HTTP_PORT.value, http_host=HTTP_HOST.value)
    compilation.keep_programs()
    policy, tokenizer = build_policy(config)
    http = None
    if HTTP_PORT.value:
        name = pathlib.Path(POLICY.value or config.model.path or "policy").absolute().name
        ends = end_token_ids(config, tokenizer)
        http = Http(HTTP_PORT.value, HTTP_HOST.value, tokenizer, ends, name)
    listening = threading.Event()

    def announce(line: str) -> None:
        listening.set()
        if parts := getattr(engine, "start_s", None):
            shares = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
            print(f"vLLM started ({shares})")
        if http:
            url = url_of(http.host, http.port, not is_loopback(http.host))
            print(f"model {http.model} at {url}/v1")
        print(line, flush=True)

    stack.callback(listening.set)
    stack.enter_context(compilation.watching(functools.partial(print, flush=True)))
    try:
        if ENGINE.value == "vllm":
            engine = vllm_engine(config, policy, tokenizer, pathlib.Path(directory))
            in_background(report_until, listening)
        else:
            engine = jax_engine(config, policy, tokenizer)
        feed = None
        if followed:
            from semrl_jax.models import make_mesh

            mesh = make_mesh(config.mesh.to_dict())
            feed = functools.partial(followed.feed, policy=policy, mesh=mesh)
        serve_until_signal(
            engine,
            announce=announce,
            feed=feed,
            token=token,
            **place,
            http=http,
            stall_timeout_s=config.rollout.stall_timeout_s,
        )
    except EngineDeadError as error:
        print(f"python -m launch.rollout: {error}")
        return 1
    return 0


if __name__ == "__mp_main__":  # in a process that vLLM spawned; Python imports this file first
    end_with_parent()
if __name__ == "__main__":
    if cli.given_values("policy"):
        config_of_policy()
    cli.run(main, __doc__)
