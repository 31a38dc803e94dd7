"""Serves Tinker's API: its SDK and its cookbook train adapters upon a model, and sample.

    export TINKER_API_KEY=tml-$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
    python -m launch.tinker --model=models/smollm2 --workdir=runs/tinker

Clients set the same key and TINKER_BASE_URL=http://127.0.0.1:8000. All that they make is below the
directory: weights in PEFT's format, and the requests, so that a server that was killed can be
started again and goes on. An address other than loopback needs TLS (docs/security.md).
Exit codes: 0 ended by a signal, 1 a result could not be kept, such as on a full disk, 2 wrong
setting (one line names it).
"""

import functools
import pathlib

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.fields import config_of_policy
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.support import compilation

MODEL = flags.DEFINE_string("model", None, "Hugging Face directory or hub id of the frozen base")
WORKDIR = flags.DEFINE_string("workdir", None, "directory of the weights and requests")
NAME = flags.DEFINE_string("name", "", "base_model of clients; default: the value of --model")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file with the model's dtype, the mesh and the engine's batch"
)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 4096, "limit of a sequence, at most the model's context", lower_bound=2
)
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to bind")
PORT = flags.DEFINE_integer("port", 8000, "port to bind; 0 takes a free port")
TOKEN_FILE = flags.DEFINE_string("token_file", "", "file with the key; default: $TINKER_API_KEY")
TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file; with --tls_key")
TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file; with --tls_certificate")


def main() -> int:
    config = cli.checked_config(CONFIG, prepare)
    from semrl_jax.rollout.server import check_place  # here: mistakes and --help need no JAX
    from semrl_jax.tinker.serving import read_key, serve

    key = read_key(TOKEN_FILE.value)
    place = {flag.name: flag.value for flag in (HOST, PORT, TLS_CERTIFICATE, TLS_KEY)}
    check_place(**place)  # before the model is read
    compilation.keep_programs()
    announce = functools.partial(print, flush=True)
    with compilation.watching(announce):
        workdir = pathlib.Path(WORKDIR.value)
        serve(config, workdir=workdir, name=NAME.value, key=key, announce=announce, **place)
    return 0


def prepare(config: ml_collections.ConfigDict) -> None:
    """Sets the fields of the flags; UserError for a wrong value."""
    cli.required(WORKDIR)
    config.model.path = cli.required(MODEL)
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = MAX_TOKENS.value
    check_sections(config)


if __name__ == "__main__":
    config_of_policy()
    cli.run(main, __doc__)
