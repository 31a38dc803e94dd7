"""Classes and functions as they are written for TRL's GRPOTrainer."""

import random


class Lamps:
    """An environment: find the lamp that is on, out of three."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.lamp = kwargs.get("lamp", random.randrange(3))
        self.reward = 0.0
        return "Which lamp is on?"

    def look(self, lamp: int) -> str:
        """Look at a lamp.

        Args:
            lamp: The number of the lamp, from 0 to 2.

        Returns:
            Whether it is on.
        """
        if not 0 <= lamp < 3:
            raise ValueError("There are three lamps.")
        self.reward = 0.75 if lamp == self.lamp else self._penalty()
        return "on" if lamp == self.lamp else "off"

    async def wait(self) -> str:
        """Wait for a moment."""
        return "done"

    def get_reward(self) -> float:
        return self.reward

    def _penalty(self):
        return -0.1


class NoReward:
    def reset(self, **kwargs):
        return "Hello"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def exact(completions, answer, **kwargs) -> list[float]:
    """A reward function."""
    return [
        float(completion[-1]["content"] == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


async def lit(environments, **kwargs) -> list[float | None]:
    return [None if environment.reward < 0 else 0.5 for environment in environments]
