"""A real browser sorts, filters, searches and expands the page, and executes no response."""

import ml_collections
import pytest

from semrl_jax.evaluation import problem_page
from semrl_jax.evaluation.scores import mean_at_n
from tests.browser import open_page
from tests.evaluation.making import make_sample, results_of

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'"

# Functions for the tests; each click waits until the page was drawn again.
HELPERS = """
const all = (selector) => [...document.querySelectorAll(selector)];
const cells = (column) =>
  all("#problems tr.problem").map((tr) => tr.children[column].textContent.replace(/[▸▾]/, ""));
const choose = (id, value) => {
  byId(id).selectedIndex = [...byId(id).options].findIndex((option) => option.text === value);
  byId(id).dispatchEvent(new Event("change"));
};
const sortBy = (name) =>
  all("#problems th button").find((button) => button.textContent.startsWith(name)).click();
const find = async (text) => {
  byId("search").value = text;
  byId("search").dispatchEvent(new Event("input"));
  await new Promise((resolve) => setTimeout(resolve, 400));
};
0
"""


def samples_of(better):
    """60 problems of sums with 0, 1 or 2 of 2 correct, and one hostile problem."""
    samples = [
        make_sample(
            p, s, s < (p + better) % 3,
            extracted=f"{2 * p}", num_tokens=100 - p, problem_type=("Algebra", "Geometry")[p % 2],
            response=f"Response \\frac{{{p}}}{{7}} of sample {s}.\nDone." + " a<b>c & d" * (p == 5),
            metrics={"effective_rank": p + 0.5},
        )
        for p in range(60)
        for s in range(2)
    ]  # fmt: skip
    return [
        *samples,
        make_sample(0, 0, True, benchmark="hostile", question=HOSTILE, response=HOSTILE,
                    extracted=HOSTILE, reference=HOSTILE, finish_reason=HOSTILE),
    ]  # fmt: skip


TEXTS = "So 1 + 1 = 2. We check: yes.", "So 1 + 2 = 3. We check again: yes.", ""


def compared_samples(policy):
    """Two samples of one problem; the second is the same for all, the third of the first only."""
    texts = [TEXTS[policy], "Same text.", "Alone."][: 3 if policy == 0 else 2]
    return [make_sample(0, s, response=text) for s, text in enumerate(texts)]


def write(file, num_policies=1, samples_of=samples_of):
    policies = {f"policy {i}": samples_of(i) for i in range(num_policies)}
    options = ml_collections.ConfigDict({"k": (1,)})
    found = {name: results_of(s, [mean_at_n], options) for name, s in policies.items()}
    problem_page.write_page(file, policies, found, "Evaluation")


def test_page_of_one_policy(tmp_path):
    write(tmp_path / "page.html")
    with open_page(tmp_path / "page.html", tmp_path / "profile") as browser:
        run = browser.run
        run(HELPERS)
        assert run("byId('count').textContent") == "61 of 61 problems"
        assert "mean@2" in run("byId('summary').textContent")

        # Pages of 50 problems.
        assert run("cells(1)") == [str(p) for p in range(50)]
        run("byId('next').click()")
        assert run("cells(0)") == ["sums"] * 10 + ["hostile"]
        assert run("byId('next').disabled") and run("byId('place').textContent") == "2 / 2"

        # Sorting, in both directions; it starts at the first page.
        run("sortBy('mean tokens')")
        assert run("cells(1).slice(0, 3)") == ["0", "59", "58"]
        run("sortBy('mean tokens')")
        assert run("cells(1).slice(0, 3)") == ["0", "1", "2"]
        assert run("all('#problems th').map((th) => th.ariaSort)") == (
            ["none"] * 6 + ["descending"]
        )
        run("sortBy('correct')")
        assert run("cells(5).slice(0, 2)") == ["0 / 2", "0 / 2"]

        # Filters, alone and together.
        run("choose('verdict', 'some correct')")
        assert run("new Set(cells(5)).size") == 1 and run("cells(5)[0]") == "1 / 2"
        run("choose('type', 'Geometry')")
        assert run("byId('count').textContent") == "10 of 61 problems"
        run("choose('verdict', 'none correct')")
        assert run("cells(1)") == [str(p) for p in range(3, 60, 6)]
        run("choose('type', 'all types'); choose('verdict', 'any verdict')")
        run("choose('benchmark', 'hostile')")
        assert run("cells(0)") == ["hostile"]
        run("choose('benchmark', 'all benchmarks')")

        # Search in questions, responses and answers.
        run("find('What is 17 ')")
        assert run("cells(1)") == ["17"]
        run(r"find('\\FRAC{33}')")
        assert run("cells(1)") == ["33"]
        run("find('ONERROR=\"document')")
        assert run("cells(0)") == ["hostile"]
        run("find('a<b>C & d')")
        assert run("cells(1)") == ["5"]
        run("find('no such text')")
        assert run("cells(0)") == []
        run("find('')")

        # A problem shows its responses, a response its text and metrics.
        run("sortBy('problem'); all('#problems tr.problem')[2].click()")
        assert run("all('tr.detail summary').length") == 2
        run("all('tr.detail summary')[1].click()")
        run("new Promise((resolve) => setTimeout(resolve, 100))")
        shown = run("all('tr.detail')[0].innerText")
        for text in ("Response \\frac{1}{7} of sample 1.\nDone.", "✓ correct #0, answer 2",
                     "✗ wrong #1", "effective_rank", "1.5", "99 tokens, eos"):  # fmt: skip
            assert text in shown, text
        run("all('#problems tr.problem')[2].click()")
        assert run("all('tr.detail').length") == 0

        # Hostile text is shown and not executed.
        run("choose('benchmark', 'hostile'); all('#problems tr.problem')[0].click()")
        run("all('tr.detail summary')[0].click()")
        run("new Promise((resolve) => setTimeout(resolve, 100))")
        assert run("all('tr.detail')[0].innerText").count(HOSTILE) >= 4
        assert run("document.title") == "Evaluation" and run("all('img').length") == 0


def test_an_episode_is_shown_in_turns(tmp_path):
    episode = make_sample(
        response="<|im_start|>guess: 3😀<|im_end|>higher4", turn_characters=[31, 6, 1],
        turn_rewards=[0.0, 1.0],
    )  # fmt: skip
    write(tmp_path / "page.html", samples_of=lambda _: [episode])
    with open_page(tmp_path / "page.html", tmp_path / "profile") as browser:
        run = browser.run
        run(HELPERS)
        run("all('#problems tr.problem')[0].click()")
        run("all('tr.detail summary')[0].click()")
        run("new Promise((resolve) => setTimeout(resolve, 100))")
        shown = run("all('tr.detail')[0].innerText")
        for text in ("turn 1, reward 0", "guess: 3😀", "answer: higher\n", "turn 2, reward 1\n4"):
            assert text in shown, text
        assert run("all('tr.detail .template').length") == 2


def test_page_of_two_policies(tmp_path):
    write(tmp_path / "page.html", num_policies=2)
    with open_page(tmp_path / "page.html", tmp_path / "profile") as browser:
        run = browser.run
        run(HELPERS)
        assert run("all('#problems th').length") == 9
        run("choose('verdict', 'first policy better')")
        assert run("cells(5)[0] + cells(7)[0]") == "2 / 20 / 2"
        assert run("byId('count').textContent") == "20 of 61 problems"
        run("choose('verdict', 'policies differ')")
        assert run("byId('count').textContent") == "60 of 61 problems"
        run("all('#problems tr.problem')[0].click()")
        assert run("all('.policies h3').map((h) => h.textContent)") == ["policy 0", "policy 1"]
        assert run("all('.policies > div').map((d) => d.querySelectorAll('details').length)") == [
            2, 2
        ]  # fmt: skip
        left, right = run("all('.policies > div').map((d) => d.getBoundingClientRect().left)")
        assert left < right


def test_words_that_differ_are_marked_and_hidden_by_a_click(tmp_path):
    write(tmp_path / "page.html", num_policies=3, samples_of=compared_samples)
    with open_page(tmp_path / "page.html", tmp_path / "profile") as browser:
        run = browser.run
        run(HELPERS)
        run(
            "const press = () => { all('td.detail > button')[0].click();"
            "return new Promise((resolve) => setTimeout(resolve, 100)); }; 0"
        )
        marked = (
            "all('.policies > div').map((d) => [...d.querySelectorAll('.differs')]"
            ".map((word) => word.textContent))"
        )
        run("all('#problems tr.problem')[0].click()")
        run("press()")  # opens the first responses, too
        assert run("all('details[open]').length") == 3
        assert run(marked) == [["1", "2.", "check:"], ["2", "3.", "check", "again:"], []]
        assert run("all('details pre').map((pre) => pre.textContent)") == [*TEXTS]
        run("all('details').forEach((details) => { details.open = true; })")
        run("new Promise((resolve) => setTimeout(resolve, 100))")
        assert run(marked)[0] == ["1", "2.", "check:"]  # the others are equal, or alone
        run("press()")
        assert run(marked) == [[], [], []] and run("all('details[open]').length") == 7
        assert run("all('td.detail > button')[0].textContent") == "show the words that differ"
        assert run("differing('a b a', 'a')") == [[2, 3], [4, 5]]  # both ends are equal, once
        assert run("differing('a '.repeat(4e3), 'b '.repeat(4e3))") is None
