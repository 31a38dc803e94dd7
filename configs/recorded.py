"""The settings of a run that has begun, from its record:

python -m launch.rollout --config=configs/recorded.py:runs/NAME/config.json
"""

import json

from configs import default


def get_config(path):
    """The default with the settings that the file at `path` has under "config"."""
    with open(path) as file:
        settings = json.load(file)["config"]
    config = default.get_config()
    config.update_from_flattened_dict(dict(_fields(settings)))
    return config


def _fields(settings, prefix=""):
    """Dotted name and value of every setting; JSON has lists for tuples."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", tuple(value) if isinstance(value, list) else value
