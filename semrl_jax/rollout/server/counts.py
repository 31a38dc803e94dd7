"""What a replica has done since it started."""

from __future__ import annotations

import collections
import dataclasses
import functools

from semrl_jax.rollout.wire import codec
from semrl_jax.types import FINISH_REASONS, Rollout


def _counter(*names: str) -> collections.Counter[str]:
    counter = functools.partial(collections.Counter, dict.fromkeys(names, 0))
    return dataclasses.field(default_factory=counter)


@dataclasses.dataclass
class Counts:
    """Counted on the event loop; other threads only read."""

    responses: collections.Counter[str] = _counter(*FINISH_REASONS)  # noqa: RUF009 - that were sent
    response_tokens: int = 0  # of the policy, in these responses
    # In these responses, as the client's `token_bytes` and `state_bytes`.
    sent_bytes: collections.Counter[str] = _counter("tokens", "states")  # noqa: RUF009
    aborts: int = 0  # Abort calls that ended running calls
    updates: collections.Counter[str] = _counter("committed", "failed")  # noqa: RUF009
    update_s: float = 0.0  # from the first message of an update to its end, committed updates only
    pause_s: float = 0.0  # in which updates kept new calls waiting
    running: int = 0  # Generate calls
    waiting: int = 0  # calls that wait for a commit
    is_paused: bool = False  # whether calls are refused until Resume
    unfinished: int = 0  # responses that running calls still have to send
    weight_step: int | None = None  # None before the first weights

    def add(self, rollout: Rollout) -> None:
        """Counts a response that was sent."""
        self.responses[rollout.finish_reason] += 1
        self.response_tokens += int(rollout.response_mask.sum())
        self.sent_bytes["tokens"] += codec.num_bytes(rollout)["token_bytes"]
        self.sent_bytes["states"] += rollout.num_state_bytes
