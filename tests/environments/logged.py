"""Environments that write a line for each of their calls, so that a test can count them."""

import os
import random
import time

from semrl_jax.environments import Turn
from tests.environments.users import Vowels


class Logged:
    """Answers with the number of characters so far."""

    def __init__(self, path):
        self._path, self.total = path, 0

    def log(self, line):
        with open(self._path, "a") as file:
            file.write(line + "\n")

    def tasks(self, seed, count):
        return [{"number": number} for number in range(count)]

    def reset(self, task, seed):
        self.log("reset")
        self.total = 0
        return "Write."

    def step(self, message):
        self.log(f"step {message}")
        match message:
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyError(message)
        self.total += len(message)
        return Turn(str(self.total), reward=self.total / 10, done=message == "end")


class Recalling(Logged):
    """Gets its state from its answers."""

    def recall(self, message, turn):
        self.log(f"recall {message}")
        self.total = int(turn.messages.pop()["content"])  # the turn is its own


class Forgetful(Logged):
    """Answers otherwise when it is asked again."""

    def step(self, message):
        self.total = time.time_ns() % 10**9
        return super().step(message)


class RecallingVowels(Vowels):
    """Takes long enough that a run is killed while some are asked."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def step(self, message):
        with open(self._path, "a") as file:
            file.write("step\n")
        time.sleep(0.01)
        return super().step(message)

    def recall(self, message, turn):
        self.left -= 1
        random.randrange(100)


class Calling(Logged):
    """Has a tool."""

    def __init__(self, path):
        super().__init__(path)
        self.tools = [self.press]

    def press(self, key: str) -> str:
        """Presses a key.

        Args:
          key: its name.
        """
        self.log(f"press {key}")
        return key
