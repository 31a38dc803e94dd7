"""The settings of an existing run, read from its record:

python -m launch.rollout --config=configs/recorded.py:runs/NAME/config.json
"""

from configs import default
from semrl_jax.settings.moved import with_present_names
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import read_json_object


def get_config(path):
    """The default with the settings that the file at `path` holds under "config"."""
    settings = read_json_object(path).get("config")
    if not isinstance(settings, dict):
        raise UserError(f"{path} is not the record of a run: it has no settings under 'config'.")
    config = default.get_config()
    fields = with_present_names(dict(_fields(settings)))
    fields.pop("training.responses_per_step", None)  # follows changes of its factors
    config.update_from_flattened_dict(fields)
    return config


def _fields(settings, prefix=""):
    """Dotted name and value of every setting. JSON lists become tuples."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", tuple(value) if isinstance(value, list) else value
