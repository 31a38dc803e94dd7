"""Every example of docs/extending.md is one file, and trains for two steps."""

import re

import pytest

from tests.fixtures import read_rows
from tests.launch.conftest import ROOT, TINY, succeed

PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLE = re.compile(
    r"`my_package/(?P<name>\w+)\.py`.*?```python\n(?P<code>.*?)```\n\n```bash\n(?P<command>.*?)```",
    re.DOTALL,
)
EXAMPLES = {found["name"]: found for found in EXAMPLE.finditer(PAGE)}
# What the row of a run has with the example alone.
SHOWN = {
    "leave_one_out": "policy/entropy",
    "mean_norm": "metrics/mean_norm/mean",
    "unsolved": "curriculum/visited_fraction",
    "halfway": "rollout/branches/fraction",
    "unlikely": "policy/unlikely_fraction",
    "any_of_four": "eval/arithmetic/any_of_four",
    "doubles": "eval/doubles/greedy_accuracy",
    "normed": "policy/loss",
    "signs": "policy/grad_norm",
}
QUICK = "leave_one_out"


def test_every_example_of_the_page_is_run():
    assert EXAMPLES.keys() == SHOWN.keys()
    assert PAGE.count("```python") == len(SHOWN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name != QUICK)) for name in EXAMPLES]
)
def test_an_example_is_one_file_and_trains(name, tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / f"{name}.py").write_text(EXAMPLES[name]["code"])  # and nothing else
    flags = re.findall(r"--config\.\S+", EXAMPLES[name]["command"])
    assert any(f"my_package.{name}" in flag for flag in flags)
    if name == "any_of_four":  # responses of two plans in one record
        flags.append("--config.evaluation.metrics=True")
    succeed(
        "launch.train", f"--config={TINY}", f"--workdir={tmp_path / 'run'}", *flags,
        "--config.training.num_steps=2", env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert SHOWN[name] in rows[0]
    if name == "leave_one_out":  # needs neither
        assert not any(key.startswith("policy/kl") for key in rows[0])
        assert "time/ref_logprobs_s" not in rows[0] and "time/old_logprobs_s" not in rows[0]
    if name == "any_of_four":
        assert "eval/arithmetic/metrics/effective_rank/mean" in rows[0]
