"""A taskset of verifiers with an environment of two turns, and a harness in its process."""

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["DistinctEnv", "DistinctTaskset", "LoopHarness"]


class DistinctTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def distinct(self, trace: vf.Trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return len(set(said)) / 30


class DistinctTaskset(vf.Taskset[DistinctTask, vf.TasksetConfig]):
    def load(self):
        return [
            DistinctTask(vf.TaskData(prompt=f"Write about w{n}."), self.config.task)
            for n in range(12)
        ]


class DistinctEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("More!")


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        _, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[message_to_wire(each) for each in messages]
            )
        return vf.ProgramResult(0, "", "")
