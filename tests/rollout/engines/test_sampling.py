"""Sampling against a float64 oracle and against its own distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.rollout.engines import sampling
from semrl_jax.rollout.engines.sampling import sample_tokens, sampling_logits, split_sampling
from semrl_jax.types import SamplingParams
from tests.cases import slow_after


def draw(logits, keys, token_index, sampling):
    kind, values = split_sampling(sampling)
    return sample_tokens(logits, keys, token_index, values, kind=kind)


def allowed_f64(logits, temperature, top_k, top_p, min_p=0.0):
    """Which tokens may be drawn, and the log-probabilities among them."""
    scaled = logits.astype(np.float64) / temperature
    with np.errstate(divide="ignore"):
        keep = scaled >= scaled.max() + np.log(min_p)
    scaled = np.where(keep, scaled, -np.inf)
    if top_k:
        keep &= scaled >= np.sort(scaled)[-min(top_k, len(scaled))]
    scaled = np.where(keep, scaled, -np.inf)
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    total, nucleus = 0.0, np.zeros(len(scaled), bool)
    for index in np.argsort(-probabilities, kind="stable"):
        if top_p < 1 and total >= top_p:
            break
        nucleus[index] = True
        total += probabilities[index]
    kept = np.where(nucleus & keep, probabilities, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(kept / kept.sum())


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.35, 0.001, 1e-60]),  # the last is 0 in float32
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_sampling_logits_match_float64(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(size=(1, 20)).astype(np.float32) * 3
    kind, values = split_sampling(SamplingParams(1, temperature, top_p, top_k, min_p=min_p))
    actual = sampling_logits(jnp.asarray(logits), values, kind=kind)
    expected = allowed_f64(logits[0], temperature, top_k, top_p, min_p)
    actual = np.asarray(jax.nn.log_softmax(actual, axis=-1))[0]
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    finite = np.isfinite(expected)
    # Float32 rounding of logits near 10 / 0.3.
    np.testing.assert_allclose(actual[finite], expected[finite], atol=2e-5)


@pytest.mark.parametrize("sampling", [SamplingParams(1), SamplingParams(1, 0.7, 0.8, 5)])
def test_draws_follow_the_distribution_they_report(sampling):
    """Chi-square of 20,000 draws, one key each; the 99.99 % quantile would fail 1 run in 10^4,
    and the keys are fixed."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=12), jnp.float32)
    num = 20_000
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), num))
    tokens, logprobs, raw = jax.jit(functools.partial(draw, sampling=sampling))(
        jnp.broadcast_to(logits, (num, 12)), keys, jnp.zeros(num, jnp.int32)
    )
    expected = np.exp(
        allowed_f64(np.asarray(logits), sampling.temperature, sampling.top_k, sampling.top_p)
    )
    counts = np.bincount(tokens, minlength=12)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = np.sum((counts - num * expected)[possible] ** 2 / (num * expected[possible]))
    assert chi_square < 40  # 99.99 % quantile with 11 degrees of freedom is 37.4
    np.testing.assert_allclose(np.exp(logprobs), expected[np.asarray(tokens)], rtol=1e-5)
    np.testing.assert_allclose(
        raw, np.asarray(jax.nn.log_softmax(logits))[np.asarray(tokens)], atol=1e-6
    )


@pytest.mark.slow
def test_a_token_depends_on_its_own_key_and_index_alone():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)), jnp.float32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 6))
    index = jnp.arange(6, dtype=jnp.int32)
    sampling = SamplingParams(1)
    whole, _, _ = draw(logits, keys, index, sampling)
    order = np.array([4, 1, 5])
    part, _, _ = draw(logits[order], keys[order], index[order], sampling)
    np.testing.assert_array_equal(part, np.asarray(whole)[order])
    later, _, _ = draw(logits, keys, index + 1, sampling)
    assert (np.asarray(later) != np.asarray(whole)).any()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ((0.0, 0.5, 3), "greedy"), ((1e-60, 1.0, 0), "greedy"), ((1.0, 1.0, 0), "unmodified"),
        ((0.7, 1.0, 0), "scaled"), ((1.0, 0.9, 0), "truncated"), ((1.0, 1.0, 4), "truncated"),
    ],
)  # fmt: skip
def test_four_kinds_of_sampling(settings, kind):
    assert split_sampling(SamplingParams(1, *settings))[0] == kind


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_temperatures_near_the_ends_of_float32_give_tokens_and_logprobs(top_p):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)) * 10, jnp.float32)
    keys, index = jnp.zeros((4, 2), jnp.uint32), jnp.arange(4)
    largest = np.argmax(logits, axis=1)
    for temperature in (1e-3, 1e-20, 1e-38, 1e-45):
        sampling = SamplingParams(1, temperature, top_p)
        tokens, logprobs, raw = draw(logits, keys, index, sampling)
        np.testing.assert_array_equal(tokens, largest)
        np.testing.assert_allclose(logprobs, 0.0, atol=1e-3)
        assert np.isfinite(raw).all()
    barred = logits.at[:, :32].set(-jnp.inf)  # such as ends that come too early
    tokens, logprobs, _ = draw(barred, keys, index, SamplingParams(1, 1e38, top_p))
    assert (np.asarray(tokens) >= 32).all()
    np.testing.assert_allclose(logprobs, -np.log(32), rtol=0.1)


def test_greedy_takes_the_largest_and_reports_the_unmodified_logprob():
    logits = jnp.asarray([[0.0, 3.0, 1.0]])
    tokens, logprobs, raw = draw(
        logits, jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), SamplingParams(1, 0.0)
    )
    assert int(tokens[0]) == 1
    np.testing.assert_allclose(logprobs, raw)
    np.testing.assert_allclose(raw, [3 - np.log(1 + np.exp(3) + np.exp(1))], rtol=1e-6)


def inverse_cdf_f64(logits, key, index):
    """The token that the same bits give in float64, and the distance to the nearest bound."""
    bits = jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(key), index), (2,))
    shares = (np.asarray(bits) >> 8) / 2.0**24
    size = 1 << -(-(len(logits) - 1).bit_length() // 2)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    weights = np.pad(weights, (0, -len(weights) % size)).reshape(-1, size)

    def first_above(values, share):
        bounds = np.cumsum(values) / values.sum()
        found = np.flatnonzero((bounds > share) & (values > 0))[0]
        return found, np.abs(bounds - share).min()

    block, distance = first_above(weights.sum(axis=1), shares[0])
    token, other = first_above(weights[block], shares[1])
    return block * size + token, min(distance, other)


@pytest.mark.parametrize("num_tokens", slow_after(2, [300, 1, 2, 34, 5000]))
def test_tokens_are_those_of_the_inverse_distribution_in_float64(num_tokens):
    rng = np.random.default_rng(num_tokens)
    logits = rng.normal(size=(64, num_tokens)).astype(np.float32) * 3
    logits[rng.random(logits.shape) < 0.3] = -np.inf  # as top-k leaves them
    logits[:, rng.integers(num_tokens)] = 0.0
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 64))
    index = jnp.arange(64, dtype=jnp.int32)
    tokens, logprobs, _ = draw(jnp.asarray(logits), keys, index, SamplingParams(1))
    assert np.isfinite(logprobs).all()  # none with probability 0
    num_compared = 0
    for row, token in enumerate(np.asarray(tokens)):
        expected, distance = inverse_cdf_f64(logits[row], keys[row], row)
        if distance > 1e-5:  # nearer to a bound, float32 sums may decide otherwise
            assert token == expected
            num_compared += 1
    assert num_compared > 55


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "spread"), [(600, 0.0), (600, 2.0), (3, 1.0)])
def test_the_counts_of_many_draws_follow_a_large_vocabulary(num_tokens, spread):
    """Equally likely tokens are the hardest case: each has few of the 2^24 values of a number."""
    logits = np.random.default_rng(1).normal(size=num_tokens).astype(np.float32) * spread
    num_draws, rows = 2**17, 2**10
    keys = jax.random.key_data(jax.random.split(jax.random.key(5), rows))
    step = jax.jit(functools.partial(draw, sampling=SamplingParams(1)))
    counts = np.zeros(num_tokens)
    for index in range(num_draws // rows):
        tokens, _, _ = step(
            jnp.broadcast_to(logits, (rows, num_tokens)), keys, jnp.full(rows, index, jnp.int32)
        )
        counts += np.bincount(tokens, minlength=num_tokens)
    probabilities = np.exp(logits.astype(np.float64))
    expected = num_draws * probabilities / probabilities.sum()
    common = expected > 5
    chi_square = np.sum((counts - expected)[common] ** 2 / expected[common])
    degrees = common.sum()
    # Five standard deviations of a chi-square distribution, which is nearly normal here.
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees) + 10
    rare = counts[~common].sum(), expected[~common].sum()
    assert abs(rare[0] - rare[1]) <= 5 * np.sqrt(rare[1]) + 1


def test_the_last_token_and_no_other_follows_a_share_near_one():
    weights = jnp.asarray([[0.5, 0.0, 0.5, 0.0], [1e-30, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    for share in (0.0, 0.25, 1 - 2.0**-24):
        found = sampling._first_above(weights, jnp.full(3, share, jnp.float32))
        assert found.tolist() == [0 if share < 0.5 else 2, 1 if share else 0, 3]
