"""Float64 NumPy formulas of the metrics: loops, one decomposition a value, no shared work."""

import itertools

import numpy as np

EPS32 = float(np.finfo(np.float32).eps)


def singular_values(rows):
    rows = np.asarray(rows, np.float64)
    return np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)


def log_effective_rank(rows):
    if len(rows) < 2:
        return 0.0
    sigma = singular_values(rows)
    p = sigma / (sigma.sum() + 1e-8)
    return float(-np.sum(p * np.log(p + 1e-8)))


def effective_rank(rows):
    return float(np.exp(log_effective_rank(rows))) if len(rows) >= 2 else 0.0


def traditional_rank(rows):
    if len(rows) < 2:
        return 0.0
    sigma = singular_values(rows)
    return float(np.sum(sigma > sigma.max() * max(np.shape(rows)) * EPS32))


def response_entropy(rows, order=1.0001):
    if len(rows) < 2:
        return 0.0
    eigenvalues = singular_values(rows) ** 2
    eigenvalues = eigenvalues[eigenvalues > 1e-8]
    if len(eigenvalues) == 0:
        return 0.0
    q = eigenvalues / eigenvalues.sum()
    return float(np.log(np.sum(q**order)) / (1 - order))


def curvature(rows):
    rows = np.asarray(rows, np.float64)
    steps = [b - a for a, b in itertools.pairwise(rows) if np.linalg.norm(b - a) > 1e-6]
    angles = []
    for u, v in itertools.pairwise(steps):
        cosine = u @ v / np.linalg.norm(u) / np.linalg.norm(v)
        angles.append(np.arccos(np.clip(cosine, -1.0, 1.0)))
    return float(np.mean(angles)) if angles else 0.0


METRICS = {
    "effective_rank": effective_rank,
    "log_effective_rank": log_effective_rank,
    "traditional_rank": traditional_rank,
    "response_entropy": response_entropy,
    "curvature": curvature,
}


def series(metric, rows, stride, window):
    """m_1, ..., m_K."""
    if window == "exact":
        return [metric(rows[: j * stride]) for j in range(1, len(rows) // stride + 1)]
    tail = rows[-512:] if window == "release" else rows
    if len(tail) < 2 * stride:
        return []
    values = [metric(tail[: t + 1]) for t in range(stride, len(tail), stride)]
    return values + ([metric(rows)] if window == "later" else [])


def orders(values):
    """First and second order of a series, None where it is too short."""
    deltas = [values[j] - np.mean(values[:j]) for j in range(1, len(values))]
    rises = [b - a for a, b in itertools.pairwise(deltas)]
    return (float(np.mean(deltas)) if deltas else None, float(np.mean(rises)) if rises else None)


def count_frequencies(sequences, vocab_size=16):
    """Relative frequency of every token id, as the release has it, in sequences taken together."""
    counts = np.zeros(vocab_size)
    for sequence in sequences:
        for token_id in sequence:
            counts[token_id] += 1
    return counts / counts.sum()


def count_entropy(sequences):
    return -sum(p * np.log(p) for p in count_frequencies(sequences) if p > 0)


def count_confidence(sequences):
    largest = np.sort(count_frequencies(sequences))[::-1][:5]
    return -float(np.mean([np.log(p) for p in largest if p > 0]))
