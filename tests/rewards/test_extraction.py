"""Every extraction rule, and hostile text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.rewards.extraction import (
    expand_scientific,
    extract_answer,
    has_complete_box,
    normalize_answer,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # Rule 1, before all others.
        (r"final answer is $7$. I hope \boxed{9}", "7"),
        ("final answer is $ 7 $. I hope. final answer is $8$. I hope", "7"),
        # Rule 2.
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} he answer is 9", r"\frac{1}{2}"),
        (r"\boxed{7 and more", "7 and more"),
        (r"\boxed{7$ and more", "7"),
        (r"$\boxed 7$ and more", "7"),
        (r"\boxed{}", ""),
        # Rules 3 and 4.
        ("The answer is 3. The answer is 7.", "7"),
        ("My final answer is: 7/", "7"),
        # Rule 5.
        ("答案是 7\n\n所以 8", "7"),
        # Rule 6.
        ("first 12, then 1,234.5 apples", "1234.5"),
        ("it falls to -3", "-3"),
        ("half is .5", ".5"),
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
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 1,\,2 \right)", "( 1, 2 )"),
        (r"\leftarrow", r"\leftarrow"),
        (r"10\%", "10"),
        (r"\$5", "5"),
        ("$5$", "5"),
        (r"45^\circ", "45"),
        (r"45^{\circ}", "45"),
        (r"\text{A}", "A"),
        (r"5 \text{ cm}", "5"),
        (r"\frac{1}{2} \text{ cm}^2", r"\frac{1}{2}"),
        ("5 dollars", "5"),
        ("5 square units", "5"),
        ("5 m", "5 m"),  # could be a variable
        (r"x \text{ or } y", r"x \text{ or } y"),
        ("7\x00", "7"),
    ],
)
def test_normalises_what_does_not_change_an_answer(answer, normal):
    assert normalize_answer(answer) == normal


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{}", True),
        (r"\boxed{a{b{c}d}e}", True),
        (r"\boxed{a{b{c{d}}}}", False),
        (r"\boxed{7", False),
        (r"boxed{7}", False),
        (r"\boxed 7", False),
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
    assert extract_answer(text) == normalize_answer(content)


@given(text=st.text(max_size=200))
def test_text_after_the_end_marker_is_ignored(text):
    answer, boxed = extract_answer(text), has_complete_box(text)
    assert extract_answer(text + "</s>\\boxed{1}") == answer
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
    start = time.perf_counter()
    extract_answer(text)
    has_complete_box(text)
    assert time.perf_counter() - start < 1.0  # about 0.02 s; a quadratic rule takes minutes


@pytest.mark.parametrize(
    ("answer", "expanded"),
    [
        ("1e3", r"1 \times 10^{3}"),
        ("-2.5E-04", r"-2.5 \times 10^{-4}"),
        ("1e9999", "1e9999"),  # would need 10,000 digits
        ("2e", "2e"),
        ("2e3x", "2e3x"),
    ],
)
def test_scientific_notation_is_spelled_out(answer, expanded):
    assert expand_scientific(answer) == expanded
