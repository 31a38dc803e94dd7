"""How benchmarks/step.py drives a system: one line of input is one training step.

A process is started with the path of a JSON file, the work. It prints one JSON line when it is
ready and one after every step. It sleeps between steps. The output of libraries goes to standard
error.
"""

import json
import os
import sys


class Driver:
    """Reads the work, waits for steps and reports them."""

    def __init__(self):
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        with open(sys.argv[1], encoding="utf-8") as file:
            self.work = json.load(file)

    def report(self, **row):
        """Prints one JSON line."""
        print(json.dumps(row), file=self._output, flush=True)

    def wait(self):
        """Returns when the next step is asked for. Ends the process when no more will be."""
        if not sys.stdin.readline():
            os._exit(0)  # peers have threads that would wait for more data
