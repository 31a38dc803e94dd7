"""A taskset of verifiers whose tasks need a container."""

import verifiers.v1 as vf

__all__ = ["ContainerTaskset"]


class ContainerTask(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime) -> None:
        await runtime.run(["ls"], {})

    @vf.reward
    async def zero(self, trace: vf.Trace) -> float:
        return 0.0


class ContainerTaskset(vf.Taskset[ContainerTask, vf.TasksetConfig]):
    def load(self):
        return [ContainerTask(vf.TaskData(prompt="Hello"), self.config.task)]
