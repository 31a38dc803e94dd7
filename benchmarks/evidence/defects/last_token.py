"""D2: the bonus is on the last token of a response alone."""

from semrl_jax.algorithms import credit
from semrl_jax.shaping import shape_advantages
from semrl_jax.training.probes import Probe


def shape(*arrays, **options):
    return shape_advantages(*arrays, **options | {"reproduce_release": True})


def probe(tools):
    credit.shape_advantages = shape
    return Probe()
