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


def shaped(advantages, mask, phis, kappa, last_only=False):
    """Advantages plus their bonus; phi is None for a response that gets none."""
    result = np.zeros(np.shape(advantages))
    for i in range(len(advantages)):
        valid = [t for t in range(len(mask[i])) if mask[i][t]]
        for t in valid:
            result[i, t] = advantages[i][t]
            if phis[i] is not None and (not last_only or t == valid[-1]):
                result[i, t] += min(max(phis[i], 0.0), abs(advantages[i][t]) / kappa)
    return result


def baselines(means, alpha, release):
    """Baseline at each step, None while there is none; means[t] is None for an empty batch."""
    result, mu = [], 0.0 if release else None
    for step in range(len(means)):
        seen = step - (2 if release else 1)
        if seen >= 0 and means[seen] is not None:
            mu = means[seen] if mu is None else (1 - alpha) * mu + alpha * means[seen]
        result.append(mu)
    return result


def with_zero(row, name):
    """0.0 for an order of a response that has the metric itself but is too short for the order."""
    metric = name.removesuffix("_velocity").removesuffix("_acceleration")
    too_short = row[name] is None and metric != name and row.get(metric, 0.0) is not None
    return 0.0 if too_short else row[name]


def run(
    batches, *, target, mixing, scale, reproduce_release, alpha, gain, eta, kappa, indicators,
    explore_weights, exploit_weights, guidance,
):  # fmt: skip
    """Some steps under any options; yields what each step makes and the baselines it leaves.

    A batch has `advantages` [B, T], `mask` [B, T], `reward` and `values`: for each indicator the B
    values, None where a response is too short for one, NaN where it is not finite.
    """
    tracked = [*indicators, *([] if guidance in indicators else [guidance])]
    used = [n for n, a, b in zip(indicators, explore_weights, exploit_weights) if a or b]
    used += [guidance] if mixing == "adaptive" else []
    mu, waiting, q = {}, {}, 0.0
    for step, batch in enumerate(batches):
        num = len(batch["mask"])
        rows = [{name: batch["values"][name][i] for name in tracked} for i in range(num)]
        if reproduce_release:
            rows = [{name: with_zero(row, name) for name in row} for row in rows]
        rows = [
            {
                name: None if value is None or math.isnan(value) else value
                for name, value in row.items()
            }
            for row in rows
        ]
        valid = [all(row[name] is not None for name in used) for row in rows]
        known = {name: mu.get(name, 0.0) for name in tracked}
        active = step > 0 and (reproduce_release or all(name in mu for name in used))
        strength = eta * (1 - (q + 1) / 2) if scale == "performance" else eta
        phis, deviations = [], {name: [] for name in tracked}
        for row, is_valid in zip(rows, valid):
            if not (is_valid and active):
                phis.append(None)
                continue
            place = [0.0 if row[name] is None else row[name] for name in tracked]
            phi = signal(
                place, [known[name] for name in tracked], explore_weights, exploit_weights,
                tracked.index(guidance), gain=gain, mixing=mixing,
            )  # fmt: skip
            phis.append(strength * phi)
            for name in tracked:
                if row[name] is not None and (reproduce_release or name in mu):
                    d = (row[name] - known[name]) / (abs(known[name]) + 1e-8)
                    deviations[name].append(min(max(d, -5.0), 5.0))
        given = phis if target in ("advantage", "both") else [None] * num
        result = shaped(batch["advantages"], batch["mask"], given, kappa, reproduce_release)
        plain = shaped(batch["advantages"], batch["mask"], [None] * num, kappa)
        counts = np.asarray(batch["mask"])
        cut, could = 0, 0
        for i in range(num):
            places = np.flatnonzero(counts[i])
            for t in places[-1:] if reproduce_release else places:
                if given[i] is not None:
                    could += 1
                    cut += max(given[i], 0.0) > abs(plain[i, t]) / kappa
        bonus = np.where(counts, result - plain, 0.0).sum() / max(counts.sum(), 1)
        size = np.abs(plain).sum() / max(counts.sum(), 1)
        report = {
            "shaping/active": float(active),
            "shaping/valid_fraction/mean": np.mean(valid),
            "shaping/phi/mean": _mean([phi for phi in phis if phi is not None]),
            "shaping/bonus/mean": bonus,
            "shaping/bonus_to_advantage/mean": bonus / size if size else 0.0,
            "shaping/clipped_fraction/mean": cut / could if could else 0.0,
            "shaping/reward_ema": q,
            "shaping/scale": strength,
        }
        for name in tracked:
            report[f"shaping/deviation/{name}/mean"] = _mean(deviations[name])
            report[f"shaping/baseline/{name}"] = known[name]
        yield result, [phi or 0.0 for phi in phis], report
        kept = [row for row, is_valid in zip(rows, valid) if is_valid]
        means = {name: [row[name] for row in kept if row[name] is not None] for name in tracked}
        means = {name: _mean(found) for name, found in means.items() if found}
        taken, waiting = (waiting, means) if reproduce_release else (means, {})
        for name, mean in taken.items():
            if not reproduce_release and name not in mu:
                mu[name] = mean
            else:
                mu[name] = (1 - alpha) * mu.get(name, 0.0) + alpha * mean
        if not reproduce_release or step > 0:
            q = (1 - alpha) * q + alpha * batch["reward"]


def released(batches, alpha, gain, eta, kappa, *, adaptive, fixed_scale):
    """Steps of the reference implementation with reward and advantage both shaped.

    Written after its own order of things, not after `run`: the values of three indicators, zeros
    for what is too short; baselines and performance updated only on steps that have an earlier
    one, with that earlier step's means.

    Yields:
      What is added to each reward, and to the advantage of each response's last token.
    """
    mids, performance, last_means = np.zeros(3), 0.0, None
    for batch in batches:
        values = np.asarray(batch["values"], float)  # [B, 3] in the order ERA, ERV, ER
        added = np.zeros(len(values))
        if last_means is not None:
            factor = eta if fixed_scale else eta * (1 - (performance + 1) / 2)
            deviation = np.clip((values - mids) / (np.abs(mids) + 1e-8), -5, 5)
            tendency = 1 / (1 + np.exp(-gain * deviation[:, 0])) if adaptive else 0.5
            added = np.tanh(deviation[:, 2]) * tendency + np.tanh(deviation[:, 1]) * (1 - tendency)
            added = factor * added
            performance = (1 - alpha) * performance + alpha * batch["reward"]
            mids = (1 - alpha) * mids + alpha * last_means
        last_means = values.mean(axis=0)
        yield added, np.minimum(np.maximum(added, 0), np.abs(batch["last_advantages"]) / kappa)


def _mean(values):
    return float(np.mean(values)) if len(values) else 0.0
