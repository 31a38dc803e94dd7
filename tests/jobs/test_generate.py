"""How a generation is divided into calls, and what it leaves."""

import json

import pytest

from configs import default
from semrl_jax import data, models
from semrl_jax.jobs.generate import (
    MAX_STATE_BYTES,
    Contents,
    calls_of,
    check_layers,
    generate,
    settings_of,
)
from semrl_jax.runs.policies import find_policies
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams
from tests.fixtures import save_model
from tests.tiny import tiny_config

ARCHITECTURE = models.DecoderConfig(
    vocab_size=8, hidden_size=4096, intermediate_size=8, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=4,
)  # fmt: skip


def sizes(calls):
    """The calls follow each other without a gap."""
    assert [call.first for call in calls[1:]] == [call.last for call in calls[:-1]]
    assert calls[0].first == 0 and [call.number for call in calls] == list(range(len(calls)))
    return [call.last - call.first for call in calls]


def test_calls_cover_all_responses():
    config = default.get_config()
    config.evaluation.n, config.evaluation.responses_per_call = 3, 4
    calls = calls_of(config, ARCHITECTURE, 3, None)
    assert sizes(calls) == [4, 4, 1]  # a call may end inside a group
    assert len({call.part for call in calls}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kinds", [("decode",), ("decode", "prefill")])
def test_hidden_states_of_a_call_are_bounded(dtype, kinds):
    config = default.get_config()
    config.evaluation.n = 1000
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 1000, 3000
    states = HiddenStateParams((-1, 2), dtype, kinds)
    size, *_ = sizes(calls_of(config, ARCHITECTURE, 1, states))
    tokens = 4000 if "prefill" in kinds else 3000
    num_bytes = tokens * 2 * 4096 * (2 if dtype == "bfloat16" else 4)
    assert size * num_bytes <= MAX_STATE_BYTES < (size + 1) * num_bytes
    config.evaluation.metrics = True
    config.evaluation.metric_options.layers = (-1, 1)  # a third layer is in memory, too
    (measured, *_) = sizes(calls_of(config, ARCHITECTURE, 1, states))
    assert measured == MAX_STATE_BYTES // (num_bytes // 2 * 3)
    config.rollout.max_response_tokens = 10**8  # a single response may be above the bound
    assert sizes(calls_of(config, ARCHITECTURE, 1, states))[0] == 1


def test_layers_beyond_the_model_are_refused():
    check_layers(None, ARCHITECTURE)
    check_layers(HiddenStateParams((-1, 0, 3)), ARCHITECTURE)
    with pytest.raises(UserError, match="--hidden_states has 4; choose from 0 to 3"):
        check_layers(HiddenStateParams((1, 4)), ARCHITECTURE)


def test_a_row_that_is_left_out_numbers_the_others(tmp_path):
    file, settings = tmp_path / "q.jsonl", []
    for start in ("", "{\n", ""):
        file.write_text(start + json.dumps({"question": "1+1=", "answer": 2}) + "\n")
        prompts = data.load_prompts(file, data.character_tokenizer(), skip_bad_rows=True)
        settings.append(settings_of(tiny_config(), prompts, Contents()))
    assert settings[0] == settings[2]
    different = {name for name, value in settings[0].items() if settings[1][name] != value}
    assert different == {"rows of the prompts"}


def test_parts_that_a_killed_command_left_behind_its_responses_are_removed(tmp_path):
    save_model(tmp_path / "model")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "1+1=", "answer": 2}) + "\n")
    (source,), config = find_policies(str(tmp_path / "model"), None), tiny_config()
    config.data.update(task="files", files=(str(tmp_path / "q.jsonl"),))
    config.rollout.max_response_tokens, config.evaluation.n = 4, 1
    config.evaluation.verifier, config.evaluation.metrics = "", False
    output = tmp_path / "out"
    for _ in range(2):
        assert generate(config, source, output, Contents()) == 0
        assert not (output / "parts").exists()
        (output / "parts").mkdir()
        (output / "parts" / "000000000-000000001.parquet").touch()
