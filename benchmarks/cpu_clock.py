"""CPU seconds of the phases of a step."""

import contextlib
import time
from collections.abc import Iterator
from unittest import mock

from semrl_jax.support.clock import Clock
from semrl_jax.training import loop


class CpuClock(Clock):
    """Adds `cpu/<phase>_s`: CPU seconds of all threads of the process during the phase."""

    def __init__(self, *args):
        super().__init__(*args)
        self._cpu_started = time.process_time()
        self._cpu_s: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.process_time()
        try:
            with super().__call__(phase):
                yield
        finally:
            used = time.process_time() - started
            self._cpu_s[phase] = self._cpu_s.get(phase, 0.0) + used

    def scalars(self) -> dict[str, float]:
        cpu_s = self._cpu_s | {"step": time.process_time() - self._cpu_started}
        return super().scalars() | {f"cpu/{phase}_s": used for phase, used in cpu_s.items()}


def installed() -> contextlib.AbstractContextManager:
    """Within the block, the train loop times its steps with this clock."""
    return mock.patch.object(loop, "Clock", CpuClock)
