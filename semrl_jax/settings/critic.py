"""Settings of `config.critic`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.optimizer import Steps
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Critic(Steps):
    path: str = setting("", "Hugging Face directory; empty: the policy's weights and a new head")
    warmup_steps: int = setting(0, "first steps, which train only the critic", at_least=0)
    learning_rate: float = setting(1e-5, "learning rate of the critic", above=0)
