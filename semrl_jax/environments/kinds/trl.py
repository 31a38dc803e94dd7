"""Environment classes, tools and reward functions for the GRPOTrainer of TRL (1.16), as they are.

TRL itself is not needed. A message that calls no tool ends the episode. The reward of a turn is how
much the score has changed, so that their sum is the score, also if the episode is truncated.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

from semrl_jax.environments.interface import Message, Turn
from semrl_jax.environments.tools.formats import Toolbox, choose_format

MAX_CHARS = 10_000  # of the answers to a message
SCALE = 2**20  # Scores are multiples of 1 / SCALE. So their differences add up without rounding.


class Environment:
    """What `GRPOTrainer` takes under the same names.

    Args:
      environment_factory: "package.module:Class".
      tools: functions, "package.module:name", separated by commas.
      reward_funcs: the same. They get no token ids.
      train_dataset: a file of JSON lines; "": the class makes the prompts.
    """

    def __init__(
        self,
        environment_factory: str = "",
        tools: str = "",
        reward_funcs: str = "",
        train_dataset: str = "",
    ):
        self._factory = _loaded(environment_factory) if environment_factory else None
        self._tools = [_loaded(name) for name in tools.split(",") if name]
        self._reward_funcs = [_loaded(name) for name in reward_funcs.split(",") if name]
        self._rows: list[dict[str, Any]] = []
        if train_dataset:
            lines = pathlib.Path(train_dataset).read_text("utf-8").splitlines()
            self._rows = [json.loads(line) for line in lines]
        elif self._factory is None:
            raise ValueError("set environment_factory or train_dataset, which make the prompts")

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        numbers = random.Random(seed)
        if self._rows:
            return numbers.sample(self._rows, min(count, len(self._rows)))
        return [{"game": numbers.getrandbits(32)} for _ in range(count)]

    def reset(self, task: Mapping[str, Any], seed: int) -> list[Message]:
        self._row = task if self._rows else {"prompt": [{"role": "user", "content": ""}]}
        self._environments, self._own_rewards, methods, text = [], [], [], None
        if self._factory is not None:
            environment = self._factory()
            methods = [
                getattr(environment, name)
                for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
                if name not in ("reset", "get_reward") and not name.startswith("_")
            ]
            text = environment.reset(**self._row)
            self._environments = [environment]
            if hasattr(environment, "get_reward"):
                self._own_rewards = [environment.get_reward]
        if not self._reward_funcs and not self._own_rewards:
            raise ValueError("set reward_funcs, or give the class a method get_reward")
        prompt = self._row["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [dict(message) for message in prompt]
        messages[-1]["content"] += text or ""
        self._prompt, self._completion, self._score = messages, [], 0.0
        self._toolbox = Toolbox([_waiting(tool) for tool in [*self._tools, *methods]])
        self._toolbox.form = choose_format(None, "hermes")
        return self._toolbox.told(messages)

    def step(self, message: str) -> Turn:
        answers = self._toolbox.form.messages(self._toolbox.answers(message, MAX_CHARS))
        self._completion += [{"role": "assistant", "content": message}, *answers]
        before, self._score = self._score, self._score_of_all()
        return Turn(answers, self._score - before, done=not answers)

    def _score_of_all(self) -> float:
        """The sum of the rewards, where None counts as 0."""
        columns = {key: [value] for key, value in self._row.items() if key != "prompt"}
        columns |= {"prompts": [self._prompt], "completions": [self._completion]}
        columns["environments"] = self._environments
        scores = [_waiting(function)(**columns)[0] for function in self._reward_funcs]
        scores += [_waiting(function)() for function in self._own_rewards]
        total = float(sum(score for score in scores if score is not None))
        return round(total * SCALE) / SCALE


def _loaded(name: str) -> Any:
    """What "package.module:name" names."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r} must be 'package.module:name'")
    return getattr(importlib.import_module(module), attribute)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or one that waits for the result of an async one."""
    if not inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return waiting
