"""ER of the states as they are: the mean is not subtracted. See `selection`."""

import dataclasses

from semrl_jax.metrics.kinds import effective_rank

METRIC = dataclasses.replace(effective_rank.METRIC, centred=False, of_sums=None)
