"""Settings of `config.hidden_states`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class HiddenStates:
    source: str = setting(
        "rollout",
        "Who computes the measured states: rollout, policy or none",
        choices=("rollout", "policy", "none"),
    )
    dtype: str = setting(
        "bfloat16", "dtype on the wire: bfloat16 or float32", choices=("bfloat16", "float32")
    )
    compare_every: int = setting(
        0, "between comparisons of both sources; 0: never", "steps", at_least=0
    )
