"""Gives a rollout server the weights of a policy, and newer ones of its run, without a trainer."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable

from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.rollout.server import RolloutServer
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.policies import PolicySource, find_policies
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import names_run
from semrl_jax.types import WeightVersion

ATTEMPT = "served"  # the digest tells weights apart, so that those of a new start are the same
CHECK_S = 5.0  # between two looks for a newer checkpoint


class Followed:
    """The newest policy of a path, which `launch.rollout --policy` names.

    Raises:
      UserError: if there is none, or it does not fit.
    """

    def __init__(self, path: str, announce: Callable[[str], None]):
        self._path, self._announce = path, announce
        (self.source,) = find_policies(path, None)

    async def feed(
        self, server: RolloutServer, ready: Callable[[], None], policy: models.Policy, mesh: Mesh
    ) -> None:
        """Loads the policy, calls `ready`, and loads each newer checkpoint until it is cancelled.

        Raises UserError if the first one cannot be loaded.
        """
        serves = None
        while True:
            if self.source != serves:
                try:
                    await self._load(server, policy, mesh)
                    if serves is None:
                        ready()
                    serves = self.source
                except Exception as error:  # the trainer may remove the checkpoint meanwhile
                    if serves is None:
                        raise
                    reason = " ".join(str(error).split())
                    self._announce(f"{reason:.300} The weights of {serves.name} stay.")
            if not names_run(self._path):
                return
            await asyncio.sleep(CHECK_S)
            self.source = await asyncio.to_thread(self._newest)

    async def _load(self, server: RolloutServer, policy: models.Policy, mesh: Mesh) -> None:
        params = await asyncio.to_thread(self.source.params, policy, mesh)
        name = pathlib.Path(self._path).absolute().name
        version = WeightVersion(name, ATTEMPT, self.source.step, "")
        await server.load(
            version, lambda dtype: models.iterate_hf_tensors(params, policy.config, dtype)
        )
        self._announce(f"serves {self.source.name}")

    def _newest(self) -> PolicySource:
        """The run's newest policy; while it has no valid checkpoint, the one that is served."""
        try:
            served = self.source.checkpoint
            # To find it valid again would read all of it, every few seconds.
            if served and checkpoint_steps(served.parent)[-1:] == [self.source.step]:
                return self.source
            (source,) = find_policies(self._path, None)
            return source
        except (UserError, FileNotFoundError):  # the run may have been removed
            return self.source
