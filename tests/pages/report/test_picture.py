"""`curves.png`: which quantities it draws, and how."""

import io

import pytest

from semrl_jax.pages.report.picture import draw_curves


def test_panels_without_data_are_left_out():
    figure = draw_curves([{"step": 0, "reward/mean": 1.0}, {"step": 1, "reward/mean": 2.0}])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Reward"]


def test_panels_of_a_critic_and_of_a_single_state_can_be_read():
    """One bad step of the critic does not hide the others, and a state has its name."""
    rows = [
        {"step": step, "critic/explained_variance": variance, "algorithm/kl_coefficient": 0.05}
        for step, variance in enumerate([-80.0, 0.1, 0.3])
    ]
    critic, state = draw_curves(rows).axes
    assert critic.get_ylim()[0] == -1 and critic.get_ylim()[1] > 0.3
    assert [text.get_text() for text in state.get_legend().get_texts()] == ["kl_coefficient"]


def test_the_accuracy_of_every_benchmark_has_its_own_line():
    benchmarks = ["_gsm8k", "cost in $", "a$b$\\frac{", *(f"set{i}" for i in range(12))]
    rows = [
        {"step": step, "reward/correct": 0.5, "policy/kl": None}
        | {f"eval/{name}/greedy_accuracy": 0.1 for name in benchmarks}
        | {f"eval/{name}/boxed_fraction": 0.1 for name in benchmarks}
        for step in range(3)
    ]
    figure = draw_curves(rows)
    figure.savefig(io.BytesIO())
    (axes,) = figure.axes
    assert len(axes.get_legend().get_texts()) == len(axes.lines) == len(benchmarks) + 1
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == len(axes.lines)


def test_damaged_values_are_left_out():
    rows = [
        {"step": step, "time/step_s": value, "reward/mean": value, "eval/\ud800/pass@1": 0.5}
        for step, value in enumerate((1.0, None, float("inf"), "2", [3.0], 4.0))
    ]
    figure = draw_curves(rows)
    figure.savefig(io.BytesIO())
    reward = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Reward")
    assert reward.lines[0].get_xydata().tolist() == [[0, 1], [5, 4]]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_ticks_of_steps_are_whole_numbers(num_steps):
    (axes,) = draw_curves([{"step": step, "reward/mean": 1.0} for step in range(num_steps)]).axes
    ticks = axes.xaxis.get_majorticklocs()
    assert len(ticks) and all(tick == int(tick) for tick in ticks)
