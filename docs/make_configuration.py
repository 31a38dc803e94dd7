"""Makes docs/configuration.md from configs/default.py: `python docs/make_configuration.py`."""

import pathlib
import re

from configs.default import get_config
from semrl_jax.settings.meanings import COPIES, meanings, unit
from semrl_jax.settings.rules import flatten

PAGE = pathlib.Path(__file__).with_name("configuration.md")
HEAD = """# Settings

This page is made from `configs/default.py` by `python docs/make_configuration.py`; a test checks
that it is current. Any field can be set from the command line, `--config.training.num_steps=10`, or
in a config file that changes the default config, as those in `configs/` do. For a field with
several values, repeat its flag. An unknown name is an error.

`--explain` prints the settings of a command with their values and where each comes from: the
default, the config file or a flag. `--dry_run` checks them, and all files that they name, and
starts nothing:

```bash
python -m launch.train --config=configs/quickstart.py --config.seed=1 --explain
python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart --dry_run
```
"""


def page() -> str:
    """The text of the page."""
    values, texts = flatten(get_config()), meanings()
    sections: dict[str, list[str]] = {}
    for field in sorted(values, key=list(texts).index):
        if not any(field.startswith(f"{copy}.") for copy in COPIES):
            sections.setdefault(field.rpartition(".")[0], []).append(field)
    parts = [HEAD]
    for section, fields in sections.items():
        parts.append(f"## {section or 'The whole run'}\n")
        if texts.get(section):
            parts.append(f"{_linked(texts[section])}\n")
        parts.append("| Field | Default | Unit | Meaning |\n|---|---|---|---|")
        parts += [
            f"| `{field}` | {_code(values[field])} | {unit(field)} | {_linked(texts[field])} |"
            for field in fields
        ]
        parts.append("")
    for copy, original in COPIES.items():
        parts.append(f"## {copy}\n\n{_linked(texts[copy])} The fields are those of `{original}`.\n")
    return "\n".join(parts).rstrip("\n") + "\n"


def _code(value: object) -> str:
    return f"`{value!r}`" if isinstance(value, str) else f"`{value}`"


def _linked(text: str) -> str:
    """The text with links to other pages, safe in a table."""
    text = text.replace("|", "\\|")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page())
