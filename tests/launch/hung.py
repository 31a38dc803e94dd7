"""Runs launch.train with a main thread that hangs just before its second update.

    python -m tests.launch.hung --config=... --workdir=...

Its other threads continue, and so do its heartbeats. The other processes wait inside the program.
"""

import itertools
import time


def main() -> int:
    from launch import cli, train
    from semrl_jax.training import learner

    update, calls = learner.update_all, itertools.count(1)

    def hanging(*args, **kwargs):
        if next(calls) == 2:
            print("hangs", flush=True)
            time.sleep(3600)
        return update(*args, **kwargs)

    learner.update_all = hanging
    return cli.run(train.main, train.__doc__)


if __name__ == "__main__":
    main()
