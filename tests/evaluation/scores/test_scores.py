"""The scores of several samples per problem equal a brute force over all subsets."""

import itertools
import math
from collections import Counter

import ml_collections
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.protocols import Plan
from semrl_jax.evaluation.samples import NOT_SAMPLED
from semrl_jax.evaluation.scores import (
    answers,
    best_of_k,
    greedy,
    lengths,
    majority,
    mean_at_n,
    pass_at_k,
    reflection,
    repetition,
    types,
)
from semrl_jax.support.errors import UserError
from semrl_jax.types import distribution_of
from tests.evaluation.making import make_problems, make_sample

# Sums of at most 70 products of float64 numbers below 1, and of exponentials of log-factorials.
CLOSE = {"rtol": 0, "atol": 1e-12}
REPEATED = (
    answers, best_of_k, lengths, majority, mean_at_n, pass_at_k, reflection, repetition, types,
)  # fmt: skip


SAMPLED = Plan(4, 0.6, 0.95, 20, 0.1, 0.5, -0.5, 1.2, 3)


def options(**fields):
    return ml_collections.ConfigDict({"n": 4, "k": (1,)} | distribution_of(SAMPLED) | fields)


def mean_over_subsets(n, k, value):
    return np.mean([value(subset) for subset in itertools.combinations(range(n), k)])


def figures(score, problems, **fields):
    return score.per_problem(problems, options(**fields))


@pytest.mark.parametrize("score", REPEATED)
def test_all_share_the_plan_of_the_settings(score):
    assert score.plan(options()) == SAMPLED
    assert score.per_problem([], options()) is not None  # a benchmark without problems


@pytest.mark.parametrize("score", [best_of_k, majority, pass_at_k])
@pytest.mark.parametrize("k", [0, 3])
def test_k_outside_the_number_of_samples_is_refused(score, k):
    problems = make_problems([[1, 0, 1], [1, 0]])
    with pytest.raises(UserError, match=rf"evaluation.k={k} must be from 1 to the 2 samples"):
        figures(score, problems, k=(k,))


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_pass_at_k_is_the_mean_over_subsets(k):
    rows = [[1] * c + [0] * (6 - c) for c in range(7)]
    found = figures(pass_at_k, make_problems(rows), k=(k,))[f"pass@{k}"]
    expected = [mean_over_subsets(6, k, lambda s, row=row: max(row[i] for i in s)) for row in rows]
    np.testing.assert_allclose(found.values, expected, **CLOSE)
    assert found.with_error and found.weights is None


def test_pass_at_k_of_many_samples_is_in_its_range():
    assert pass_at_k.pass_at_k(256, 0, 256) == 0 and pass_at_k.pass_at_k(256, 1, 256) == 1
    # C(255, 128) / C(256, 128) = 1/2
    np.testing.assert_allclose(pass_at_k.pass_at_k(256, 1, 128), 0.5, **CLOSE)


def test_mean_and_any():
    found = figures(mean_at_n, make_problems([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]))
    assert list(found) == ["mean@4", "any@4"]
    assert statistics.mean(found["mean@4"]) == 0.5
    np.testing.assert_allclose(statistics.mean(found["any@4"]), 2 / 3, **CLOSE)
    # Over all samples, also where their numbers differ.
    unequal = figures(mean_at_n, make_problems([[1], [0, 0, 0]]))["mean@3"]
    assert statistics.mean(unequal) == 0.25


def vote(answers, correct, subset):
    """Accuracy of the majority vote of a subset, ties shared."""
    counts = Counter(answers[i] for i in subset if answers[i])
    if not counts:
        return 0.0
    winners = [a for a, count in counts.items() if count == max(counts.values())]
    # With verdicts that differ within an answer, one of its samples in the subset is taken.
    return np.mean(
        [np.mean([correct[i] for i in subset if answers[i] == winner]) for winner in winners]
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31 - 1), n=st.integers(2, 8), data=st.data())
def test_majority_is_the_mean_over_subsets(seed, n, data):
    k = data.draw(st.integers(2, n))
    random = np.random.default_rng(seed)
    answers = random.choice(["", "1", "2", "3", "4"], n).tolist()
    right = {"1"} if seed % 3 else set(random.choice(["1", "2", "3"], 2))
    correct = [a in right and (seed % 5 > 0 or random.random() < 0.7) for a in answers]
    found = figures(majority, make_problems([correct], extracted=[answers]), k=(k,))[f"maj@{k}"]
    expected = mean_over_subsets(n, k, lambda subset: vote(answers, correct, subset))
    np.testing.assert_allclose(found.values, [expected], **CLOSE)


def test_one_response_leaves_no_choice():
    problems = make_problems([[True]], extracted=[["1"]])
    assert figures(majority, problems, k=(1,)) == figures(best_of_k, problems, k=(1,)) == {}


def test_majority_of_many_samples_approaches_its_limit():
    # 60 % of 200 votes are right: a vote of 199 of them is surely right, one of 1 is 0.6.
    votes = ((80, 0.0), (120, 1.0))
    np.testing.assert_allclose(majority.majority_accuracy(votes, 200, 1), 0.6, atol=1e-10)
    np.testing.assert_allclose(majority.majority_accuracy(votes, 200, 199), 1.0, atol=1e-10)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("X = 2", "x=2", True),
        ("\\dfrac{1}{2}", "\\frac{1}{2}", True),
        ("12\\text{ cm}", "12", True),
        ("5.", "5", True),
        ("$5$", "5", True),
        ("0.5", "1/2", False),
    ],
)
def test_answers_are_compared_by_normalised_text(one, other, equal):
    assert (majority.answer_class(one) == majority.answer_class(other)) is equal


@pytest.mark.parametrize("empty", [None, "", "  ", "$$"])
def test_empty_answers_do_not_vote(empty):
    # Three empty answers do not outvote the single right one.
    problems = make_problems([[0, 0, 0, 1]], extracted=[[empty, empty, empty, "7"]])
    assert figures(majority, problems, k=(4,))["maj@4"].values.tolist() == [1.0]
    problems = make_problems([[0, 0]], extracted=[[empty, empty]])
    assert figures(majority, problems, k=(2,))["maj@2"].values.tolist() == [0.0]


def best(values, correct, subset):
    """Accuracy of the highest value in a subset; NaN is the lowest, ties are shared."""
    order = [-math.inf if math.isnan(values[i]) else values[i] for i in subset]
    return np.mean([correct[i] for i, value in zip(subset, order) if value == max(order)])


@pytest.mark.parametrize(("k", "sizes"), [((1,), [3]), ((1, 2), [2]), ((3, 2), [2, 3])])
def test_choices_are_among_several_responses(k, sizes):
    problems = make_problems([[1, 0, 1]], extracted=[["1", "0", "1"]])
    assert list(figures(majority, problems, k=k)) == [f"maj@{size}" for size in sizes]
    chance = [name for name in figures(best_of_k, problems, k=k) if name.endswith("chance")]
    assert chance == [f"best@{size}/chance" for size in sizes]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31 - 1), n=st.integers(2, 8), data=st.data())
def test_best_of_k_is_the_mean_over_subsets(seed, n, data):
    k = data.draw(st.integers(2, n))
    random = np.random.default_rng(seed)
    values = random.choice([0.0, 1.0, 2.0, 2.5, math.nan], n).tolist()
    correct = (random.random(n) < 0.5).tolist()
    problems = make_problems([correct], metrics=[[{"effective_rank": v} for v in values]])
    found = figures(best_of_k, problems, k=(k,))
    expected = {
        "best": mean_over_subsets(n, k, lambda s: best(values, correct, s)),
        "lowest": mean_over_subsets(n, k, lambda s: best([-v for v in values], correct, s)),
    }
    for kind, value in expected.items():
        name = f"{kind}@{k}/effective_rank"
        np.testing.assert_allclose(found[name].values, [value], **CLOSE)
        np.testing.assert_allclose(
            found[f"{name}/gain"].values, [value - np.mean(correct)], **CLOSE
        )
    assert found[f"best@{k}/chance"].values.tolist() == [np.mean(correct)]


def test_best_of_k_chooses_by_metrics_reward_model_and_logprob():
    problems = make_problems(
        [[0, 1, 0]],
        metrics=[[{"reward_model": 1.0}, {"reward_model": 3.0, "effective_rank": 2.0}, {}]],
        mean_logprob=[[-0.1, -0.5, -0.3]],
    )
    found = figures(best_of_k, problems, k=(1, 3))
    values = {name: figure.values.tolist() for name, figure in found.items() if "gain" not in name}
    assert values == {
        "best@3/chance": [pytest.approx(1 / 3)],
        "best@3/reward_model": [1.0],
        "lowest@3/reward_model": [0.0],
        "best@3/effective_rank": [1.0],  # missing values are chosen last ...
        "lowest@3/effective_rank": [1.0],  # ... from both ends
        "best@3/mean_logprob": [0.0],
        "lowest@3/mean_logprob": [1.0],
    }


def test_lengths_of_responses():
    problems = [
        [
            make_sample(0, 0, True, num_tokens=10, boxed=True, extracted="1"),
            make_sample(0, 1, False, num_tokens=50, finish_reason="length", extracted=" "),
        ],
        [
            make_sample(1, 0, False, num_tokens=30, finish_reason="stop", extracted="3", score=0.5),
            make_sample(1, 1, False, num_tokens=20, verifier_error="timeout"),
        ],
        [make_sample(2, s, finish_reason=NOT_SAMPLED, num_tokens=0) for s in range(2)],
    ]
    found = {k: statistics.mean(v) for k, v in figures(lengths, problems).items()}
    assert found == {
        "responses/mean_length": 27.5,
        "responses/mean_length_correct": 10.0,
        "responses/mean_length_wrong": pytest.approx(100 / 3),
        "responses/mean_length_finished": 20.0,
        "responses/mean_score": 0.375,
        "responses/truncated_fraction": 0.25,
        "responses/boxed_fraction": 0.25,
        "responses/empty_fraction": 0.5,
        "responses/timeout_fraction": 0.25,
    }


def test_episodes_have_turns_and_neither_boxes_nor_answers():
    episode = {"turn_rewards": [0.0, 1.0], "turn_characters": [3, 4]}
    problems = [[make_sample(0, 0, True, **episode)], [make_sample(1, 0, turn_rewards=[0.5])]]
    mixed = [*problems, [make_sample(2, 0, boxed=True)]]
    for module, prefix in ((greedy, ""), (lengths, "responses/")):
        of_episodes = {k: statistics.mean(v) for k, v in figures(module, problems).items()}
        assert of_episodes[f"{prefix}mean_turns"] == 1.5
        assert math.isnan(of_episodes[f"{prefix}boxed_fraction"])
        of_all = {k: statistics.mean(v) for k, v in figures(module, mixed).items()}
        assert of_all[f"{prefix}boxed_fraction"] == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("one two three", 0.0),
        ("one two three four five", 0.0),
        ("one two three four one two three four", 1 / 5),  # 5 4-grams, the last as the first
        ("a a a a a a", 2 / 3),  # 3 4-grams, 1 distinct
        ("答案是一答案是一", 1 / 5),
    ],
)
def test_repeated_ngrams(text, expected):
    assert repetition.repeated(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("The answer is 000", False),  # too short to be a loop
        ("First. " + "Let me check this again. " * 3, True),
        ("First. " + "Let me check this again. " * 4 + "Let me", True),  # cut within a turn
        ("Let me check this again. " * 2, False),
        ("Let me check this again. " * 5 + "So it is 42.", False),  # it left the loop
        ("0" * 60, True),
        ("".join(f"{i} + {i} = {2 * i}\n" for i in range(40)), False),
        ("x" * 30 + ("".join(chr(200 + i) for i in range(400)) * 3), True),  # the longest period
        (("".join(chr(200 + i) for i in range(401)) * 3), False),
    ],
)
def test_loops(text, expected):
    assert repetition.loops(text) is expected


def test_reflection_words():
    texts = ["Wait, that is wrong. However, wait.", "They await a waiter.", "Let me try again"]
    found = figures(reflection, make_problems([[0, 0, 0]], response=[texts]))
    assert statistics.mean(found["responses/reflection_fraction"]) == pytest.approx(2 / 3)
    assert statistics.mean(found["responses/reflection_words"]) == pytest.approx(4 / 3)


def test_accuracy_by_type():
    problems = make_problems(
        [[1, 0], [1, 1], [0, 0], [1, 1]],
        problem_type=[["Algebra"] * 2, ["Geometry"] * 2, ["Algebra"] * 2, [""] * 2],
    )
    found = {name: statistics.mean(v) for name, v in figures(types, problems).items()}
    assert found == {"accuracy/Algebra": 0.25, "accuracy/Geometry": 1.0}


def test_answers_have_the_entropy_of_their_shares():
    """Answers are equal after normalisation; a problem without an answer does not count."""
    extracted = [["2", "2.", "2.0", "3", "3", "3"], [None, "7", "7", None, "7", "7"], [None] * 6]
    problems = make_problems([[0] * 6] * 3, extracted=extracted)
    found = {name: statistics.mean(figure) for name, figure in figures(answers, problems).items()}
    shares = np.array([2 / 6, 1 / 6, 3 / 6])
    expected = {"answer_entropy": -shares @ np.log(shares) / 2, "distinct_answers": (3 + 1) / 2}
    assert found == pytest.approx({f"responses/{name}": v for name, v in expected.items()})
    nothing = figures(answers, problems[2:])
    assert all(math.isnan(statistics.mean(figure)) for figure in nothing.values())
