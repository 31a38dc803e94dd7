"""Float64 loops of the advantage estimators and losses."""

import math

import numpy as np


def group_relative(rewards, epsilon=1e-6):
    result = np.zeros(np.shape(rewards))
    for p, group in enumerate(np.asarray(rewards, np.float64)):
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        result[p] = [(r - mean) / (std + epsilon) for r in group]
    return result


def generalized(rewards, values, mask, gamma, lam):
    advantages, returns = np.zeros(np.shape(rewards)), np.zeros(np.shape(rewards))
    for i in range(len(rewards)):
        next_value = next_advantage = 0.0
        for t in reversed(range(len(rewards[i]))):
            if not mask[i][t]:
                continue
            delta = float(rewards[i][t]) + gamma * next_value - float(values[i][t])
            next_advantage = delta + gamma * lam * next_advantage
            next_value = float(values[i][t])
            advantages[i, t] = next_advantage
            returns[i, t] = next_advantage + next_value
    return advantages, returns


def whiten(values, mask, epsilon=1e-8):
    valid = np.asarray(values, np.float64)[mask]
    result = np.zeros(np.shape(values))
    if len(valid):
        variance = valid.var(ddof=1) if len(valid) > 1 else 0.0
        result[mask] = (valid - valid.mean()) / math.sqrt(variance + epsilon)
    return result


def kl(x, estimator):
    return {
        "kl": x,
        "abs": abs(x),
        "mse": x * x / 2,
        "low_var_kl": min(max(math.exp(min(-x, 700.0)) + x - 1, -10.0), 10.0),
    }[estimator.rstrip("+")]


def policy_loss(logprobs, entropy, old, ref, advantages, weights, *, eps, c_kl, c_ent, estimator):
    """Loss, clip fraction, approximate KL, entropy and KL."""
    pg = clipped_share = approx_kl = mean_entropy = mean_kl = 0.0
    for i, t in zip(*np.nonzero(weights)):
        weight, advantage = float(weights[i, t]), float(advantages[i, t])
        ratio = math.exp(float(logprobs[i, t]) - float(old[i, t]))
        plain = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - eps), 1 + eps)
        pg += weight * max(plain, clipped)
        clipped_share += weight * (clipped > plain)
        approx_kl += weight * (float(old[i, t]) - float(logprobs[i, t]))
        mean_entropy += weight * float(entropy[i, t])
        mean_kl += weight * kl(float(logprobs[i, t]) - float(ref[i, t]), estimator)
    loss = pg - c_ent * mean_entropy + c_kl * mean_kl
    return loss, clipped_share, approx_kl, mean_entropy, mean_kl


def importance_weights(old, rollout, mask, level, cap, floor=0.0, outside="truncate"):
    """Weights, 1 where masked out, and the share of tokens outside the bounds."""
    weights, num_outside = np.ones(np.shape(old)), 0
    for i, row in enumerate(mask):
        counted = [t for t, counts in enumerate(row) if counts]
        differences = {t: float(old[i][t]) - float(rollout[i][t]) for t in counted}
        for t in counted:
            total = sum(differences.values())
            statistic = {
                "token": math.exp(min(differences[t], 700.0)),
                "sequence": math.exp(min(total, 700.0)),
                "geometric": math.exp(min(total / len(counted), 700.0)),
                "total_variation": abs(math.exp(float(old[i][t])) - math.exp(float(rollout[i][t]))),
            }[level]
            inside = floor <= statistic <= cap
            num_outside += not inside
            if outside == "truncate":
                weights[i, t] = min(max(statistic, floor), cap)
            else:
                weights[i, t] = (statistic if level in ("token", "sequence") else 1.0) * inside
    return weights, num_outside / max(np.sum(mask), 1)


def surrogate_terms(name, logprobs, old, advantages, mask, *, low, high, dual, tau):
    """The loss of each token that counts, and whether a bound changed it; rows are responses."""
    terms, changed = np.zeros(np.shape(mask)), np.zeros(np.shape(mask), bool)
    for i, row in enumerate(mask):
        counted = [t for t, counts in enumerate(row) if counts]
        differences = [float(logprobs[i][t]) - float(old[i][t]) for t in counted]
        for t, difference in zip(counted, differences):
            a, logprob, q = float(advantages[i][t]), float(logprobs[i][t]), math.exp(old[i][t])
            if name == "reinforce":
                terms[i, t] = -a * logprob
                continue
            if name == "rec":  # ring, weighted, with far bounds 0.3 and 0.5
                ratio = math.exp(difference)
                counts = 1 - low <= ratio <= 1 + high
                counts |= a > 0 and ratio <= 1 - 0.3
                counts |= a < 0 and ratio >= 1 + 0.5
                terms[i, t], changed[i, t] = -a * ratio * logprob * counts, not counts
                continue
            if name == "real":
                margin = math.copysign(1, a) * sum(differences) / len(counted) / 0.7
                terms[i, t] = abs(a) * math.log(1 + math.exp(-margin))
                continue
            if name == "opmd":
                penalty = tau / 2 * sum(differences) ** 2 / len(counted)
                terms[i, t] = (-a * logprob + penalty) / max(1.0, tau)
                continue
            lower, upper = 1 - low, 1 + high
            if name == "dcpo":
                lower = 0.5 + 0.5 * math.sqrt(max(1 - 4 * low / q, 0))
                upper = min(0.5 + 0.5 * math.sqrt(1 + 4 * high / q), 10)
            ratio = math.exp(sum(differences) / len(counted) if name == "gspo" else difference)
            bounded = min(max(ratio, lower), upper)
            if name == "cispo":
                terms[i, t], changed[i, t] = -bounded * a * logprob, bounded != ratio
                continue
            terms[i, t], changed[i, t] = max(-a * ratio, -a * bounded), -a * bounded > -a * ratio
            if dual and a < 0 and terms[i, t] > -a * dual:
                terms[i, t], changed[i, t] = -a * dual, True
    return terms, changed


def turns(row, ends=()):
    """The positions of each turn, which is a run of True, or a step of one, with given ends."""
    found = []
    for t, counts in enumerate(row):
        if counts and (t == 0 or not row[t - 1] or t - 1 in ends):
            found.append([])
        if counts:
            found[-1].append(t)
    return found


def by_turn(estimate, rewards, mask, group_size, places=None):
    """Advantages of the tokens of turns; `rewards` has a list per response, one for each turn.

    `estimate(returns, lengths)` gets the returns of the turns t of a group.
    """
    found = np.zeros(np.shape(mask))
    places = places or [turns(row) for row in mask]
    for first in range(0, len(mask), group_size):
        group = range(first, first + group_size)
        for t in range(max(len(places[i]) for i in group)):
            present = [i for i in group if t < len(places[i])]
            returns = np.array([math.fsum(rewards[i][t:]) for i in present])
            lengths = np.array([len(places[i][t]) for i in present])
            for i, advantage in zip(present, estimate(returns, lengths)):
                found[i, places[i][t]] = advantage
    return found


def generalized_by_turn(rewards, values, mask, gamma, lam, places=None):
    """Returns of turns as steps, and advantages: the return less the value before each token.

    `rewards` [B, T] may have parts at any token of a turn; they follow it undiscounted.
    """
    advantages, returns = np.zeros(np.shape(mask)), np.zeros(np.shape(mask))
    for i, of_row in enumerate(places or [turns(row) for row in mask]):
        next_value = next_advantage = 0.0
        for turn in reversed(of_row):
            later = gamma * next_value + gamma * lam * next_advantage
            for t in reversed(turn):
                later += float(rewards[i][t])
                returns[i, t] = later
                advantages[i, t] = later - float(values[i][t])
            next_value, next_advantage = float(values[i][turn[0]]), advantages[i, turn[0]]
    return advantages, returns
