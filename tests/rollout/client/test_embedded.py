"""A replica inside the trainer's process."""

import asyncio

from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FakeEngine


def test_it_ends_where_a_loop_runs():
    """A notebook's cell runs in a thread whose event loop is running."""

    async def cell():
        for _ in range(2):
            with EmbeddedReplica(FakeEngine()) as replica:
                assert replica.address

    asyncio.run(cell())
