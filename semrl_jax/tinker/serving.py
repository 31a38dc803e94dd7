"""A server of Tinker's API, from a config to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import signal
from collections.abc import Callable

import ml_collections

from semrl_jax import models
from semrl_jax.models.of_config import build_policy, end_token_ids, starting_params
from semrl_jax.rollout.building import jax_engine
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.http.server import HttpServer
from semrl_jax.rollout.wire.auth import read_file
from semrl_jax.support.addresses import url_of
from semrl_jax.support.errors import UserError
from semrl_jax.tinker.api import Api, make_app
from semrl_jax.tinker.futures import Futures
from semrl_jax.tinker.samples import Limits, Samples
from semrl_jax.tinker.training import Trainer
from semrl_jax.tinker.work import Work

KEY_VARIABLE = "TINKER_API_KEY"  # as the SDK's
MICRO_BATCH_TOKENS = 4096  # unless the config says another number
GRACE_S = 2.0


def read_key(file: str) -> str:
    """The key of the clients from a file or $TINKER_API_KEY; raises UserError."""
    key = read_file("token_file", file).decode("ascii", "replace").strip() if file else ""
    key = key or os.environ.get(KEY_VARIABLE, "")
    if not re.fullmatch(r"tml-[!-~]{16,}", key):
        raise UserError(
            f"the key must be 'tml-' and at least 16 printable characters: name a file by "
            f"--token_file, or set ${KEY_VARIABLE}; --help shows how to make one."
        )
    return key


@contextlib.contextmanager
def open_work(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, name: str, futures: Futures
):
    """The model of a config, and the thread that trains and samples with it."""
    policy, tokenizer = build_policy(config)
    directory = models.find_directory(config.model.path)
    mesh = models.make_mesh(config.mesh.to_dict())
    models.check_mesh(policy.config, mesh)
    most = policy.config.max_position_embeddings
    limits = Limits(
        name=name or config.model.path,
        max_tokens=min(config.rollout.max_prompt_tokens, most),
        vocab_size=policy.config.vocab_size,
        end_token_ids=end_token_ids(config, tokenizer),
    )
    base = starting_params(directory, policy, mesh, config.lora.base_dtype)
    size = config.training.micro_batch_tokens or MICRO_BATCH_TOKENS
    trainer = Trainer(policy, base, directory, mesh, size)
    replica = LocalReplica(jax_engine(config, policy, tokenizer))
    work = Work(futures, trainer, Samples(futures, trainer, replica, workdir, limits), workdir)
    try:
        yield work
    finally:
        work.close()
        replica.close()


def serve(
    config: ml_collections.ConfigDict,
    *,
    workdir: pathlib.Path,
    name: str,
    key: str,
    host: str,
    port: int,
    tls_certificate: str,
    tls_key: str,
    announce: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT; raises UserError.

    RuntimeError: the thread that works has failed; clients would wait for ever.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"--workdir={workdir} cannot be made: {error.strerror}; name another directory."
        ) from None
    path = config.model.path
    tokenizer_id = os.path.abspath(path) if os.path.isdir(path) else path

    async def run(work: Work, futures: Futures) -> None:
        api = Api(futures, work, tokenizer_id)
        tls = {"certificate": tls_certificate, "key": tls_key}
        server = HttpServer(make_app(api, key), host, port, **tls)
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        work.on_failure = lambda: loop.call_soon_threadsafe(stopped.set)
        work.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        url = url_of(host, server.port, bool(tls_certificate))
        announce(f"serves {work.limits.name} to Tinker's SDK at {url}")
        await stopped.wait()
        api.close()
        await server.close(GRACE_S)
        if work.failure is not None:
            raise RuntimeError(
                f"a result cannot be kept in {workdir}: {work.failure}; make room there, and start "
                "the server again, which does what is not done."
            ) from work.failure

    futures = Futures(workdir / "futures.sqlite3")
    with open_work(config, workdir, name, futures) as work:
        asyncio.run(run(work, futures))
