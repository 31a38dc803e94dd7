"""An environment of verifiers with a scripted user, and an infinite taskset."""

import itertools

import verifiers.v1 as vf

__all__ = ["UserEnv", "UserTaskset"]


class UserData(vf.TaskData):
    turns: list[str]


class UserTask(vf.Task[UserData]):
    @vf.reward
    async def repeated(self, trace: vf.Trace) -> float:
        said = [message.content for message in trace.assistant_messages]
        return sum(a == b for a, b in zip(said, self.data.turns)) / len(self.data.turns)


class UserTaskset(vf.Taskset[UserTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield UserTask(UserData(turns=[f"{n}", f"{n + 1}", f"{n + 2}"]), self.config.task)


class UserEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for text in task.data.turns:
                segment = await interaction.turn(text)
                if segment.last_reply == "stop":
                    interaction.trace.stop("asked")

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("stopped", -1.0 if trace.stop_condition else 0.0)
