"""Runs launch.train and sends it a real SIGKILL during one of its phases.

    python -m tests.launch.killed PHASE:CALL:DELAY_S --config=... --workdir=...

A thread kills the process DELAY_S seconds after the start of the CALL-th call (from 1) of the
PHASE's function. Until then everything continues to run.
"""

import functools
import importlib
import itertools
import os
import signal
import sys
import threading
import time

RUNS, SAMPLING = "semrl_jax.runs", "semrl_jax.sampling"
# Where the function is looked up when it is called: "module:name" or "module:Class.name".
PHASES = {
    "warm_start": f"{RUNS}.starting_model:fit_demonstrations",
    "warm_start_saved": f"{RUNS}.starting_model:save_directory",
    "resume": f"{RUNS}.checkpoints:Checkpoints.restore",
    "cut_log": f"{RUNS}.records:MetricWriter.__init__",
    "offer": f"{SAMPLING}.ahead:Ahead.offer",
    "sync_weights": f"{SAMPLING}.sampler:Sampler.sync_weights",
    "evaluate": "semrl_jax.evaluation.evaluator:Evaluator.evaluate",
    "generate": f"{SAMPLING}.source:Rounds.next",
    "part": f"{SAMPLING}.in_parts:InParts._part",
    "turn": "semrl_jax.environments.pool:Episode.step",
    "score": "semrl_jax.rewards.verifier_pool:VerifierPool.submit",
    "update": "semrl_jax.training.learner:Learner.update",
    "rollouts": f"{RUNS}.run:write_rollouts",
    "row": f"{RUNS}.records:MetricWriter.write",
    "save": f"{RUNS}.checkpoints:Checkpoints.save",
    "seal": f"{RUNS}.checkpoints:Checkpoints._seal",
    "manifest": f"{RUNS}.checkpoints:write_manifest",
    "prune": f"{RUNS}.checkpoints:Checkpoints._prune",
    "report": f"{RUNS}.run:write_report",
}


def arm(phase: str, call: int, delay_s: float) -> None:
    """Wraps the phase's function, so that its call starts the kill."""
    module, name = PHASES[phase].split(":")
    *outer, name = name.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    function = getattr(owner, name)
    calls = itertools.count(1)

    def kill() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if next(calls) == call:
            print(f"killed in {phase}", flush=True)
            threading.Thread(target=kill, daemon=True).start()
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def main() -> int:
    phase, call, delay_s = sys.argv.pop(1).split(":")
    from launch import cli, train

    def train_armed() -> int:
        arm(phase, int(call), float(delay_s))
        return train.main()

    return cli.run(train_armed, train.__doc__)


if __name__ == "__main__":
    main()
