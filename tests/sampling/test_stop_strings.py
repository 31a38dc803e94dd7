"""Runs whose responses end at stop strings and stop words."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs import default
from semrl_jax import data
from semrl_jax.data.tokenizer import CHARACTERS
from semrl_jax.runs import train
from tests.fixtures import make_scored, read_rows
from tests.sampling.test_scoring import HereVerifier, sample_here


def test_no_stop_string_or_word_is_set_by_default():
    config = default.get_config()
    assert config.rollout.stop_strings == config.evaluation.stop_strings == ()
    assert config.rollout.stop_words == config.rollout.stop_token_ids == ()
    config.rollout.stop_strings = ("a",)
    assert config.evaluation.stop_strings == ("a",)  # follows, unless set
    config.evaluation.stop_strings = ("b",)
    assert config.rollout.stop_strings == ("a",)


@pytest.mark.parametrize("stop_strings", [(), ("Q",)])
def test_a_call_and_the_graded_text_have_the_same_stop_strings(config, stop_strings):
    config.rollout.stop_token_ids = (3, 12)
    config.rollout.stop_words = ("-", "<pad>", "1")
    tokenizer, calls, verifier = data.character_tokenizer(), [], HereVerifier()
    ids = tokenizer.encode("\\boxed{7}\nQ: 2\\boxed{9}")
    rollout = make_scored(response_ids=np.array(ids)).rollout
    (scored,) = sample_here(
        config, tokenizer, [rollout], verifier, {0: "7"}, calls, stop_strings=stop_strings
    )
    (sampling,) = calls
    assert sampling.stop_strings == stop_strings
    minus, one = tokenizer.convert_tokens_to_ids(["-", "1"])
    assert sampling.stop_token_ids == tuple(dict.fromkeys((3, 12, minus, 0, one)))
    text = "\\boxed{7}\n" if stop_strings else "\\boxed{7}\nQ: 2\\boxed{9}"
    assert verifier.seen == [scored.response] == [text]


@pytest.mark.slow
@pytest.mark.usefixtures("reports_where_looked_at", "rewarded")
def test_a_run_with_stop_strings(config, tmp_path):
    """Rows, recorded responses and the mask agree with the text; evaluation has its own."""
    config.rollout.stop_strings = ("7", "A+", "4Q")
    config.rollout.stop_words = ("-",)
    # Greedy responses of random weights repeat one character.
    repeated = tuple(3 * character for character in CHARACTERS)
    config.evaluation.stop_strings = repeated
    config.algorithms.batch_rules.mask_truncated = True
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")
    assert all(np.isfinite(row["policy/loss"]) for row in rows if "policy/loss" in row)
    tokenizer = data.character_tokenizer()
    for kind, stops in (("step", config.rollout.stop_strings), ("eval", repeated)):
        table = pq.read_table(tmp_path / "run" / "rollouts" / f"{kind}_000000.parquet").to_pylist()
        reasons = {row["finish_reason"] for row in table}
        assert "stop" in reasons
        for row in table:
            ids = row["response_ids"]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            before = tokenizer.decode(ids[:-1], skip_special_tokens=True)
            assert not any(stop in before for stop in (*stops, "-"))
            ends = any(stop in text for stop in (*stops, "-"))
            assert (row["finish_reason"] == "stop") == ends
            assert len(row["rollout_logprobs"]) == len(ids)
    row = rows[0]
    total = sum(row[f"response/{reason}_fraction"] for reason in ("eos", "stop", "length"))
    assert total == pytest.approx(1) and row["response/stop_fraction"] > 0.2
