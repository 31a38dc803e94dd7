"""Serves rollouts to trainers over gRPC until SIGTERM or SIGINT.

    SEMRL_ROLLOUT_TOKEN=... python -m launch.rollout --config=configs/quickstart.py --port=50051

With --engine=vllm, in the environment that third_party/vllm_patch/make_env.sh makes, vLLM samples.
The trainer is then given --config.rollout.addresses=127.0.0.1:50051 and the same token, and streams
the weights. The model is config.model.path (its config.json and tokenizer), or the random
architecture of config.model. An address other than loopback demands TLS. Exit codes: 0 ended by a
signal, 1 engine died, 2 wrong setting (one line says which).
"""

import contextlib
import os
import pathlib
import tempfile

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax.errors import UserError

ENGINES = ("jax", "vllm")

CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file of the trainer")
ENGINE = flags.DEFINE_string("engine", "jax", f"what samples: one of {ENGINES}")
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to bind")
PORT = flags.DEFINE_integer("port", 50051, "port to bind; 0 takes a free one")
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file; with --tls_key")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file; with --tls_certificate")


def main() -> int:
    config = cli.locked_config(CONFIG)
    if ENGINE.value not in ENGINES:
        raise UserError(f"--engine={ENGINE.value!r} must be one of {ENGINES}.")
    if ENGINE.value == "vllm":
        os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerators are vLLM's
    from semrl_jax.rollout.engines.base import EngineDeadError
    from semrl_jax.rollout.server import serve_until_signal
    from semrl_jax.training.config import validate
    from semrl_jax.training.policy_setup import build_policy
    from semrl_jax.training.replicas import jax_engine, read_token, vllm_engine

    validate(config)
    token = read_token(config.rollout.token_file)
    policy, tokenizer = build_policy(config)
    stack = contextlib.ExitStack()
    try:
        if ENGINE.value == "vllm":
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="semrl-vllm-"))
            engine = vllm_engine(config, policy, tokenizer, pathlib.Path(directory))
        else:
            engine = jax_engine(config, policy, tokenizer)
        serve_until_signal(
            engine,
            announce=lambda line: print(line, flush=True),
            token=token,
            host=HOST.value,
            port=PORT.value,
            tls_certificate=TLS_CERTIFICATE.value,
            tls_key=TLS_KEY.value,
        )
    except EngineDeadError as error:
        print(f"python -m launch.rollout: {error}")
        return 1
    finally:
        stack.close()
    return 0


if __name__ == "__main__":
    cli.run(main, __doc__)
