"""Makes docs/configuration.md from semrl_jax/settings: `python docs/make_configuration.py`."""

import collections
import pathlib
import re

from configs.default import get_config
from semrl_jax.settings.config import known_settings
from semrl_jax.settings.rules import flatten

COPIES = {"evaluation.metric_options": "metrics"}  # sections with the fields of another one
PAGE = pathlib.Path(__file__).with_name("configuration.md")
HEAD = """# Settings

Any field is a flag, `--config.training.num_steps=10`, or is set in a config file, as those in
`configs/` are. For several values, repeat the flag. Defaults are in brackets; an empty text is
none, and a switch says what True does. `--explain` prints the settings of a command, and
`--dry_run` checks them ([runs](runs.md)).

`python docs/make_configuration.py` makes this page from `semrl_jax/settings`.
"""


def page() -> str:
    """The text of the page."""
    values, known = flatten(get_config()), known_settings()
    sections: dict[str, list[str]] = {}
    for field in (name for name in known if name in values):
        if not any(field.startswith(f"{copy}.") for copy in COPIES):
            sections.setdefault(field.rpartition(".")[0], []).append(field)
    parts = [HEAD]
    for section, fields in sections.items():
        parts.append(f"## {section or 'The whole run'}\n")
        if section and known[section].meaning:
            parts.append(f"{_linked(known[section].meaning)}\n")
        alike = collections.defaultdict(list)
        for field in fields:
            if meaning := _elsewhere(field, values, known):
                alike[meaning].append(f"`{field}`")
            else:
                default = f"{_code(values[field])} {known[field].unit}".strip()
                parts.append(f"- `{field}` ({default}): {_linked(known[field].meaning)}")
        parts += [f"- {', '.join(names)}: {meaning}" for meaning, names in alike.items()]
        parts.append("")
    for copy, original in COPIES.items():
        parts.append(
            f"## {copy}\n\n{_linked(known[copy].meaning)} Each field follows the one of "
            f"`{original}` unless set.\n"
        )
    return "\n".join(parts).rstrip("\n") + "\n"


def _elsewhere(field: str, values, known) -> str:
    """Where a field of the same name, default and meaning is described; "" if it has none."""
    section, _, name = field.rpartition(".")
    found = re.fullmatch(
        rf"(?:as|(Follows)) ([\w.]+)\.{name}(?: unless set)?", known[field].meaning
    )
    place = found[2] if found else "training"
    other = f"{place}.{name}"
    if place == section or values.get(other) != values[field]:
        return ""
    if found and found[1]:
        return f"as in `{place}`, unless set"
    return f"as in `{place}`" if found or known[other].meaning == known[field].meaning else ""


def _code(value: object) -> str:
    return f"`{value!r}`" if isinstance(value, str) else f"`{value}`"


def _linked(text: str) -> str:
    """The text with links to other pages, and without what the head of the page says."""
    text = re.sub("[,;] repeat the flag|^True: |; empty: none$|; empty: none(?=[.;])", "", text)
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page())
