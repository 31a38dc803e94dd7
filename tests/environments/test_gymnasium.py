"""Classes with the interface of Gymnasium as environments."""

import random

import pytest

from semrl_jax.environments import Turn
from semrl_jax.environments.pool import EnvironmentPool
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import named
from tests.cases import refused
from tests.environments.test_pool import played, section

ENV = f"{__name__}:Dial"


class Dial:
    """Turn a dial to a number: "up" or "down"; at most four turns."""

    def __init__(self, size=3):
        self.size = size

    def reset(self, *, seed=None, options=None):
        self.aim, self.place, self.left = random.Random(seed).randrange(1, self.size), 0, 4
        return f"Turn from 0 to {self.aim}.", {"aim": self.aim}

    def step(self, action):
        self.place += {"up": 1, "down": -1}.get(action, 0)
        self.left -= 1
        terminated = self.place == self.aim
        return f"at {self.place}", float(terminated), terminated, self.left == 0, {}


def test_an_episode_ends_when_it_is_terminated_or_truncated():
    with EnvironmentPool(section(f"gymnasium:env={ENV}:size=2")) as environments:
        first, second = environments.openings(seed=1, count=2)
        assert first.messages == [{"role": "user", "content": "Turn from 0 to 1."}]
        assert first.seed != second.seed
        said = ("down", "up", "up"), ("no", "no", "no", "no")
        answers = [played(environments, first, *messages) for messages in said]
    assert not any(answer.error for each in answers for answer in each)
    (down, back, up), (*_, last) = ([answer.turn for answer in each] for each in answers)
    assert down == Turn([{"role": "user", "content": "at -1"}], 0.0, False)
    assert (back.done, up) == (False, Turn((), 1.0, True)) and last == Turn((), 0.0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("env=CartPole-v1", "env='CartPole-v1' cannot be imported .*'package.module:Class'"),
        ("env=random:Random", "env='random:Random' has no reset; .* with the methods reset, step"),
        (f"env={ENV}:sizes=2", "cannot be made: TypeError: .*'sizes'"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    refused(message, made, *named(f"gymnasium:{options}")[:2])
