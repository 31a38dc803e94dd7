"""Every setting has a meaning, and the page of settings is current."""

import runpy

from configs import default
from semrl_jax.settings.meanings import meanings, unit
from semrl_jax.settings.rules import flatten
from tests.analysis.test_verl_page import ROOT


def test_every_setting_has_a_meaning():
    fields, texts = flatten(default.get_config()), meanings()
    assert not [field for field in fields if not texts.get(field)]


def test_a_meaning_is_the_comment_beside_the_field():
    texts = meanings()
    assert texts["checkpoints.keep"] == "the newest ones stay"  # behind the value
    assert texts["rollout.stop_words"].startswith("Words of one token")  # above
    assert texts["rollout.token_file"].startswith("token for")  # not the comment of its neighbour
    assert texts["training.responses_per_step"].startswith("derived")  # over several lines
    assert texts["distributed"] == "docs/clusters.md"  # a section
    assert texts["evaluation.metric_options.stride"] == texts["metrics.stride"]


def test_units_are_those_of_the_names():
    expected = {
        "rollout.call_timeout_s": "seconds", "rewards.memory_limit_gib": "GiB",
        "rollout.max_response_tokens": "tokens", "data.add_special_tokens": "",
        "training.num_steps": "steps", "evaluation.n": "responses", "evaluation.k": "",
        "checkpoints.every_steps": "steps", "checkpoints.keep": "checkpoints", "seed": "",
    }  # fmt: skip
    assert {field: unit(field) for field in expected} == expected


def test_numbers_of_things_have_units():
    # A number that counts or measures says what; ratios, rates and coefficients have no unit.
    fields = flatten(default.get_config())
    counted = [f for f in fields if f.endswith(("_s", "_gib", "_steps", "_size")) or "num_" in f]
    sizes = {"model.hidden_size", "model.intermediate_size"}
    plain = {f for f in counted if not unit(f)} - sizes
    assert plain == {"model.num_layers", "model.num_heads", "model.num_kv_heads"}


def test_the_page_is_current():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    assert (ROOT / "docs" / "configuration.md").read_text() == made["page"](), (
        "run: python docs/make_configuration.py"
    )
