"""The page of an evaluation holds its responses as data, within its size."""

import json
import re

import ml_collections
import pytest

from semrl_jax.evaluation import problem_page
from semrl_jax.evaluation.scores import pass_at_k
from tests.evaluation.making import make_sample, results_of

HOSTILE = "</script><script>document.title='owned'</script><!-- {{data}} \u2028 \ud800 &lt;"


def write(file, *policies, title="title", **options):
    named = {f"policy {place}": samples for place, samples in enumerate(policies)}
    options_of_scores = ml_collections.ConfigDict({"k": (1,)})
    found = {
        name: results_of(samples, [pass_at_k], options_of_scores) for name, samples in named.items()
    }
    problem_page.write_page(file, named, found, title, **options)
    return file.read_bytes().decode()


def scripts(text):
    """The data elements, by name."""
    found = re.findall(r'<script type="application/json" id="(\w+)">([^<]*)</script>', text)
    return {name: json.loads(content) for name, content in found}


def test_hostile_text_is_data(tmp_path):
    hostile = make_sample(
        0, 0, response=HOSTILE, question=HOSTILE, reference=HOSTILE, extracted=HOSTILE,
        problem_type=HOSTILE, verifier_error=HOSTILE, benchmark=HOSTILE,
        metrics={HOSTILE: float("nan")},
    )  # fmt: skip
    text = write(tmp_path / "page.html", [hostile], title=HOSTILE)
    assert text.count("<script") == 4  # the index, one problem, the kit, the program
    data = text[text.index("<script") :]
    assert "<!--" not in text and "\u2028" not in data and "&lt;" not in data
    expected = HOSTILE.replace("\ud800", "?")
    assert scripts(text)["p0"] == [expected, [[[expected][0]]]]


def test_long_responses_are_cut_in_the_middle(tmp_path):
    response = "start" + "x" * 20_000 + "the end"
    text = write(tmp_path / "page.html", [make_sample(0, 0, response=response)])
    found = scripts(text)["p0"][1][0][0]
    assert found.startswith("startx") and found.endswith("x" * 100 + "the end")
    assert "[... 4012 characters left out ...]" in found
    assert "1 responses have more than 16000 characters and are cut in the middle" in text


def test_an_episode_has_its_parts_and_rewards_each_part_cut_by_itself(tmp_path):
    response = "a" * 9_000 + "b" * 9_000 + "c"
    episode = make_sample(
        0, 0, response=response, turn_characters=[9_000, 9_000, 1], turn_rewards=[0.0, 1.0]
    )
    whole, lengths, rewards = scripts(write(tmp_path / "page.html", [episode]))["p0"][1][0][0]
    assert sum(lengths) == len(whole) and rewards == [0.0, 1.0]
    first, second = whole[: lengths[0]], whole[lengths[0] : -1]
    for part, letter in ((first, "aa"), (second, "bb")):
        assert part.startswith(letter) and "left out" in part and part.endswith(letter)
    assert len(whole) < 16_000 and whole[-1] == "c"


@pytest.mark.parametrize(
    ("max_bytes", "longest", "num_samples"), [(10**6, 3000, 8), (40_000, 1000, 8), (8_000, 250, 4)]
)
def test_a_large_page_is_made_smaller(tmp_path, max_bytes, longest, num_samples):
    samples = [make_sample(p, s, response="y" * 3000) for p in range(4) for s in range(8)]
    text = write(tmp_path / "page.html", samples, max_bytes=max_bytes)
    found = scripts(text)
    assert [len(found[f"p{p}"][1][0]) for p in range(4)] == [num_samples] * 4
    assert found["p3"][1][0][0].count("y") == longest
    assert (f"The first {num_samples} samples of each" in text) == (num_samples < 8)
    assert (f"{4 * num_samples} responses have more than {longest} characters" in text) == (
        longest < 3000
    )


def test_policies_are_side_by_side(tmp_path):
    one = [make_sample(p, s, p == 0) for p in range(2) for s in (1, 0)]
    other = [make_sample(1, 0, True, response="other")]
    found = scripts(write(tmp_path / "page.html", one, other))
    assert found["index"]["policies"] == ["policy 0", "policy 1"]
    samples = [row[-1] for row in found["index"]["problems"]]
    numbers = [[[s[:2] for s in by_policy] for by_policy in row] for row in samples]
    assert numbers == [[[[0, 1], [1, 1]], []], [[[0, 0], [1, 0]], [[0, 1]]]]
    assert found["p1"][1] == [["text", "text"], ["other"]]


def test_a_page_without_samples_is_written(tmp_path):
    assert "0 problems." in write(tmp_path / "page.html", [])
