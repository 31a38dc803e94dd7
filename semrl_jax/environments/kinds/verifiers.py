"""Tasksets and environments of the package verifiers (0.4), without its harness and its servers.

Their `run` plays with an agent that asks our policy for each message, and their tools run in this
process. So an episode needs no network, container or endpoint, unless its task asks for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.environments.interface import Message, Turn
from semrl_jax.environments.tools.formats import choose_format, schema_of
from semrl_jax.environments.tools.functions import Answer, Call

try:
    import verifiers.v1 as vf
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects import parse_message
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.session import call_hook
    from verifiers.v1.state import state_cls
    from verifiers.v1.types import content_text
    from verifiers.v1.utils.decorators import discover_decorated
except ImportError as error:
    raise ImportError(f"{error}; pip install verifiers==0.4.0") from error

FORM = choose_format(None, "hermes")


class Environment:
    """A taskset that is installed, with the environment of its package.

    Args:
      id: of the taskset, such as "alphabet-sort".
      options: fields of its config.
    """

    def __init__(self, id: str, **options: Any):
        self._config = vf.resolve_env_config({"taskset": {"id": id, **options}})
        if len(roles := agent_config_fields(self._config)) != 1:
            raise ValueError(f"it has the roles {', '.join(roles)}; one policy plays one role")
        self._environment = vf.load_environment(self._config)
        self._taskset, self._kind = self._environment.taskset, vf.task_type(id)
        self._loop: asyncio.AbstractEventLoop | None = None

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        found = self._taskset.shuffle(seed) if self._taskset.bounded else self._taskset
        rows = (task.data for task in found.take(count))
        return [row.model_dump(mode="json", exclude_defaults=True) for row in rows]

    def reset(self, task: Mapping[str, Any], seed: int) -> list[Message]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        else:
            self._playing.cancel()
            self._loop.run_until_complete(asyncio.wait({self._playing}))
        data = self._kind.data_type().model_validate(dict(task))
        self._player = _Player(self._taskset)
        played = self._play(self._kind(data, self._taskset.config.task))
        self._playing = self._loop.create_task(played)
        return self._next() or []

    def step(self, message: str) -> Turn:
        self._player.told.set_result(message)
        messages = self._next()
        if messages is None:
            return Turn(reward=self._player.trace.reward, done=True)
        return Turn(messages)

    def _next(self) -> list[Message] | None:
        """What the policy is asked next; None if the episode is over."""
        asked = self._player.asked = self._loop.create_future()
        one_of = asyncio.wait({asked, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        self._loop.run_until_complete(one_of)
        if asked.done():
            return asked.result()
        return self._playing.result()  # None, or it raises what the environment raised

    async def _play(self, task: vf.Task) -> None:
        agents = vf.Agents(self._config, lambda name, config: self._player)
        await self._environment.setup(agents)
        await self._environment.run(task, agents)
        trace = self._player.trace
        episode = vf.Episode(task=trace.task, ok=True, traces=[trace])
        await self._environment.finalize(task, episode)


class _Player:
    """The agent of an environment, as `vf.Agent`; it has one conversation."""

    trainable = True

    def __init__(self, taskset: vf.Taskset):
        self.asked: asyncio.Future[list[Message]]
        self.told: asyncio.Future[str]
        self.trace: vf.Trace | None = None
        self._taskset = taskset

    async def ask(self, messages: list[Message]) -> str:
        """What the policy writes after these messages."""
        self.told = asyncio.get_running_loop().create_future()
        self.asked.set_result(messages)
        return await self.told

    async def run(self, task: vf.Task, **_: Any) -> vf.Trace:
        async with self.interaction(task) as conversation:
            await conversation.turn()
        return self.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: vf.Task, **_: Any) -> AsyncIterator[_Conversation]:
        if self.trace is not None:
            raise ValueError("an episode has several conversations; the policy has one")
        if task.NEEDS_CONTAINER or task.data.image or discover_decorated(task, "intercept"):
            raise ValueError("tasks that need a container or @intercept cannot be played")
        self.trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        await task.setup(self.trace, _NoRuntime())
        yield _Conversation(self, task, await _tools(task, self._taskset, self.trace.state))
        self.trace.is_completed = self.trace.ok = True
        await task.finalize(self.trace, _NoRuntime())
        await task.score(self.trace, _NoRuntime())


class _Conversation:
    """The policy's conversation with an environment, as `vf.Interaction`."""

    def __init__(self, player: _Player, task: vf.Task, tools: Mapping[str, _Tool]):
        self.trace = player.trace
        self._player, self._stops, self._tools = player, task.hooks("stop"), tools
        system, prompt = task.data.system_prompt, task.data.prompt
        opening = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        self._messages = [] if system is None else [vf.SystemMessage(content=system)]
        self._messages += opening

    async def turn(self, message: str | Sequence[Any] | None = None) -> vf.Segment:
        """The policy's answer to a message, with all tools that it calls on the way."""
        given = [vf.UserMessage(content=message)] if isinstance(message, str) else message or []
        given = [parse_message(each) if isinstance(each, dict) else each for each in given]
        self._messages += given
        unread = _plain(given)
        if not self.trace.nodes:
            schemas = [tool.schema for tool in self._tools.values()]
            unread = FORM.told(_plain(self._messages), schemas)
        start, calls = len(self._messages), None
        while calls != [] and not await self._is_stopped():
            text = await self._player.ask(unread)
            calls = FORM.parse(text)
            unread = FORM.messages(await self._answers(text, calls))
        said = self._messages[start:]
        return vf.Segment(messages=said, terminated=not said)

    async def _answers(self, text: str, calls: Sequence[Call]) -> list[Answer]:
        """Adds a message of the policy to the trace, and runs the tools that it calls."""
        thoughts, _, content = text.rpartition("</think>")
        number = len(self._messages)
        tool_calls = [
            vf.ToolCall(
                id=f"{number}-{index}", name=call.name, arguments=json.dumps(call.arguments)
            )
            for index, call in enumerate(calls)
        ]
        message = vf.AssistantMessage(
            content=content, reasoning_content=thoughts or None, tool_calls=tool_calls or None
        )
        response = vf.Response(id="", created=0, model="", message=message, finish_reason="stop")
        prepare_turn(self.trace, list(self._messages)).commit(response)
        answers = [await self._called(call) for call in calls]
        self._messages.append(message)
        for call, answer in zip(tool_calls, answers, strict=True):
            told = vf.ToolMessage(tool_call_id=call.id, name=call.name, content=answer.text)
            self._messages.append(told)
        return answers

    async def _called(self, call: Call) -> Answer:
        try:
            if call.error:
                raise ToolError(call.error)
            if call.name not in self._tools:
                raise ToolError(f"unknown tool; there are {', '.join(self._tools) or 'none'}")
            _, server, name = self._tools[call.name]
            content = (await server.call_tool(name, call.arguments)).content
            return Answer("\n".join(block.text for block in content if block.type == "text"))
        except ToolError as error:
            return Answer(f"error: {error}")

    async def _is_stopped(self) -> bool:
        for stop in self._stops:
            if await call_hook(stop, {vf.Trace: self.trace}):
                self.trace.stop(stop.__name__)
        return self.trace.stop_condition is not None


class _Tool(NamedTuple):
    """A tool that runs in this process: its schema for the policy, and where it is."""

    schema: dict[str, Any]
    server: MCPServer
    name: str


async def _tools(task: vf.Task, taskset: vf.Taskset, state: vf.State) -> dict[str, _Tool]:
    """The tools of a task, by the names that the policy calls."""

    async def pulled() -> vf.State:
        return state

    found, shared = {}, taskset.toolsets(taskset.config)
    for toolset in [*shared, *task.toolsets(task.config)]:
        if url := toolset.config.url:
            raise ValueError(f"tools of another server, {url}, cannot be called")
        toolset._pull_state = pulled  # it would ask a server
        await toolset.setup()
        if toolset not in shared:
            await toolset.setup_task(task.data)
        server = MCPServer(type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}".removeprefix("_")
            shown = schema_of(name, tool.description or "", tool.input_schema)
            found[name] = _Tool(shown, server, tool.name)
    return found


class _NoRuntime:
    """Stands for a container: a hook may get it, but must not use it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"runtime.{name}: tasks that need a container cannot be played")


def _plain(messages: Sequence[vf.Message]) -> list[Message]:
    """The texts of messages."""
    lists = [each.content for each in messages if isinstance(each.content, list)]
    if any(part.type != "text" for part in itertools.chain(*lists)):
        raise ValueError("messages with images cannot be played")
    return [{"role": each.role, "content": content_text(each.content)} for each in messages]
