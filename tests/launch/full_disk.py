"""Runs launch.train with a disk that appears full for a while. Needs no privileges.

    python -m tests.launch.full_disk checkpoints:2:3 --config=... --workdir=...
    python -m tests.launch.full_disk row:3 --config=... --workdir=...

In the first example, the system refuses files larger than LIMIT (RLIMIT_FSIZE) while checkpoints 2
to 3 are written. In the second, the beginning of the third row goes to metrics.jsonl and the row
itself to /dev/full.
"""

import itertools
import resource
import sys

LIMIT = 100_000  # bytes; above the logs of a small run, below its largest array


def refuse_checkpoints(first: int, last: int) -> None:
    from semrl_jax.runs.checkpoints import Checkpoints

    save, calls = Checkpoints.save, itertools.count(1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limited(self, state):
        self.wait()
        full = first <= next(calls) <= last
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT if full else hard, hard))
        save(self, state)

    Checkpoints.save = limited


def refuse_row(number: int) -> None:
    from semrl_jax.runs.records import MetricWriter

    write, calls = MetricWriter.write, itertools.count(1)

    def limited(self, step, scalars):
        if next(calls) == number:
            self._out.write('{"advantage')
            self._out.close()
            self._out = open("/dev/full", "a")  # noqa: SIM115 - closed by the writer
        write(self, step, scalars)

    MetricWriter.write = limited


def main() -> int:
    what, *numbers = sys.argv.pop(1).split(":")
    from launch import cli, train

    def train_limited() -> int:
        {"checkpoints": refuse_checkpoints, "row": refuse_row}[what](*map(int, numbers))
        return train.main()

    return cli.run(train_limited, train.__doc__)


if __name__ == "__main__":
    main()
