"""A JAX profile of a few training steps, for TensorBoard, XProf and Perfetto."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import jax

from semrl_jax.training.loop import StepResult


def profiled(
    results: Iterator[StepResult], first_step: int, steps: range, directory: pathlib.Path
) -> Iterator[StepResult]:
    """Takes the steps from `first_step` on, and records those in `steps`.

    The profile has one marker per step and per phase. It is written to `plugins/profile/<time>/`
    when its last step ends, or when the training ends before that.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would be most of the file
    step = first_step
    with contextlib.ExitStack() as recording:
        while True:
            if step in (steps.start, first_step) and step in steps:
                jax.profiler.start_trace(
                    str(directory), create_perfetto_trace=True, profiler_options=options
                )
                recording.callback(jax.profiler.stop_trace)
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                result = next(results, None)
            step += 1
            if step not in steps:
                recording.close()  # before the caller records the result
            if result is None:
                return
            yield result
