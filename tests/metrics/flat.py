"""Metrics by name; each has a second entry, `<name>_valid`."""

from semrl_jax import metrics


def flat_metrics(*arguments, **options):
    """The result of `metrics.hidden_state_metrics`, flattened."""
    return metrics.flatten(metrics.hidden_state_metrics(*arguments, **options))
