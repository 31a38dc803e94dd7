"""A run whose reward function judges steps: they are recorded, and credited."""

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.runs import train
from tests.fixtures import read_rows
from tests.oracles import algorithms as oracle
from tests.runs.test_environment import rollouts_of
from tests.verifiers import of_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]


def test_a_run_credits_steps(config, tmp_path):
    """The tokens of the tiny tokenizer are characters, or special tokens without any."""
    config.rewards.function = "tests.verifiers:of_steps"
    config.algorithms.advantage.credit, config.shaping.target = "turn", "none"
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "run")) == 0
    row, found = read_rows(tmp_path / "run")[0], rollouts_of(tmp_path / "run")
    tokenizer, mask, places, rewards = data.character_tokenizer(), [], [], []
    for item in found:
        text = data.verifier_text(tokenizer, item["response_ids"])
        steps = of_steps(text, item["reference"])["steps"]
        ends, of_ends = item["step_ends"] or [], item["step_rewards"] or []
        assert of_ends == [reward for _, reward in steps]
        characters = [
            len(tokenizer.decode(i, skip_special_tokens=True)) for i in item["response_ids"]
        ]
        assert [sum(characters[: place + 1]) for place in ends] == [end for end, _ in steps]
        assert all(characters[place] == 1 for place in ends)
        own = np.arange(64) < len(item["response_ids"])
        mask.append(own)
        places.append(oracle.turns(own, ends))
        last = len(places[-1]) - 1  # has what the others leave
        rewards.append([*of_ends[:last], item["score"] - sum(of_ends[:last])])
    assert row["response/steps/mean"] == np.mean([len(i["step_ends"] or []) for i in found]) > 1

    def estimate(returns, lengths):
        return oracle.group_relative([returns])[0] if len(returns) > 1 else [0.0]

    expected = oracle.by_turn(estimate, rewards, mask, config.rollout.group_size, places)
    assert np.ptp(expected, axis=1).max() > 0.1
    for name in ("mean", "max", "min"):
        of = getattr(expected[np.array(mask)], name)()
        assert row[f"advantage/{name}"] == pytest.approx(of, rel=1e-4, abs=1e-5)


def test_a_function_that_fails_is_told_once(config, tmp_path, capsys):
    config.rewards.function, config.training.num_steps = "tests.verifiers:raises_without_box", 2
    assert train(config, str(tmp_path / "run")) == 0
    assert "".join(capsys.readouterr()).count("no verdict, such as 'exception: ValueError") == 1
