"""Makes docs/configuration.md from semrl_jax/settings: `python docs/make_configuration.py`."""

import pathlib
import re

from configs.default import get_config
from semrl_jax.settings.config import known_settings
from semrl_jax.settings.rules import flatten

COPIES = {"evaluation.metric_options": "metrics"}  # sections with the fields of another one
PAGE = pathlib.Path(__file__).with_name("configuration.md")
HEAD = """# Settings

Any field can be set from the command line, `--config.training.num_steps=10`, or in a config file
that changes the default config, as those in `configs/` do. For a field with several values, repeat
its flag. `--explain` and `--dry_run` print and check the settings of a command ([runs](runs.md)).
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
        parts.append("| Field | Default | Meaning |\n|---|---|---|")
        parts += [
            f"| `{field}` | {f'{_code(values[field])} {known[field].unit}'.strip()} | "
            f"{_linked(known[field].meaning)} |"
            for field in fields
        ]
        parts.append("")
    for copy, original in COPIES.items():
        parts.append(
            f"## {copy}\n\n{_linked(known[copy].meaning)} The fields are those of `{original}`.\n"
        )
    return "\n".join(parts).rstrip("\n") + "\n"


def _code(value: object) -> str:
    return f"`{value!r}`" if isinstance(value, str) else f"`{value}`"


def _linked(text: str) -> str:
    """The text with links to other pages, safe in a table."""
    text = text.replace("|", "\\|")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page())
