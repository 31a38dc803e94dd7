"""A real browser draws the report, sorts and filters its responses, and executes none of them."""

import threading

import numpy as np
import pytest

from semrl_jax.pages.report import page, serving, write_report
from semrl_jax.runs.records import write_rollouts
from semrl_jax.sampling.scoring import Scored
from tests.browser import open_page
from tests.pages.report.making import add_row, make_run, scored, text_of

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'"
BOLD = "<b>bold</b>&lt;"

# Functions for the tests. `choose` and `find` wait until the page was drawn again.
HELPERS = """
const all = (selector) => [...document.querySelectorAll(selector)];
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const titled = (title) => all(".plots section").find(
  (section) => section.querySelector("h3").textContent === title);
const plotOf = async (title) => {
  titled(title).scrollIntoView({ block: "center" });
  const plot = plots.find((one) => one.panel.title === title);
  for (let i = 0; i < 100 && plot.stale; i++) await wait(50);
  return plot.box;
};
const pointOf = async (title, step) => {  // in the window
  const plot = await plotOf(title), { xaxis, yaxis } = plot._fullLayout;
  const box = plot.getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.d2p(step), box.top + yaxis._offset + 60];
};
const set = (id, value) => {
  const node = byId(id);
  if (node.type === "checkbox") node.checked = value; else node.value = value;
  node.dispatchEvent(new Event(node.type === "range" ? "input" : "change"));
};
const choose = (id, value) => {
  byId(id).selectedIndex = [...byId(id).options].findIndex((option) => option.text === value);
  byId(id).dispatchEvent(new Event("change"));
};
const cells = (column) => all("#samples tr.sample").map((tr) =>
  tr.children[all("#samples th").findIndex((th) => th.textContent.startsWith(column))]
    .textContent.replace(/[▸▾]/, ""));
const sortBy = (name) =>
  all("#samples th button").find((button) => button.textContent.startsWith(name)).click();
const find = async (text) => {
  byId("search").value = text;
  byId("search").dispatchEvent(new Event("input"));
  await wait(400);
};
const values = (id) => all(`#${id} tbody tr`).map(
  (tr) => [...tr.children].map((td) => td.textContent));
0
"""


@pytest.fixture
def run_of(config, tmp_path):
    def make(name="run", **options):
        return make_run(tmp_path / name, config, **options)

    return make


@pytest.fixture
def opened(tmp_path):
    """Opens a page with the helpers; no error may be in the console at the end."""
    contexts = []

    def open_(place):
        contexts.append(open_page(place, tmp_path / "profile"))
        browser = contexts[-1].__enter__()
        browser.run(HELPERS)
        browsers.append(browser)
        return browser

    browsers = []
    yield open_
    try:
        for browser in browsers:
            browser.run("0")  # what was sent before this is read
            assert browser.errors == []
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def test_curves_of_one_run(run_of, opened):
    run = run_of(starts=(0, 6))
    write_report(run)
    browser = opened(run / "report.html")
    js = browser.run
    # The mouse shows the values of a step, and the event at it.
    browser.move_mouse(*js("pointOf('Reward', 5)"))
    js("wait(400)")
    shown = js("titled('Reward').querySelector('.hoverlayer').textContent")
    assert "mean : 0.2" in shown and "retry : 2 in this step" in shown, shown

    # Errors of a benchmark are 95 %; smoothing leaves evaluations as they are.
    js("set('smoothing', '0.9')")
    traces = "plotOf(%r).then((plot) => plot.data.filter((t) => t.yaxis !== 'y2'))"
    (curve,) = js(traces % "Greedy accuracy")
    assert curve["error_y"]["array"] == pytest.approx([1.96 * 0.05] * 3)
    assert curve["y"] == pytest.approx([0.2, 0.28, 0.36])
    logged, smooth = js(traces % "Reward")
    assert logged["y"] == pytest.approx([0.1 + 0.02 * step for step in range(12)])
    mean, total = 0.0, 0.0  # an exponential mean without the pull of the start
    for value, found in zip(logged["y"], smooth["y"]):
        mean, total = 0.9 * mean + 0.1 * value, 0.9 * total + 0.1
        assert found == pytest.approx(mean / total)

    js("set('log', true)")
    assert js("plotOf('Reward').then((plot) => plot.layout.yaxis.type)") == "log"
    assert js("plotOf('Stages of a step').then((plot) => plot.layout.yaxis.type)") == "linear"
    assert [t["name"] for t in js(traces % "Stages of a step")] == ["sample", "update", "other"]
    js("set('events', false)")
    assert js("plotOf('Reward').then((plot) => plot.data.length)") == 2

    # A zoom of one plot stays when another setting changes.
    browser.drag(js("pointOf('Reward', 2)"), js("pointOf('Reward', 5)"))
    js("wait(400)")
    js("set('smoothing', '0')")
    left, right = js("plotOf('Reward').then((plot) => plot._fullLayout.xaxis.range)")
    assert (left, right) == pytest.approx((2, 5), abs=0.1)  # a pixel is 0.03 steps
    js("choose('any', 'time/step_s')")
    (curve,) = js(traces % "Quantities of your choice")
    assert curve["y"] == [3.5] * 12

    # The table has values of the last training step and of the last evaluation.
    assert ["reward/mean", "0.1", "0.26", "+0.16"] in js("values('figure-table')")
    assert ["eval/sums/greedy_accuracy", "0.2", "0.36 ± 0.098", "+0.16"] in (
        js("values('figure-table')")
    )
    assert js("all('#event-list td:nth-child(2)').map((td) => td.textContent)") == [
        "skipped update", "retry", "resume"
    ]  # fmt: skip
    assert ["training.num_steps", "3", "160"] in js("values('settings')")
    assert "1 x cpu" in js("byId('machines').textContent")


def test_responses_are_sorted_filtered_and_found(run_of, opened):
    run = run_of()
    write_report(run)
    browser = opened(run / "report.html")
    js = browser.run
    assert js("byId('count').textContent") == "72 of 72 responses"
    assert (
        js("byId('place').textContent") == "1 / 3" and js("cells('step')") == ["8"] * 24 + ["4"] * 6
    )
    js("sortBy('tokens')")
    assert js("cells('tokens')")[:6] == ["5"] * 6
    js("sortBy('tokens')")
    assert js("cells('tokens')")[:4] == ["20"] * 3 + ["19"]
    assert js("all('#samples th').map((th) => th.ariaSort).filter((x) => x !== 'none')") == [
        "descending"
    ]
    # A metric that is not valid comes last in both directions.
    for _ in range(2):
        js("sortBy('effective rank'); page = 2; render()")
        assert js("cells('effective')")[-6:] == [""] * 6
    js("choose('source', 'sums'); choose('sample-step', 'step 8'); choose('verdict', 'correct')")
    assert sorted(js("cells('group')")) == ["0", "1", "2", "3"]
    js("choose('source', 'training and benchmarks'); choose('sample-step', 'all steps')")
    js("choose('verdict', 'any verdict'); find('17 TOKENS')")
    assert js("new Set(cells('tokens'))[Symbol.iterator]().next().value") == "17"
    assert js("byId('count').textContent") == "3 of 72 responses"
    js("find('')")

    # A click on a response shows its whole group, with the prompt and its template.
    js("choose('source', 'training'); sortBy('group'); all('#samples tr.sample')[1].click()")
    assert js("all('tr.detail .group > div').length") == 4
    assert js("all('tr.detail .group > div.chosen').length") == 1
    lefts = js("all('tr.detail .group > div').map((div) => div.getBoundingClientRect().left)")
    assert lefts == sorted(set(lefts))
    assert js("all('tr.detail pre .template')[0].textContent") == "<|im_start|>"
    shown = js("all('tr.detail')[0].innerText")
    for text in ("1 of 4 correct", "reference 7", "2 tokens", "eos, 5 tokens", "effective rank",
                 "log-probability of the tokens", "✓ correct #0"):  # fmt: skip
        assert text in shown, shown
    assert js("all('tr.detail svg polyline').length") == 8  # log-probabilities, effective ranks
    # A group has one scale per kind of line: not every line reaches the bottom, y = 29.
    lines = "all('tr.detail svg polyline')"
    lowest = js(f"{lines}.map((line) => Math.max(...[...line.points].map((point) => point.y)))")
    assert max(lowest) == 29 and min(lowest) < 29

    # On a phone the chosen one is in view, of however many.
    browser.resize(400)
    js("all('#samples tr.sample')[3].click()")
    right = "all('tr.detail .chosen').at(-1).getBoundingClientRect().right"
    assert js("all('tr.detail .group').at(-1).scrollLeft") > 300 and js(right) <= 400


def test_hostile_and_long_text_is_shown_within_the_screen(run_of, opened, tmp_path):
    run = run_of(f"<b>{'a_long_name_' * 8}", text=lambda _: HOSTILE)
    add_row(run, 12, {f"eval/{BOLD}/greedy_accuracy": 0.5}
            | {f"eval/{'benchmark' * 8}{i}/greedy_accuracy": 0.5 for i in range(9)})  # fmt: skip
    page.write_page(tmp_path / "page.html", [run])
    browser = opened(tmp_path / "page.html")
    js = browser.run
    js("all('#samples tr.sample')[0].click(); set('all-keys', true)")
    js("choose('which', 'all settings')")
    for width in (1280, 400):
        browser.resize(width)
        js("(async () => { for (const plot of plots.filter((p) => p.panel.keys.length)) "
           "await plotOf(plot.panel.title); })()")  # fmt: skip
        assert js("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
        assert js("all('.plot').every((p) => p.getBoundingClientRect().right <= innerWidth)")
        # What is opened in the wide table of responses fits, too.
        assert js("all('td.detail > div')[0].getBoundingClientRect().right") <= width
    assert js("all('tr.detail pre').map((pre) => pre.textContent)")[0] == HOSTILE
    legend = js("plotOf('Greedy accuracy').then((p) => p.querySelector('.legend').textContent)")
    assert BOLD in legend  # plotly would read it as markup
    assert js("document.title") == run.name and js("all('img, b, iframe').length") == 0


def test_several_runs_are_compared_and_followed(config, tmp_path, opened):
    """Two runs from a server: curves on one axis, differences, and a refresh without a reload."""
    first = make_run(tmp_path / "first", config)
    config.training.learning_rate = 0.5
    second = make_run(tmp_path / "second", config, gain=0.03)
    server = serving._Server((serving.HOST, 0), serving._Handler)
    server.content = serving.Content([first, second])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    browser = opened(f"http://127.0.0.1:{server.server_port}/{server.token}/")
    js = browser.run
    curves = "plotOf('Reward').then((p) => p.data.filter((t) => t.yaxis !== 'y2'))"
    assert [curve["name"] for curve in js(curves)] == ["first mean", "second mean"]
    assert [curve["y"][-1] for curve in js(curves)] == pytest.approx([0.32, 0.43])
    js("all('#runs input')[0].click()")
    assert [curve["name"] for curve in js(curves)] == ["second mean"]
    js("all('#runs input')[0].click()")
    stages = js("plotOf('Stages of a step').then((p) => p.data.map((t) => [t.name, t.x, t.y]))")
    assert stages[0] == ["sample", ["first", "second"], [1, 1]]
    assert ["reward/mean", "0.26", "0.34", "+0.08"] in js("values('figure-table')")
    assert js("values('paired')")[-1] == [
        "8", "sums", "8", "second", "50.0 %", "62.5 %", "+12.5 ± 24.5"
    ]  # fmt: skip
    assert js("values('settings')") == [["training.learning_rate", "0.01", "0.5", "5e-07"]]
    # The responses of both runs to a problem stand side by side.
    js("choose('source', 'sums'); choose('sample-step', 'step 8'); choose('run', 'second')")
    js("all('#samples tr.sample')[0].click()")
    assert js("all('tr.detail .group h3').map((h) => h.textContent.split(' ')[0])") == [
        "first", "second"
    ]  # fmt: skip

    # A new row and new responses appear; zoom, filters and what is open stay.
    browser.drag(js("pointOf('Reward', 2)"), js("pointOf('Reward', 5)"))
    add_row(second, 12, {"reward/mean": 0.9})
    write_rollouts(
        second / "rollouts", 12, Scored.of([scored(i, correct=True) for i in range(4)]), text_of
    )
    js("(async () => { for (let i = 0; i < 100 && rows.length < 148; i++) await wait(50); })()")
    assert js("byId('count').textContent") == "8 of 148 responses"
    assert [curve["x"][-1] for curve in js(curves)] == [11, 12]
    left, right = js("plotOf('Reward').then((plot) => plot._fullLayout.xaxis.range)")
    assert (left, right) == pytest.approx((2, 5), abs=0.1)
    assert js("all('tr.detail').length") == 1
    assert js("byId('live').textContent").startswith("live: follows the run, last change ")

    # A server that has ended is told, and the page stays.
    server.shutdown()
    server.server_close()
    js("(async () => { for (let i = 0; i < 100 && !byId('live').textContent.startsWith('not'); i++)"
       " await wait(50); })()")  # fmt: skip
    assert "the server has ended" in js("byId('live').textContent")
    assert browser.errors
    assert all("ERR_CONNECTION_REFUSED" in error["text"] for error in browser.errors)
    browser.errors.clear()


def test_values_of_another_step_are_marked_and_not_compared(run_of, opened, tmp_path):
    first, second = (run_of(name, num_steps=0) for name in ("first", "second"))
    for step in range(7):
        for run, every in ((first, 2), (second, 3)):
            score = {"eval/sums/mean_score": 0.5 + step / 10} if step % every == 0 else {}
            add_row(run, step, {"reward/mean": 0.25, **score})
    page.write_page(tmp_path / "page.html", [first, second])
    browser = opened(tmp_path / "page.html")
    assert ["eval/sums/mean_score", "1.1", "1.1", "+0"] in browser.run("values('figure-table')")
    browser.run("set('step', '5')")
    assert ["eval/sums/mean_score", "0.9 (step 4)", "0.8 (step 3)", ""] in (
        browser.run("values('figure-table')")
    )
    assert ["reward/mean", "0.25", "0.25", "+0"] in browser.run("values('figure-table')")


def test_steps_of_a_long_run_are_not_searched_for_every_key(run_of, opened, tmp_path):
    """A live page does this every few seconds."""
    runs = [run_of(f"run{seed}", num_steps=0) for seed in range(2)]
    keys = [f"eval/sums{number}/mean_score" for number in range(20)]
    for run in runs:
        for step in range(200):
            evaluated = dict.fromkeys(keys, 0.5) if step % 50 == 0 else {}
            add_row(run, step, {"reward/mean": 0.25, **evaluated})
    page.write_page(tmp_path / "page.html", runs)
    searched = opened(tmp_path / "page.html").run(
        """{
          const real = Array.prototype.indexOf;
          let count = 0;
          Array.prototype.indexOf = function (...values) {
            if (this.length > 100) count += 1;
            return real.apply(this, values);
          };
          layFigures();
          Array.prototype.indexOf = real;
          count;
        }"""
    )
    assert searched < 10


def test_an_episode_is_shown_turn_by_turn(run_of, opened):
    run = run_of(num_steps=1)
    calls = '<tool_call>{"name": "f😀"}</tool_call><|im_end|>'
    texts = [calls, f"<|im_start|>tool\n{HOSTILE}<|im_end|>", "It is 4.<|im_end|>"]
    item = scored(
        0, correct=True, response_mask=np.array([True, True, False, False, True]),
        turn_rewards=np.array([0.0, 1.0], np.float32),
    )  # fmt: skip

    def text(ids):
        known = {(1, 2, 3, 4, 5): "".join(texts), (1, 2): texts[0], (3, 4): texts[1]}
        return known.get(tuple(ids.tolist()), texts[2] if ids.tolist() == [5] else "prompt")

    write_rollouts(run / "rollouts", 1, Scored.of([item]), text)
    write_report(run)
    browser = opened(run / "report.html")
    js = browser.run
    js("choose('sample-step', 'step 1')")
    js("all('#samples tr.sample')[0].click()")
    nodes = js(
        "[...document.querySelector('.group > div').children].slice(1, 7)"
        ".map((n) => [n.tagName, n.textContent, n.open ?? null])"
    )
    begin = f"tool\n{HOSTILE}"[:100]
    call = '<tool_call>{"name": "f😀"}</tool_call>'
    assert nodes == [
        ["DIV", "turn 1, reward 0", None], ["DETAILS", f"call: {call}{call}", False],
        ["PRE", "<|im_end|>", None], ["DETAILS", f"answer: {begin}{texts[1]}", False],
        ["DIV", "turn 2, reward 1", None], ["PRE", texts[2], None],
    ]  # fmt: skip
    assert js("document.title") != "owned"
