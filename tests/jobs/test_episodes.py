"""Episodes in `evaluate` and `play`, with a random policy."""

import pytest

from semrl_jax.evaluation.samples import read_samples
from semrl_jax.jobs import evaluate, play
from semrl_jax.jobs.result_directory import ResultDirectory
from semrl_jax.runs.policies import find_policies
from semrl_jax.support.errors import UserError
from tests.fixtures import save_chat_model
from tests.tiny import tiny_config

pytestmark = pytest.mark.slow

GAME = "tests.environments.users:Vowels"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = save_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    (found,) = find_policies(str(directory), None)
    return found


@pytest.fixture
def config():
    config = tiny_config()
    config.rollout.stop_token_ids = tuple(range(0, 280, 7))  # it never writes the end token
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 64, 96
    config.evaluation.held_out, config.evaluation.scores = False, ("pass_at_k",)
    config.evaluation.temperature, config.evaluation.n, config.evaluation.k = 1.0, 2, (1, 2)
    config.evaluation.responses_per_call = 4
    config.evaluation.benchmarks = (f"environment:{GAME}:turns=2:num_problems=6:name=two",)
    return config


def test_an_interrupted_evaluation_of_episodes_continues_with_the_same_results(
    config, source, tmp_path, monkeypatch, capsys
):
    assert evaluate.evaluate(config, [source], tmp_path / "whole") == 0
    samples = read_samples(tmp_path / "whole" / "samples.parquet")
    assert [(s.benchmark, s.group_id, s.sample_index) for s in samples] == [
        ("two", place, sample) for place in range(6) for sample in range(2)
    ]
    # Two turns of the policy have one answer between them.
    assert {s.response.count("More!") for s in samples if s.finish_reason == "stop"} == {1}
    assert any(s.score > 0 for s in samples)
    assert all(s.correct == (s.score >= 1) for s in samples)
    assert "pass@2" in capsys.readouterr().out

    write = ResultDirectory.write_part

    def write_and_fail(self, *part):
        write(self, *part)
        raise OSError("the power fails")

    output = tmp_path / "interrupted"
    with monkeypatch.context() as patched, pytest.raises(OSError, match="the power fails"):
        patched.setattr(ResultDirectory, "write_part", write_and_fail)
        evaluate.evaluate(config, [source], output)
    assert len(list((output / "parts").glob("*.parquet"))) == 1
    assert evaluate.evaluate(config, [source], output) == 0
    assert "4 of 12 responses are there already" in capsys.readouterr().out
    for name in ("samples.parquet", "results.json"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    config.environment.max_turns = 1
    with pytest.raises(UserError, match=r"other environment\.max_turns of two \(8, now 1\)"):
        evaluate.evaluate(config, [source], output)


def test_each_message_is_printed_when_it_is_there(config, source, capsys):
    config.environment.name = GAME
    lines = iter(["2", "", "x", "99", "00000000099", "/quit", "1"])
    assert play.play(config, source, lambda: next(lines)) == 0
    out = capsys.readouterr().out
    tasks = [line for line in out.splitlines() if line.startswith("--- task ")]
    assert tasks == ["--- task 0", "--- task 2", "--- task 3"]
    most = 0
    for text in out.split("--- task ")[1:]:
        heads = [line for line in text.splitlines() if line.startswith("--- ")]
        turns = len([head for head in heads if head.startswith("--- policy")])
        expected = ["--- prompt", "--- policy, turn 1"]
        for turn in range(2, turns + 1):
            expected += ["--- environment", f"--- policy, turn {turn}"]
        assert heads == expected
        assert text.count("More!") == turns - 1 and "Write about w" in text
        (end,) = [line for line in text.splitlines() if line.startswith("[rewards ")]
        assert end.partition(";")[0].count(",") == turns - 1 and "; score " in end
        most = max(most, turns)
    assert most > 1
    assert out.count("there are tasks 0 to ") == 3
