"""One of two processes with disks of their own, which restore a state and save the next two.

python -m tests.runs.apart INDEX PORT DIRECTORY
"""

import os
import pathlib
import sys

import jax
import numpy as np

from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.lifecycle import join_others
from semrl_jax.runs.workdir import open_workdir_together
from tests.runs.test_checkpoints import at_step, make_state
from tests.tiny import tiny_config


def step_of(state):
    return int(np.asarray(state.step.addressable_data(0)))


def main(index, port, directory):
    config = tiny_config()
    config.distributed.coordinator = f"127.0.0.1:{port}"
    config.distributed.num_processes, config.distributed.process_id = 2, index
    config.checkpoints.copy_to, config.checkpoints.keep = str(directory / "store"), 1
    peers, _ = join_others(config, os.environ)
    workdir = open_workdir_together(peers, str(directory / f"disk{index}" / "run"), config)
    assert not workdir.shared
    first = make_state({"replica": 1, "fsdp": 2, "sequence": 1, "tensor": 1})

    def state_at(step):
        return at_step(first, step)._replace(step=first.step + step)  # of all processes

    checkpoints = Checkpoints(
        workdir.path / "checkpoints", **config.checkpoints, peers=peers, shared=workdir.shared
    )
    restored, begin = checkpoints.restore(first), 0
    if restored is not None:
        begin = step_of(restored)
        pair = (tree._replace(position=None) for tree in (restored, state_at(begin)))
        for found, wanted in zip(*map(jax.tree.leaves, pair), strict=True):
            for ours, theirs in zip(found.addressable_shards, wanted.addressable_shards):
                np.testing.assert_array_equal(ours.data, theirs.data)
    for step in (begin + 1, begin + 2):
        checkpoints.save(state_at(step))
        assert not checkpoints.failure()
    checkpoints.close()
    peers.gather("end", 0)
    workdir.close()
    peers.close()
    print(f"restored {begin}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
