"""Every extraction rule, and hostile text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.rewards.extraction import find_answer, has_complete_box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # Rule 1, before all others.
        (r"final answer is $7$. I hope \boxed{9}", "7"),
        ("final answer is $ 7 $. I hope. final answer is $8$. I hope", "7"),
        # Rule 2.
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$, $x=\boxed{2}$ or \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} and \boxed{1}", "1"),
        (r"\boxed{1}. So \boxed{2}", "2"),
        (r"\boxed {7} or \fbox{\frac12}", r"7, \frac12"),
        (r"\boxed{7}. I boxed the answer, as \boxed was asked for \boxed{}.", "7"),
        (r"It is \boxed{} 7.", "7"),
        (r"\boxed{\frac{1}{2}} he answer is 9", r"\frac{1}{2}"),
        (r"\boxed{7 and more", "7 and more"),
        (r"\boxed{7$ and more", "7"),
        (r"$\boxed 7$ and more", "7"),
        (r"\boxed{}", None),
        (r"$x = -\boxed{7}$", "-7"),
        (r"so $x > \boxed{7}$", ">7"),
        (r"- \boxed{7} apples", "7"),
        # Rule 3.
        ("The answer is 3. The answer is 7.", "7"),
        ("My final answer is: 7/", "7"),
        ("答案是 7\n\n所以 8", "7"),
        ("**Answer:** 7\nas 5 + 2 = 7", "7"),
        ("Final answer:\n\n\\[\nx+1\n\\]", "x+1"),
        ("7 #### -8 <answer>9</answer> #### ", "9"),
        # Rule 4.
        ("first 12, then 1,234.5 apples", "1,234.5"),
        ("so $x = \\frac{1}{2}$.", "x = \\frac{1}{2}"),
        ("It costs $5, and $7 in all", "$7"),
        ("half is 1/2", "1/2"),
        ("about 1.05e-34", "1.05e-34"),
        ("it is 2.5 \\times 10^{-3}", "2.5 \\times 10^{-3}"),
        ("so 10%", "10%"),
        ("it falls to \u22123", "\u22123"),
        ("so 4-3", None),  # a range has no answer
        ("3, 4 and 5", "3, 4 and 5"),
        ("between 3 and 5", None),
        ("In 2020, 15", "15"),
        ("it falls to -3", "-3"),
        ("half is .5", ".5"),
        ("so x > 5", None),
        ("it is not 5", None),
        ("so 2^10", None),
        ("so 5x", None),
        ("so (2, 5)", "(2, 5)"),
        ("in all 1 000 000", "1 000 000"),
        ("that is $18,000/year", "$18,000"),
        ("about 5 million people", "5 million"),
        ("it leaves at 10:30 PM", "10:30 PM"),
        ("so the angle is $30^\\circ.$", "30^\\circ"),
        ("it is $x = 1$ or $x = 2$", "x = 1, x = 2"),
        ("no idea", None),
        ("", None),
        # Truncation at the first end marker.
        (r"\boxed{7}<|im_end|>\boxed{9}", "7"),
        (r"7</s>8<|endoftext|>9", "7"),
        ("<|im_end|>7", None),
        # Line breaks, colon, full stop, slash.
        (r"\boxed{1" + "\n  " + "2}", "12"),
        ("the answer is: 5.", "5"),
    ],
)
def test_extracts_by_the_first_rule_that_applies(text, answer):
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{}", True),
        (r"\boxed{a{b{c}d}e}", True),
        (r"\boxed{a{b{c{d}}}}", False),
        (r"\boxed{7", False),
        (r"boxed{7}", False),
        (r"\boxed 7", False),
        (r"\boxed {7}", True),
        (r"\fbox{7}", True),
        (r"\boxed{\boxed{7}", True),  # the inner one is complete
        (r"<|im_end|>\boxed{7}", False),
    ],
)
def test_format_flag_takes_two_nested_levels(text, boxed):
    assert has_complete_box(text) is boxed


# Texts with balanced braces, and their depth.
BALANCED = st.recursive(
    st.tuples(st.text("a$ ", max_size=2), st.just(0)),
    lambda part: st.one_of(
        part.map(lambda inner: ("{" + inner[0] + "}", inner[1] + 1)),
        st.tuples(part, part).map(lambda two: (two[0][0] + two[1][0], max(two[0][1], two[1][1]))),
    ),
    max_leaves=8,
)


@given(content=BALANCED)
def test_box_content_agrees_with_counting_braces(content):
    content, deepest = content
    text = "so \\boxed{" + content + "} ends"
    assert has_complete_box(text) is (deepest <= 2)
    assert find_answer(text) == (content.strip() or None)


@given(text=st.text(max_size=200))
def test_text_after_the_end_marker_is_ignored(text):
    answer, boxed = find_answer(text), has_complete_box(text)
    assert find_answer(text + "</s>\\boxed{1}") == answer
    assert has_complete_box(text + "</s>\\boxed{1}") is boxed


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" + "{" * 200_000,
        r"\boxed{" * 30_000,
        r"\boxed{a" * 30_000 + "}" * 30_000,
        r"\boxed{{{" + "a" * 200_000,
        r"\boxed{" + r"5\text{" * 30_000,
        r"\boxed{5" + r"\text{a}" * 30_000 + "}",
        "he answer is " * 20_000 + "5" + " \n" * 100_000,
        "boxed " + "^ " * 100_000,
        "1.-," * 60_000,
        "9" * 200_000,
    ],
)
def test_hostile_text_costs_one_pass(text):
    start = time.thread_time()  # other work on the machine does not count
    find_answer(text)
    has_complete_box(text)
    assert time.thread_time() - start < 1.0  # about 0.02 s; a quadratic rule takes minutes
