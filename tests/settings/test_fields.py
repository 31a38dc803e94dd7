"""A setting is one statement, and what is known of every setting is current."""

from __future__ import annotations

import dataclasses
import re
import runpy

import pytest

from configs import default
from semrl_jax.settings import moved
from semrl_jax.settings.config import Config, known_settings
from semrl_jax.settings.rules import flatten
from semrl_jax.support.fields import build, check_fields, described, follows, section, setting
from tests.analysis.test_verl_page import ROOT
from tests.cases import refused


@dataclasses.dataclass(frozen=True)
class Inner:
    names: tuple[str, ...] = setting(("a",), "Names of things", items=str)
    kinds: tuple[str, ...] = setting((), "Kinds of things", each=("x", "y"))
    rate: float = setting(0.5, "Share of things", within="[0, 1)")
    wait_s: float = setting(3.0, "Limit of one thing", above=0, at_most=9)


@dataclasses.dataclass(frozen=True)
class Outer:
    mode: str = setting("on", "Whether things happen", choices=("on", "off"), may_change=True)
    size: int = setting(2, "Size of a thing", "things", at_least=1)
    inner: Inner = section(Inner, "What is inside")
    other: Inner = section(Inner, may_change=True)
    copy_s: float = follows("inner.wait_s", "Follows inner.wait_s unless set")


def test_a_setting_is_one_statement():
    config, known = build(Outer), described(Outer)
    assert list(config) == ["copy_s", "inner", "mode", "other", "size"]  # a ConfigDict sorts
    assert config.inner.names == ("a",) and config.size == 2
    assert known["inner.wait_s"].unit == "seconds" and known["size"].unit == "things"
    assert known["mode"].meaning == "Whether things happen" and known["inner"].unit == ""
    assert [name for name, of in known.items() if of.may_change] == [
        "mode", "other", "other.names", "other.kinds", "other.rate", "other.wait_s",
    ]  # fmt: skip
    config.inner.wait_s = 4.0
    assert config.copy_s == 4.0
    config.copy_s = 5.0
    assert config.inner.wait_s == 4.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "maybe", "top.mode='maybe' must be one of 'on', 'off'."),
        ("size", 0, "top.size=0 must be at least 1."),
        ("inner.names", (1,), "top.inner.names has 1; it may have texts, one for each flag."),
        ("inner.kinds", ("z",), "top.inner.kinds='z' must be one of 'x', 'y'."),
        ("inner.rate", 1.0, "top.inner.rate=1.0 must be in [0, 1)."),
        ("inner.wait_s", 0.0, "top.inner.wait_s=0.0 must be above 0."),
        ("inner.wait_s", 10.0, "top.inner.wait_s=10.0 must be at most 9."),
    ],
)
def test_each_rule_of_a_field(field, value, message):
    config = build(Outer)
    check_fields("top", config, Outer)
    config.update_from_flattened_dict({field: value})
    assert refused(".", check_fields, "top", config, Outer) == message


WRONG = {
    "above": lambda limit: limit,
    "at_least": lambda limit: limit - 1,
    "at_most": lambda limit: limit + 1,
    "within": lambda interval: float(interval[1:-1].split(", ")[1]) + 1,
    "choices": lambda allowed: "other",
    "each": lambda allowed: ("other",),
    "items": lambda kind: (1,) if kind is str else ("1",),
}


def test_every_rule_of_every_setting_is_checked():
    config = default.get_config()
    right = flatten(config)
    for field, known in known_settings().items():
        for rule, argument in known.rules.items():
            config.update_from_flattened_dict({field: WRONG[rule](argument)})
            refused(rf"^{re.escape(field)}(=| has )", check_fields, "", config, Config)
            config.update_from_flattened_dict({field: right[field]})


def test_every_setting_has_a_meaning():
    known = known_settings()
    assert not [field for field in flatten(default.get_config()) if not known[field].meaning]


def test_numbers_of_things_have_units():
    # A number that counts or measures says what; ratios, rates and coefficients have no unit.
    fields, known = flatten(default.get_config()), known_settings()
    counted = [f for f in fields if f.endswith(("_s", "_gib", "_steps", "_size")) or "num_" in f]
    sizes = {"model.hidden_size", "model.intermediate_size"}
    plain = {f for f in counted if not known[f].unit} - sizes
    assert plain == {"model.num_layers", "model.num_heads", "model.num_kv_heads"}


def test_the_page_is_current():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    assert (ROOT / "docs" / "configuration.md").read_text() == made["page"](), (
        "run: python docs/make_configuration.py"
    )


def test_one_setting_has_the_defects_of_the_release():
    config = default.get_config()
    windows = [config.metrics, config.evaluation.metric_options]
    assert [section.window for section in windows] == ["exact", "exact"]
    config.shaping.reproduce_release = True
    assert [section.window for section in windows] == ["release", "release"]
    config.metrics.window = "later"  # it may be set alone, too
    config.shaping.reproduce_release = False
    assert [section.window for section in windows] == ["later", "later"]


def test_a_record_with_all_defects_of_the_release_has_the_one_setting():
    fields = moved.RELEASE | {"shaping.eta": 2.0, "shaping.indicators": ["curvature"]}
    assert moved.with_present_names(fields) == {
        "shaping.eta": 2.0,
        "shaping.indicators": ["curvature"],
        "shaping.reproduce_release": True,
    }
    one = {"shaping.tokens": "last", "shaping.invalid": "excluded"}
    assert moved.with_present_names(one) == {"shaping.tokens": "last"}  # no longer possible
    assert "removed" in moved.new_places("shaping.tokens")
