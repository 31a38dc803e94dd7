"""Settings of `config.mesh`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Mesh:
    replica: int = setting(
        1, "copies of parameters and optimiser; each trains on a part of the batch", "devices"
    )
    fsdp: int = setting(
        -1, "shards of parameters and optimiser, which are also shards of the batch", "devices"
    )
    sequence: int = setting(1, "parts into which the tokens of a row are split", "devices")
    tensor: int = setting(1, "parts into which heads and feed-forward layers are split", "devices")
    expert: int = setting(
        1,
        "parts into which the experts of each layer are split, also shards of the batch",
        "devices",
    )
