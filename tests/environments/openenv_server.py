"""Servers made with the package openenv: `python openenv_server.py echo|number|tools PORT`."""

import sys
import threading
import uuid

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel

LOCK = threading.Lock()  # the games draw from the generator of the process


class Said(Action):
    message: str


class Heard(Observation):
    text: str


class Line(BaseModel):
    content: str


class Told(Observation):
    messages: list[Line]


class Echo(Environment):
    """Repeats the message; "bye" ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    @property
    def state(self):
        return self._state

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return self.shown(self.begin(seed))

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        text, reward, done = self.answer(action.message)
        return self.shown(text, reward=reward, done=done)

    def shown(self, text, **fields):
        return Heard(text=text, **fields)

    def begin(self, seed):
        return f"Say something, {seed}."

    def answer(self, message):
        if message == "fail":
            raise RuntimeError("it broke")
        return message, len(message) / 10, message == "bye"


class Number(Echo):
    """A game of textarena, with observations as its server of OpenEnv has them."""

    def shown(self, text, **fields):
        return Told(messages=[Line(content=text)] if text else [], **fields)

    def begin(self, seed):
        import textarena

        with LOCK:
            self._game = textarena.make("GuessTheNumber-v0")
            self._game.reset(num_players=1, seed=seed)
        return self._game.get_observation()[1]

    def answer(self, message):
        with LOCK:
            done, _ = self._game.step(message)
        reward = (self._game.state.rewards or {}).get(0, 0.0) if done else 0.0
        return "" if done else self._game.get_observation()[1], reward, done


class Tools(MCPEnvironment):
    """Has a tool, and no other action."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        from fastmcp import FastMCP

        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)
        self._state = State()

    @property
    def state(self):
        return self._state

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **_):
        raise RuntimeError(f"there is no action {action}")


KINDS = {
    "echo": (Echo, Said, Heard),
    "number": (Number, Said, Told),
    "tools": (Tools, CallToolAction, CallToolObservation),
}


if __name__ == "__main__":
    app = create_app(*KINDS[sys.argv[1]], max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
