"""GSM8K: the last number of the response must be the reference. 1 if it is, else 0.

`rewards.mode` has no influence.

Source: the flexible mode of verl's scorer for GSM8K.
"""

from __future__ import annotations

import re

from semrl_jax.rewards.verdict import Verdict, VerifierSettings
from semrl_jax.rewards.verifiers.gsm8k_strict import NUMBER, verdict_of_number

ANYWHERE = re.compile(NUMBER)


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the last number; `boxed` says whether there is one."""
    return verdict_of_number(ANYWHERE.findall(response), reference)
