"""Metrics by name, with `<name>_valid` beside each."""

from semrl_jax import metrics


def flat_metrics(*arguments, **options):
    """As `metrics.hidden_state_metrics`."""
    return metrics.flatten(metrics.hidden_state_metrics(*arguments, **options))
