"""A taskset of verifiers: single-turn tasks, whose policy can call tools with a state."""

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsState(vf.State):
    looks: int = 0


class WordsData(vf.TaskData):
    answer: str


class WordsTools(vf.Toolset[vf.ToolsetConfig, WordsState]):
    TOOL_PREFIX = "words"

    async def setup_task(self, task: WordsData) -> None:
        self.answer = task.answer

    @vf.tool
    def look(self, position: int) -> str:
        """A letter of the word."""
        self.state.looks += 1
        return self.answer[position]


class WordsTask(vf.Task[WordsData, WordsState]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [WordsTools(vf.ToolsetConfig())]

    @vf.stop
    async def looked_often(self, trace: vf.Trace) -> bool:
        return trace.state.looks >= 3

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def looked(self, trace: vf.Trace) -> float:
        return trace.state.looks / 10


class WordsConfig(vf.TasksetConfig):
    count: int = 20


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> list[WordsTask]:
        return [
            WordsTask(
                WordsData(prompt=f"Word {n}?", system_prompt="Guess.", answer=f"w{n:02}"),
                self.config.task,
            )
            for n in range(self.config.count)
        ]
