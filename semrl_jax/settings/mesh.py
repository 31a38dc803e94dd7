"""Settings of `config.mesh`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Mesh:
    replica: int = setting(
        1, "copies of parameters and optimiser, each for a part of the batch", "devices"
    )
    fsdp: int = setting(-1, "shards of parameters and optimiser, and of the batch", "devices")
    sequence: int = setting(1, "parts of the tokens of a row", "devices")
    tensor: int = setting(1, "parts of heads and feed-forward layers", "devices")
    expert: int = setting(1, "parts of the experts of each layer, and of the batch", "devices")
