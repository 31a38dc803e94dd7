"""Settings of `config.profile`."""

from __future__ import annotations

import dataclasses
import re

from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Profile:
    steps: str = setting(
        "",
        "3:6 profiles the steps 3, 4 and 5 into WORKDIR/profile; empty: none. docs/performance.md",
    )


def profiled_steps(profile: Section) -> range:
    """The steps of `profile.steps`, maybe none; UserError if it is not FIRST:END."""
    text = profile["steps"]
    if not text:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if not found:
        raise UserError(
            f"profile.steps={text!r} must be FIRST:END, as 3:6 for 3, 4 and 5, or empty."
        )
    steps = range(int(found[1]), int(found[2]))
    if not steps:
        raise UserError(
            f"profile.steps={text!r} has no step; {steps.start}:{steps.start + 1} is one."
        )
    return steps


check = profiled_steps
