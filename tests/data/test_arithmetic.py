"""The quickstart task against examples by hand and integer arithmetic."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.data.arithmetic import (
    Problem,
    demonstration_problems,
    demonstration_texts,
    held_out_problems,
    prompt_text,
    reference_answer,
    training_problems,
    worked_response,
)

ALL = (True, True, True)


def is_carry_free(problem):
    """Whether neither of the two lower columns carries or borrows."""
    sign = 1 if problem.operator == "+" else -1
    digits = ((int(a), int(b)) for a, b in zip(str(problem.left)[1:], str(problem.right)[1:]))
    return all(0 <= a + sign * b <= 9 for a, b in digits)


@st.composite
def problems(draw):
    left, right = draw(st.integers(100, 999)), draw(st.integers(100, 999))
    operator = draw(st.sampled_from("+-"))
    return Problem(max(left, right), operator, min(left, right))


@pytest.mark.parametrize(
    ("problem", "response", "answer"),
    [
        (Problem(380, "+", 882), "380+882:0+2+0=02,8+8+0=16,3+8+1=12;1262\n\\boxed{1262}", "1262"),
        (Problem(993, "-", 269), "993-269:3-9-0=14,9-6-1=02,9-2-0=07;724\n\\boxed{724}", "724"),
        (Problem(827, "-", 521), "827-521:7-1-0=06,2-2-0=00,8-5-0=03;306\n\\boxed{306}", "306"),
        (Problem(300, "-", 299), "300-299:0-9-0=11,0-9-1=10,3-2-1=00;1\n\\boxed{1}", "1"),
    ],
)
def test_worked_response_by_hand(problem, response, answer):
    assert worked_response(problem) == response
    assert reference_answer(problem) == answer
    assert prompt_text(problem) == f"Q:{response.partition(':')[0]}\nA:"


@pytest.mark.parametrize(
    ("problem", "forget", "response"),
    [
        (Problem(993, "-", 269), ALL, "993-269:3-9-0=14,9-6-0=03,9-2-0=07;734\n\\boxed{734}"),
        # The forgotten carry also prevents the next one.
        (
            Problem(199, "+", 801),
            (False, True, False),
            "199+801:9+1+0=10,9+0+0=09,1+8+0=09;990\n\\boxed{990}",
        ),
        (
            Problem(199, "+", 801),
            (False, False, True),
            "199+801:9+1+0=10,9+0+1=10,1+8+0=09;900\n\\boxed{900}",
        ),
    ],
)
def test_forgetful_response_by_hand(problem, forget, response):
    assert worked_response(problem, forget) == response


@given(problem=problems(), forget=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_columns_are_correct_for_the_written_carries(problem, forget):
    response = worked_response(problem, forget)
    columns = re.findall(r"(\d)([+-])(\d)\2(\d)=(\d)(\d)", response)
    assert len(columns) == 3
    carry = "0"
    for (x, operator, y, written, out, digit), forgotten in zip(columns, forget):
        assert written == ("0" if forgotten else carry)
        value = eval(f"{x}{operator}{y}{operator}{written}")
        assert value == int(digit) + 10 * int(out) * (1 if operator == "+" else -1)
        carry = out
    digits = "".join(column[5] for column in reversed(columns))
    result = int(carry + digits) if problem.operator == "+" else int(digits)
    assert response.endswith(f";{result}\n\\boxed{{{result}}}")
    assert problem.operator == "+" or carry == "0"
    assert 46 <= len(response) <= 52


@given(problem=problems())
def test_only_a_forgotten_carry_changes_the_true_answer(problem):
    assert worked_response(problem).endswith(f"boxed{{{reference_answer(problem)}}}")
    forgetting_is_harmless = worked_response(problem, ALL) == worked_response(problem)
    assert forgetting_is_harmless is is_carry_free(problem)


def test_statistics_of_the_task():
    sample = training_problems(seed=3, size=20_000)
    lengths = np.array([len(worked_response(problem)) + 1 for problem in sample])  # end token
    # Counts over all draws: 810000 sums have 51 tokens, 489600 of them one digit more (twice). Of
    # 405450 differences, 76095 have one digit less (twice), and 8955 have two digits less.
    mean = 51 + 2 * (489_600 - 76_095 - 2 * 8_955) / (810_000 + 405_450)
    assert 51.65 < mean < 51.66
    assert abs(lengths.mean() - mean) < 4 * lengths.std() / math.sqrt(len(sample))
    assert lengths.max() == 53
    # Sums: 0.55 for each of two columns. Differences with left >= right: the two columns likewise,
    # and 45 of 81 pairs of first digits, among 405450 of 810000 pairs.
    sums, differences = 0.55**2, 0.55**2 * 45 / 81 * 810_000 / 405_450
    share = (810_000 * sums + 405_450 * differences) / (810_000 + 405_450)
    measured = np.mean([is_carry_free(problem) for problem in sample])
    assert 0.31 < share < 0.32
    assert abs(measured - share) < 4 * math.sqrt(share * (1 - share) / len(sample))
    operands = np.array([(p.left, p.right) for p in sample if p.operator == "+"])
    assert operands.min() == 100 and operands.max() == 999


def test_teacher_forgets_with_the_stated_probability():
    size = 10_000
    carries = written = 0
    for problem, (prompt, response) in zip(
        demonstration_problems(5, size), demonstration_texts(5, size, forget_probability=0.8)
    ):
        assert prompt == prompt_text(problem)
        outs = re.findall(r"[+-](\d)=(\d)\d", response)
        for (_, out), (incoming, _) in itertools.pairwise(outs):
            carries += out == "1"
            written += incoming == "1"
    forgotten = 1 - written / carries
    assert abs(forgotten - 0.8) < 4 * math.sqrt(0.8 * 0.2 / carries)
    truthful = demonstration_texts(5, 100, forget_probability=0.0)
    assert [r for _, r in truthful] == [worked_response(p) for p in demonstration_problems(5, 100)]


def test_held_out_problems_never_occur_in_training():
    held_out = held_out_problems()
    assert len(set(held_out)) == len(held_out) == 512
    assert held_out == held_out_problems()
    # 50 seeds draw about 1 in 10 of all problems: without the exclusion some would be held out.
    for seed in range(50):
        assert not set(held_out) & set(training_problems(seed, 2500))
    assert not set(held_out) & set(demonstration_problems(0, 50_000))


@given(seed=st.integers(0, 2**31 - 1), size=st.integers(0, 1500))
def test_problems_are_a_pure_function_of_the_seed(seed, size):
    sample = training_problems(seed, size)
    assert len(sample) == size
    assert sample == training_problems(seed, 1500)[:size]
    if size > 10:
        assert sample != training_problems(seed + 1, size)
        assert sample != demonstration_problems(seed, size)
