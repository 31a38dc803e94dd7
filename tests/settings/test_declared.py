"""Options are read from the files of the algorithms."""

from semrl_jax.settings import declared
from tests.cases import raised

TEXT = """
class Options:
    scale: float = setting({default}, "Factor of the advantage", above=0)
"""


def test_two_algorithms_may_share_an_option_but_not_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(declared, "FILES", tmp_path)
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(TEXT.format(default=1.0))
    (field,) = declared.declared_options()["advantage"].__dataclass_fields__.values()
    assert field.name == "scale" and field.default == 1.0
    assert field.metadata["setting"].meaning.startswith("first, second: ")
    (tmp_path / "second.py").write_text(TEXT.format(default=2.0))
    raised(ValueError, r"first, second of .* declare the option 'scale'", declared.declared_options)
