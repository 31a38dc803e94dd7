"""The bonus and its options."""

import functools
import inspect

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import shaping
from tests.cases import raised
from tests.oracles import shaping as oracle
from tests.shaping import by_name

ERA, ERV, ER = shaping.INDICATORS
BASELINES = (0.5, 4.0, 20.0)
MASK = np.arange(5) < np.array([5, 3, 1, 4])[:, None]


def state_with(baselines=BASELINES, reward_ema=0.0):
    num = len(baselines)
    return shaping.ShapingState(
        baseline=jnp.asarray(baselines, jnp.float32),
        baseline_set=jnp.ones(num, bool),
        pending=jnp.zeros(num),
        pending_set=jnp.zeros(num, bool),
        reward_ema=jnp.float32(reward_ema),
        num_updates=jnp.int32(1),
    )


def metrics_of(rows, valid=None):
    """Metrics from rows of (ERA, ERV, ER), one row per response."""
    columns = np.asarray(rows, np.float32).T
    valid = np.ones_like(columns, bool) if valid is None else np.asarray(valid).T
    result = dict(zip(shaping.INDICATORS, columns))
    return result | {f"{k}_valid": v for k, v in zip(shaping.INDICATORS, valid)}


METRICS = metrics_of([(1.0, 5, 30), (0.2, 6, 18), (-0.5, 3, 21), (0.6, 4.1, 22)])


@pytest.fixture
def unannotated():
    """Switches checks of annotations off, so that our own errors are raised as in a run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def shape(advantages, metrics, mask, state, **options):
    advantages = jnp.asarray(advantages, jnp.float32)
    return _jitted(tuple(options.items()))(advantages, metrics, jnp.asarray(mask), state)


@functools.cache
def _jitted(options):
    return jax.jit(functools.partial(by_name.shape_advantages, **dict(options)))


def test_bonus_by_hand():
    # ERA at its baseline: beta = 1/2. ER twice its baseline: tanh(1) = 0.76159; ERV at its own: 0.
    # Phi = 0.76159 / 2 = 0.38080, limited to |A| / kappa = 0.1, 0.5, 0.
    metrics = metrics_of([(0.5, 4.0, 40.0)])
    actual, report = shape([[-0.2, 1.0, 0.0]], metrics, np.ones((1, 3), bool), state_with())
    np.testing.assert_allclose(actual, [[-0.1, 1.380797, 0.0]], rtol=1e-6)
    expected = {
        "shaping/active": 1.0,
        "shaping/valid_fraction/mean": 1.0,
        "shaping/beta/mean": 0.5,
        "shaping/phi/mean": 0.380797,
        "shaping/bonus/mean": 0.480797 / 3,
        "shaping/clipped_fraction/mean": 2 / 3,
        "shaping/bonus_to_advantage/mean": 0.480797 / 1.2,
        "shaping/scale": 1.0,
        f"shaping/weight/{ERA}/mean": 0.0,
        f"shaping/weight/{ERV}/mean": 0.5,
        f"shaping/weight/{ER}/mean": 0.5,
        f"shaping/deviation/{ERA}/mean": 0.0,
        f"shaping/deviation/{ERV}/mean": 0.0,
        f"shaping/deviation/{ER}/mean": 1.0,
        f"shaping/baseline/{ERA}": 0.5,
        f"shaping/baseline/{ERV}": 4.0,
        f"shaping/baseline/{ER}": 20.0,
    }
    for key, value in expected.items():
        np.testing.assert_allclose(report[key], value, rtol=1e-5, err_msg=key)


@given(seed=st.integers(0, 2**31 - 1), kappa=st.sampled_from([1.0078125, 1.5, 2, 10.0]))
def test_no_bonus_is_negative_or_changes_a_sign(seed, kappa):
    rng = np.random.default_rng(seed)
    advantages = (rng.normal(size=(4, 5)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
    advantages[0] = 0.0
    metrics = metrics_of(rng.normal(size=(4, 3)) * 1e3)
    state = state_with()
    actual, _ = shape(advantages, metrics, MASK, state, kappa=kappa)
    assert np.all(np.asarray(actual)[~MASK] == 0.0)
    assert np.all((np.asarray(actual) - advantages)[MASK] >= 0.0)
    assert np.all((np.sign(actual) == np.sign(advantages))[MASK])


def test_targets_add_the_signal_to_advantage_or_reward():
    advantages = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
    plain = np.where(MASK, advantages, 0.0)
    state = state_with()
    by_target = {
        target: shape(advantages, METRICS, MASK, state, target=target)
        for target in ("advantage", "reward", "both", "none")
    }
    for target in ("reward", "none"):
        np.testing.assert_array_equal(by_target[target][0], plain)
        assert by_target[target][1]["shaping/bonus/mean"] == 0.0
    np.testing.assert_array_equal(by_target["both"][0], by_target["advantage"][0])
    assert np.any(np.asarray(by_target["both"][0]) > plain)
    phi = by_name.reward_bonus(METRICS, state)
    expected = [
        oracle.signal(row, BASELINES, (0, 0, 1), (0, 1, 0), 0)
        for row in zip(*(METRICS[name] for name in shaping.INDICATORS))
    ]
    np.testing.assert_allclose(phi, expected, rtol=1e-5)
    assert min(expected) < 0  # signed: a response below its baselines loses reward
    for target in ("reward", "both"):
        assert by_target[target][1]["shaping/phi/mean"] == pytest.approx(np.mean(expected))


def test_none_needs_no_metrics():
    advantages = np.ones((4, 5), np.float32)
    actual, report = shape(advantages, {}, MASK, shaping.init_shaping_state(), target="none")
    np.testing.assert_array_equal(actual, MASK.astype(np.float32))
    assert report == {"shaping/active": 0.0}


@pytest.mark.parametrize("reward_ema, factor", [(-1.0, 1.0), (0.0, 0.5), (1.0, 0.0)])
def test_performance_scale_fades_as_rewards_rise(reward_ema, factor):
    state = state_with(reward_ema=reward_ema)
    full = by_name.reward_bonus(METRICS, state)
    scaled = by_name.reward_bonus(METRICS, state, scale="performance", eta=3.0)
    np.testing.assert_allclose(scaled, 3.0 * factor * np.asarray(full), rtol=1e-6)


def test_invalid_responses_get_nothing_unless_zeros_are_asked_for():
    rows = [(1.0, 5, 30), (0.0, 0.0, 30)]
    valid = [(True, True, True), (False, False, True)]
    metrics, state = metrics_of(rows, valid), state_with((-0.5, 4.0, 20.0))
    np.testing.assert_array_equal(np.asarray(by_name.reward_bonus(metrics, state)) != 0, [1, 0])
    phi = by_name.reward_bonus(metrics, state, reproduce_release=True)
    expected = oracle.signal((0, 0, 30), (-0.5, 4.0, 20.0), (0, 0, 1), (0, 1, 0), 0)
    np.testing.assert_allclose(phi[1], expected, rtol=1e-5)


def test_only_used_orders_decide_on_validity():
    valid = [(False, True, True), (True, False, True), (True, True, False), (True, True, True)]
    metrics, state = metrics_of(np.full((4, 3), 50.0), valid), state_with()
    for options, expected in (
        ({}, [0, 0, 0, 1]),
        ({"mixing": "half"}, [1, 0, 0, 1]),  # looks at no guidance
        ({"exploit_weights": (0.0, 0.0, 0.5)}, [0, 1, 0, 1]),
        ({"guidance": ER, "exploit_weights": (0.0, 0.0, 0.5)}, [1, 1, 0, 1]),
    ):
        phi = by_name.reward_bonus(metrics, state, **options)
        np.testing.assert_array_equal(np.asarray(phi) != 0, expected, err_msg=str(options))


def test_deviations_are_clipped_at_five():
    # Exploit weight on ERA itself: Phi = (1 - beta) tanh(5), beta = sigmoid(0.1 * 5).
    metrics = metrics_of([(1e6, 4.0, 20.0)])
    _, report = shape(np.ones((1, 1)), metrics, np.ones((1, 1), bool), state_with(), gain=0.1)
    assert report[f"shaping/deviation/{ERA}/mean"] == 5.0
    np.testing.assert_allclose(report["shaping/beta/mean"], 1 / (1 + np.exp(-0.5)), rtol=1e-6)


def test_correlations_are_those_of_valid_responses():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 3)).astype(np.float32)
    valid = np.ones((8, 3), bool)
    valid[2, 0] = valid[5, 1] = False
    rows[~valid] = np.nan
    _, report = shape(np.ones((8, 2)), metrics_of(rows, valid), np.ones((8, 2), bool), state_with())
    for column, name in enumerate((ERA, ERV)):
        both = valid[:, column]
        expected = np.corrcoef(rows[both, column], rows[both, 2])[0, 1]
        np.testing.assert_allclose(report[f"metrics/correlation/{name}"], expected, rtol=1e-5)
    _, report = shape(np.ones((1, 2)), metrics_of(rows[:1]), np.ones((1, 2), bool), state_with())
    assert report[f"metrics/correlation/{ERV}"] == 0.0


def test_a_constant_does_not_correlate():
    # The mean of seven times 0.1 is not 0.1 in float32; all differences from it are equal.
    for row in ((0.1, 0.7, 0.3), (3e38, -3e38, 1e-30)):
        metrics = metrics_of([row] * 7)
        _, report = shape(np.ones((7, 1)), metrics, np.ones((7, 1), bool), state_with())
        for name in (ERA, ERV):
            assert report[f"metrics/correlation/{name}"] == 0.0


def test_correlations_of_values_near_the_end_of_float32_are_finite():
    for size in (3e37, 3e38):
        rows = [(size, -size, -size), (-size, size, size), (0, 0, 0)]
        _, report = shape(np.ones((3, 1)), metrics_of(rows), np.ones((3, 1), bool), state_with())
        found = [float(report[f"metrics/correlation/{name}"]) for name in (ERA, ERV)]
        assert np.all(np.isfinite(found))
        if size < 1e38:  # a quotient by more may be a product with what float32 takes for 0
            np.testing.assert_allclose(found, [-1, 1], rtol=1e-5)


def test_nothing_has_a_gradient():
    def total(advantages, metrics, state):
        return by_name.shape_advantages(advantages, metrics, jnp.asarray(MASK), state)[0].sum()

    values = {k: jnp.asarray(v) for k, v in METRICS.items() if not k.endswith("_valid")}
    gradients = jax.grad(total, argnums=(0, 1))(jnp.ones((4, 5)), values, state_with())
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_empty_rows_and_batches_stay_finite():
    for mask in (np.zeros((4, 5), bool), np.zeros((0, 5), bool)):
        metrics = {k: v[: len(mask)] for k, v in METRICS.items()}
        actual, report = shape(np.full(mask.shape, np.nan), metrics, mask, state_with())
        assert not np.any(actual)
        assert all(np.isfinite(value) for value in report.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kappa": 1.0}, "kappa=1.0"),
        ({"kappa": float("nan")}, "kappa=nan"),
        ({"eta": -1.0}, "eta=-1.0"),
        ({"gain": float("inf")}, "gain=inf"),
        *(({"alpha": value}, f"alpha={value}") for value in (0.0, 1.5, -0.1, float("nan"))),
        ({"explore_weights": (0.0, 1.0)}, "has 2 weights"),
        ({"exploit_weights": (0.0, float("nan"), 1.0)}, "exploit_weights"),
        ({"explore_weights": (0.0,) * 3, "exploit_weights": (0.0,) * 3}, "all zero"),
        ({"indicators": (ER, ER, ERV)}, "each once"),
        ({"indicators": (ERA, ERV, "rank")}, "'rank'"),
        ({"guidance": "rank"}, "state holds 3 baselines"),
        ({"guidance": "curvature"}, "state holds 3 baselines"),
        *(({field: "odd"}, f"{field}='odd'") for field in ("target", "mixing", "scale")),
        # In float32 it is 1, and |A| / kappa would cancel the advantage.
        ({"kappa": 1 + 1e-9}, "kappa=1.000000001 must be above 1 in float32"),
        # Infinite in float32: 0 times it is no number.
        ({"kappa": 1e39}, "kappa=1e+39 must be finite"),
        ({"eta": 1e39}, "eta=1e+39 must be finite"),
        ({"gain": -1e39}, "gain=-1e+39 must be finite"),
        ({"explore_weights": (0.0, 0.0, 1e39)}, "explore_weights has 1e+39 must be finite"),
        ({"eta": 1e20, "explore_weights": (0.0, 0.0, 1e20)}, "times the weights leaves float32"),
    ],
)
def test_mistakes_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        shape(np.ones((4, 5)), METRICS, MASK, state_with(), **options)
    assert message in str(error.value)


def test_wrong_shapes_and_missing_metrics_are_refused():
    with pytest.raises(ValueError, match="metrics has no"):
        shape(np.ones((4, 5)), {ER: METRICS[ER]}, MASK, state_with())
    unchecked = inspect.unwrap(shaping.shape_advantages)  # the annotations would refuse it first
    with pytest.raises(ValueError, match="metrics hold 4 responses, advantages 3"):
        unchecked(np.ones((3, 5)), by_name.records(METRICS), MASK[:3], state_with())
    with pytest.raises(ValueError, match="response_mask"):
        unchecked(np.ones((4, 5)), by_name.records(METRICS), MASK[:, :3], state_with())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kappa": "2"}, "shaping.kappa='2' must be a Python number"),
        ({"alpha": None}, "shaping.alpha=None must be a Python number"),
        ({"eta": True}, "shaping.eta=True must be a Python number"),
        ({"reproduce_release": 1}, "shaping.reproduce_release=1 is unknown"),
        ({"reproduce_release": "last"}, "shaping.reproduce_release='last' is unknown"),
        ({"mixing": np.array(["half", "sum"])}, "is unknown; it must be one of 'adaptive'"),
        ({"indicators": ER}, "shaping.indicators='effective_rank' must be a tuple of names"),
        ({"indicators": None}, "shaping.indicators=None must be a tuple of names"),
        ({"indicators": ()}, "must name one or more"),
        ({"guidance": (ERA,)}, "shaping.guidance has"),
        ({"explore_weights": None}, "shaping.explore_weights=None must be a tuple of numbers"),
        ({"explore_weights": ("a", "b", "c")}, "explore_weights has 'a' must be a Python number"),
    ],
)
def test_wrong_types_are_refused(options, message, unannotated):
    with pytest.raises(ValueError) as error:
        shaping.ShapingOptions(**options)
    assert message in str(error.value)


def test_an_option_is_no_traced_array(unannotated):
    traced = jax.jit(lambda kappa: by_name.reward_bonus(METRICS, state_with(), kappa=kappa))
    raised(ValueError, "close over it or name it in static_argnames", traced, 2.0)


@pytest.mark.parametrize(
    "broken, message",
    [
        ({ER: np.float32(1.0)}, r"metrics\['effective_rank'\] has values of shape \(\)"),
        ({ER: np.ones((4, 1), np.float32)}, r"shape \(4, 1\); it must be \[B\]"),
        ({ER: np.ones(1, np.float32), f"{ER}_valid": np.ones(1, bool)}, "numbers that differ"),
        # One flag would be spread over all responses.
        ({f"{ER}_valid": np.ones(1, bool)}, r"'\] has validities of shape \(1,\)"),
        ({f"{ER}_valid": np.ones(4, np.float32)}, "dtype float32; they must be"),
    ],
)
def test_metrics_of_a_wrong_shape_are_refused(broken, message, unannotated):
    for call in (
        lambda metrics: by_name.reward_bonus(metrics, state_with()),
        lambda metrics: by_name.update_shaping_state(state_with(), metrics),
    ):
        raised(ValueError, message, call, METRICS | broken)


def test_a_mask_that_is_no_bool_is_refused(unannotated):
    for dtype in (np.int32, np.float32):
        with pytest.raises(ValueError, match="response_mask has dtype"):
            by_name.shape_advantages(np.ones((4, 5)), METRICS, MASK.astype(dtype), state_with())


def test_states_and_rewards_that_do_not_fit_are_refused(unannotated):
    with pytest.raises(ValueError, match="state holds 3 baselines"):
        by_name.update_shaping_state(state_with(), METRICS, guidance="curvature")
    with pytest.raises(ValueError, match=r"mean_reward has shape \(2,\)"):
        by_name.update_shaping_state(state_with(), METRICS, mean_reward=np.ones(2, np.float32))
    raised(ValueError, "must be a tuple of names", shaping.init_shaping_state, ER)


def test_an_indicator_without_a_baseline_is_not_compared():
    # Under fixed mixing nothing needs ERA; the first response to have one would deviate by 5.
    state = shaping.init_shaping_state()
    without = METRICS | {f"{ERA}_valid": np.zeros(4, bool)}
    state = by_name.update_shaping_state(state, without, mixing="half")
    _, report = shape(np.ones((4, 5)), METRICS, MASK, state, mixing="half")
    assert report["shaping/active"] == 1.0
    assert report[f"shaping/deviation/{ERA}/mean"] == 0.0
    options = {"mixing": "half", "reproduce_release": True}
    _, from_zero = shape(np.ones((4, 5)), METRICS, MASK, state, **options)
    assert from_zero[f"shaping/deviation/{ERA}/mean"] != 0.0
