"""A replica's gRPC server around one engine. Imports nothing of the trainer."""

from semrl_jax.rollout.server.server import (
    Http,
    RolloutServer,
    check_place,
    serve,
    serve_until_signal,
)

__all__ = ["Http", "RolloutServer", "check_place", "serve", "serve_until_signal"]
