"""Float64 loops of the shaping: one response, one token at a time."""

import math

import numpy as np


def signal(values, baselines, explore, exploit, guidance, *, gain=2.0, mixing="adaptive"):
    """Phi / eta of one response; the arguments are in the order of the indicators."""
    deviations = [
        min(max((m - mu) / (abs(mu) + 1e-8), -5.0), 5.0) for m, mu in zip(values, baselines)
    ]
    phi = 0.0
    for k, deviation in enumerate(deviations[: len(explore)]):
        if mixing == "sum":
            weight = explore[k] + exploit[k]
        else:
            beta = 1 / (1 + math.exp(-gain * deviations[guidance])) if mixing == "adaptive" else 0.5
            weight = beta * explore[k] + (1 - beta) * exploit[k]
        phi += weight * math.tanh(deviation)
    return phi


def shaped(advantages, mask, phis, kappa, tokens="all"):
    """Advantages plus their bonus; phi is None for a response that gets none."""
    result = np.zeros(np.shape(advantages))
    for i in range(len(advantages)):
        valid = [t for t in range(len(mask[i])) if mask[i][t]]
        for t in valid:
            result[i, t] = advantages[i][t]
            if phis[i] is not None and (tokens == "all" or t == valid[-1]):
                result[i, t] += min(max(phis[i], 0.0), abs(advantages[i][t]) / kappa)
    return result


def baselines(means, alpha, ema_init, ema_lag):
    """Baseline at each step, None while there is none; means[t] is None for an empty batch."""
    result, mu = [], None if ema_init == "first_batch" else 0.0
    for step in range(len(means)):
        seen = step - ema_lag
        if seen >= 0 and means[seen] is not None:
            mu = means[seen] if mu is None else (1 - alpha) * mu + alpha * means[seen]
        result.append(mu)
    return result
