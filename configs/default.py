"""Every setting with its default. Experiment files import this and change some settings.

`semrl_jax.settings` has the settings of each section: default, meaning, unit and rules. Suffixes
give units. Defaults of the method are those of VERL's launcher (arXiv 2509.23808 and its
repository), unless a comment gives a reason.
"""

import ml_collections

from semrl_jax.settings.config import default_config
from semrl_jax.support.fields import part_of

__all__ = ["at_least", "get_config", "part_of"]


def at_least(size, least):
    """The larger one; for numbers or references, as `part_of`."""
    return (size + least + abs(size - least)) // 2


def get_config() -> ml_collections.ConfigDict:
    """The default configuration; `semrl_jax.runs.validate` checks combinations of settings."""
    return default_config()
