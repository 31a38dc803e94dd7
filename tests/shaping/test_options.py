"""Every option, alone and with every other, compared with float64 loops over some steps."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semrl_jax import metrics, shaping
from semrl_jax.metrics.names import ORDERS
from semrl_jax.shaping.options import CHOICES
from tests.cases import raised
from tests.oracles import shaping as oracle
from tests.shaping import by_name

ERA, ERV, ER = shaping.INDICATORS
NUM_STEPS = 4
MASK = np.arange(5) < np.array([5, 3, 0, 1, 4])[:, None]
DEFAULTS = dataclasses.asdict(shaping.ShapingOptions())
INDICATORS = (
    *(metrics.MetricKey(name, order).label for name in metrics.METRICS for order in ORDERS),
    "avg_log_probs",
    "layer_3/effective_rank",
    "layer_3/effective_rank_velocity",
)
# What the reference implementation's configuration file has where its launcher says nothing.
ENTROPY = {
    "indicators": (
        "response_entropy", "response_entropy_velocity", "response_entropy_acceleration",
    ),
    "explore_weights": (1, 0.25, 0.0625),
    "exploit_weights": (1, 0.01, 0.001),
    "guidance": "response_entropy",
    "alpha": 0.7,
    "gain": 1.5,
    "scale": "performance",
}  # fmt: skip


@st.composite
def all_options(draw):
    indicators = draw(st.lists(st.sampled_from(INDICATORS), min_size=1, max_size=4, unique=True))
    weights = st.tuples(*[st.sampled_from([0.0, 1, -0.5, 0.25])] * len(indicators))
    explore, exploit = draw(weights), draw(weights)
    if not any(explore) and not any(exploit):
        explore = (1.0, *explore[1:])
    return {field: draw(st.sampled_from(values)) for field, values in CHOICES.items()} | {
        "alpha": draw(st.sampled_from([0.05, 0.3, 0.7, 1])),
        "gain": draw(st.sampled_from([-1.0, 0, 1.5, 2.0])),
        "eta": draw(st.sampled_from([0.0, 0.3, 1, 4.0])),
        "kappa": draw(st.sampled_from([1.01, 2, 10.0])),
        "indicators": tuple(indicators),
        "explore_weights": explore,
        "exploit_weights": exploit,
        # Often one of them, as often another.
        "guidance": draw(st.one_of(st.sampled_from(indicators), st.sampled_from(INDICATORS))),
    }


def make_batches(seed, names):
    """Batches for the oracle, and the same as metrics; holes are NaN, infinite or flagged."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(NUM_STEPS):
        advantages = rng.normal(size=MASK.shape).astype(np.float32)
        advantages[0, :2] = 0.0
        advantages[~MASK] = np.nan
        holes_in_all = rng.random() < 0.1
        found, given_values = {}, {}
        for k, name in enumerate(sorted(names)):
            # One sign for one indicator: a mean that cancels would leave no digits of float32.
            values = (rng.uniform(1, 3, len(MASK)) * (-10.0) ** (k % 3)).astype(np.float32)
            present = rng.random(len(MASK)) < (0.0 if holes_in_all else 0.75)
            kinds = rng.integers(0, 4, len(MASK))
            holes = np.select([kinds == 0, kinds == 1, kinds == 2], [np.nan, np.inf, 1e30], 7.0)
            flagged = present | (kinds < 2)  # NaN and infinity need no flag
            given_values[name] = np.where(present, values, holes).astype(np.float32)
            if k % 2:
                given_values[f"{name}_valid"] = flagged
            else:
                given_values[name][~present] = np.nan  # no flags at all
            found[name] = [
                float(v) if p else None if k % 2 and not f else math.nan
                for v, p, f in zip(values, present, flagged)
            ]
        batches.append(
            {
                "advantages": advantages,
                "mask": MASK,
                "values": found,
                "reward": float(np.float32(rng.uniform(-1, 1))),
                "metrics": given_values,
            }
        )
    return batches


def steps(batches, options):
    """What the package makes of the batches, one step after the other."""
    state = shaping.init_shaping_state(options["indicators"], guidance=options["guidance"])
    for batch in batches:
        found = jax.tree.map(jnp.asarray, batch["metrics"])
        advantages, mask = map(jnp.asarray, (batch["advantages"], batch["mask"]))
        shaped, report = by_name.shape_advantages(advantages, found, mask, state, **options)
        yield shaped, by_name.reward_bonus(found, state, **options), report
        state = by_name.update_shaping_state(
            state, found, mean_reward=jnp.float32(batch["reward"]), **options
        )


def assert_matches_oracle(seed, options):
    batches = make_batches(seed, {*options["indicators"], options["guidance"]})
    for actual, expected in zip(
        steps(batches, options), oracle.run(batches, **options), strict=True
    ):
        # A dozen float32 roundings, and some more in the baselines.
        np.testing.assert_allclose(actual[0], expected[0], rtol=2e-5, atol=5e-6)
        np.testing.assert_allclose(actual[1], expected[1], rtol=2e-5, atol=5e-6)
        for key, value in expected[2].items():
            np.testing.assert_allclose(actual[2][key], value, rtol=2e-5, atol=5e-6, err_msg=key)


# Each example compiles; the slow test below goes through all combinations.
@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 2**31 - 1), options=all_options())
def test_any_options_match_float64_loops(seed, options):
    assert_matches_oracle(seed, options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        ENTROPY,
        {"mixing": "sum"},
        {"mixing": "half", "reproduce_release": True},
        {"guidance": "curvature"},
    ],
    ids=["launcher", "configuration file", "sum", "half", "foreign guidance"],
)
def test_settings_match_float64_loops(options):
    assert_matches_oracle(0, DEFAULTS | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        # "both" has the code of the first two.
        pytest.param(target, marks=[pytest.mark.soak] * (target in ("advantage", "reward")))
        for target in CHOICES["target"]
    ],
)
def test_every_combination_of_choices_matches_float64_loops(target):
    others = {field: values for field, values in CHOICES.items() if field != "target"}
    for seed, values in enumerate(itertools.product(*others.values())):
        assert_matches_oracle(seed, DEFAULTS | {"target": target} | dict(zip(others, values)))


@pytest.mark.parametrize("scale", CHOICES["scale"])
@pytest.mark.parametrize("mixing", ["adaptive", "half"])
def test_release_options_match_the_release(mixing, scale):
    """Zero start, two steps late, zeros let in, last token, counted twice."""
    rng = np.random.default_rng(0)
    mask = np.arange(4) < np.array([4, 2, 3])[:, None]
    last = mask & ~np.roll(mask, -1, axis=1) | (mask & (np.arange(4) == 3))
    options = {"target": "both", "mixing": mixing, "scale": scale, "reproduce_release": True}
    batches = []
    for _ in range(8):
        values = rng.uniform(1, 3, (3, 3)).astype(np.float32)
        values[:, :2][rng.random((3, 2)) < 0.3] = 0.0  # too short for a difference
        advantages = rng.normal(size=(3, 4)).astype(np.float32)
        batches.append(
            {
                "values": values,
                "reward": float(np.float32(rng.uniform(-1, 1))),
                "advantages": advantages,
                "last_advantages": advantages[last],
            }
        )
    state = shaping.init_shaping_state()
    expected = oracle.released(
        batches, 0.3, 2.0, 1.0, 2.0, adaptive=mixing == "adaptive", fixed_scale=scale == "fixed"
    )
    for batch, (in_reward, in_advantage) in zip(batches, expected, strict=True):
        columns = batch["values"].T
        found = dict(zip(shaping.INDICATORS, columns))
        found |= {f"{n}_valid": v != 0 for n, v in zip(shaping.INDICATORS, columns)}
        assert found["effective_rank_valid"].all()
        np.testing.assert_allclose(
            by_name.reward_bonus(found, state, **options), in_reward, rtol=2e-5, atol=5e-6
        )
        shaped, _ = by_name.shape_advantages(
            jnp.asarray(batch["advantages"]), found, jnp.asarray(mask), state, **options
        )
        bonus = np.asarray(shaped) - np.where(mask, batch["advantages"], 0)
        np.testing.assert_allclose(bonus[last], in_advantage, rtol=2e-5, atol=5e-6)
        np.testing.assert_array_equal(bonus[~last], 0)
        state = by_name.update_shaping_state(state, found, mean_reward=batch["reward"], **options)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_non_finite_response_gets_no_bonus_and_changes_no_other(broken, release):
    rng = np.random.default_rng(0)
    clean = {name: rng.uniform(1, 3, 5).astype(np.float32) for name in shaping.INDICATORS}
    state = by_name.update_shaping_state(shaping.init_shaping_state(), clean)
    higher = {name: values * 2 for name, values in clean.items()}
    advantages, mask = jnp.ones(MASK.shape), jnp.asarray(MASK)
    options = {"reproduce_release": release}
    expected, _ = by_name.shape_advantages(advantages, higher, mask, state, **options)
    for name in shaping.INDICATORS:
        hurt = higher | {name: np.where(np.arange(5) == 1, broken, higher[name])}
        shaped, report = by_name.shape_advantages(advantages, hurt, mask, state, **options)
        others = np.arange(5) != 1
        np.testing.assert_array_equal(np.asarray(shaped)[others], np.asarray(expected)[others])
        np.testing.assert_array_equal(np.asarray(shaped)[1], MASK[1])
        np.testing.assert_allclose(report["shaping/valid_fraction/mean"], 0.8, rtol=1e-6)
        assert np.asarray(expected)[1].max() > 1  # else nothing was taken from it
        without = {key: values[others] for key, values in higher.items()}
        np.testing.assert_allclose(
            means_of(by_name.update_shaping_state(state, hurt, **options)),
            means_of(by_name.update_shaping_state(state, without, **options)),
            rtol=1e-6,  # sums of four and of five terms
        )


def means_of(state):
    return np.concatenate([state.baseline, state.pending])


def test_zeros_are_of_short_responses_and_not_of_broken_ones():
    # Metrics report a non-finite response like this: nothing is valid, and all values are 0.0.
    found = {name: np.array([3.0, 0.0, 0.0], np.float32) for name in shaping.INDICATORS}
    found["effective_rank"] = np.array([3.0, 3.0, 0.0], np.float32)
    found |= {f"{name}_valid": np.array([True, False, False]) for name in shaping.INDICATORS}
    found["effective_rank_valid"] = np.array([True, True, False])
    below = {name: np.full(3, -1.0, np.float32) for name in shaping.INDICATORS}
    state = by_name.update_shaping_state(shaping.init_shaping_state(), below)
    bonus = by_name.reward_bonus(found, state, reproduce_release=True)
    np.testing.assert_array_equal(np.asarray(bonus) != 0, [True, True, False])
    after = by_name.update_shaping_state(
        shaping.init_shaping_state(), found, reproduce_release=True
    ).pending
    np.testing.assert_allclose(after, [1.5, 1.5, 3.0])  # means of two


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_non_finite_advantage_stays_and_is_not_reported(broken):
    high = {name: np.full(5, 9.0, np.float32) for name in shaping.INDICATORS}
    low = {name: np.full(5, 3.0, np.float32) for name in shaping.INDICATORS}
    state = by_name.update_shaping_state(shaping.init_shaping_state(), low)
    advantages = jnp.ones(MASK.shape).at[0, 0].set(broken)
    shaped, report = by_name.shape_advantages(advantages, high, jnp.asarray(MASK), state)
    np.testing.assert_equal(float(shaped[0, 0]), broken)
    assert np.all(np.asarray(shaped)[MASK][1:] == 1.5)
    assert all(np.isfinite(value) for value in report.values())
    np.testing.assert_allclose(report["shaping/bonus/mean"], 0.5 * 12 / 13, rtol=1e-6)
    np.testing.assert_allclose(report["shaping/bonus_to_advantage/mean"], 0.5 * 12 / 13, rtol=1e-6)


def test_values_near_the_end_of_float32_leave_finite_baselines():
    # Their plain sum is infinite, and no average with infinity ever comes back.
    huge = {name: np.full(3, 3e38, np.float32) for name in shaping.INDICATORS}
    state = by_name.update_shaping_state(shaping.init_shaping_state(), huge)
    np.testing.assert_allclose(state.baseline, 3e38, rtol=1e-6)
    state = by_name.update_shaping_state(state, {name: -huge[name] for name in huge})
    np.testing.assert_allclose(state.baseline, 0.4 * 3e38, rtol=1e-5)
    shaped, report = by_name.shape_advantages(jnp.ones((3, 1)), huge, jnp.ones((3, 1), bool), state)
    assert np.all(np.isfinite(shaped)) and all(np.isfinite(x) for x in report.values())


@pytest.mark.slow
@pytest.mark.parametrize("mixing", CHOICES["mixing"])
def test_results_are_float32_in_double_precision_too(mixing):
    found = {name: np.arange(1.0, 6) for name in shaping.INDICATORS}
    options = {"mixing": mixing, "kappa": np.float64(2.0), "gain": np.float64(1.0)}
    with jax.enable_x64(True):
        state = by_name.update_shaping_state(
            shaping.init_shaping_state(), found, mean_reward=1.0, **options
        )
        double = jnp.ones(MASK.shape)
        assert double.dtype == jnp.float64
        result = by_name.shape_advantages(double, found, jnp.asarray(MASK), state, **options)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {np.dtype("float32")}
        assert [leaf.dtype for leaf in state] == [
            leaf.dtype for leaf in shaping.init_shaping_state()
        ]


def test_all_functions_take_the_whole_section():
    # A config section unpacks at each call; what a function has no use for it still checks.
    found = {name: np.ones(5, np.float32) for name in shaping.INDICATORS}
    state, mask = shaping.init_shaping_state(), jnp.asarray(MASK)
    ones = jnp.ones(MASK.shape)
    for call in (
        lambda **options: by_name.shape_advantages(ones, found, mask, state, **options),
        lambda **options: by_name.reward_bonus(found, state, **options),
        lambda **options: by_name.compute_signal(found, state, **options),
        lambda **options: by_name.update_shaping_state(state, found, **options),
        shaping.ShapingOptions,
    ):  # fmt: skip
        call(**DEFAULTS)
        with pytest.raises(ValueError, match=r"shaping\.kappa=0\.5 must be above 1"):
            call(**DEFAULTS | {"kappa": 0.5})
        raised(TypeError, "capa", call, capa=2.0)
