"""An environment for `benchmarks.episodes`; its processes import this module alone."""

import random
import time

from semrl_jax.environments import Turn


class SlowTools:
    """Answers every message after 0 to `longest` seconds, which follow from the message."""

    def __init__(self, longest: float = 0.0):
        self.longest = longest

    def tasks(self, seed, count):
        return [{"number": number} for number in range(count)]

    def reset(self, task, seed):
        return f"Tell story {task['number']} of {seed % 1000}, one part after the other."

    def step(self, message):
        time.sleep(random.Random(message).uniform(0, self.longest))
        return Turn("Go on.")
