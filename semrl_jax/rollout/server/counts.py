"""What a replica has done since it started."""

from __future__ import annotations

import collections
import dataclasses

from semrl_jax.rollout.wire import codec
from semrl_jax.types import FINISH_REASONS, Rollout


@dataclasses.dataclass
class Counts:
    """Counted on the event loop; other threads only read.

    Attributes:
      responses: that were sent, by finish reason.
      response_tokens: of the policy, in these responses.
      sent_bytes: of these responses: token ids with their log-probabilities, and hidden states. The
        client's `token_bytes` and `state_bytes` count the same.
      aborts: Abort calls that ended running calls.
      updates: weight updates by how they ended.
      update_s: from the first message of an update to its end, committed updates only.
      pause_s: in which updates kept new calls waiting.
      running: Generate calls.
      waiting: calls that wait for a commit.
      is_paused: whether calls are refused until Resume.
      unfinished: responses that running calls still have to send.
      weight_step: of the weights; None before the first.
    """

    responses: collections.Counter[str] = dataclasses.field(
        default_factory=lambda: collections.Counter(dict.fromkeys(FINISH_REASONS, 0))
    )
    response_tokens: int = 0
    sent_bytes: collections.Counter[str] = dataclasses.field(
        default_factory=lambda: collections.Counter({"tokens": 0, "states": 0})
    )
    aborts: int = 0
    updates: collections.Counter[str] = dataclasses.field(
        default_factory=lambda: collections.Counter({"committed": 0, "failed": 0})
    )
    update_s: float = 0.0
    pause_s: float = 0.0
    running: int = 0
    waiting: int = 0
    is_paused: bool = False
    unfinished: int = 0
    weight_step: int | None = None

    def add(self, rollout: Rollout) -> None:
        """Counts a response that was sent."""
        self.responses[rollout.finish_reason] += 1
        self.response_tokens += int(rollout.response_mask.sum())
        self.sent_bytes["tokens"] += codec.num_bytes(rollout)["token_bytes"]
        self.sent_bytes["states"] += rollout.num_state_bytes
