"""Environments with the interface of Gymnasium whose actions and observations are texts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from semrl_jax.environments.interface import Turn, load_class


class Environment:
    """Calls `reset(seed=...)` and `step(text)` of a class.

    Args:
      env: "package.module:Class".
      options: of the class.
    """

    def __init__(self, env: str, **options: Any):
        self._env = load_class("env", env, ("reset", "step"))(**options)

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        numbers = random.Random(seed)
        return [{"number": numbers.randrange(2**32)} for _ in range(count)]

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        observation, _ = self._env.reset(seed=seed)
        return str(observation)

    def step(self, message: str) -> Turn:
        observation, reward, terminated, truncated, _ = self._env.step(message)
        return Turn(str(observation), reward, terminated or truncated)
