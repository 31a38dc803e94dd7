"""A family outside of the package: Qwen3's architecture, with the names of other fields."""

from semrl_jax.models import Family

NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}


def from_hf(fields):
    others = {name: value for name, value in fields.items() if name not in NAMES.values()}
    return others | {name: fields[own] for name, own in NAMES.items()}


def to_hf(fields):
    return {NAMES.get(name, name): value for name, value in fields.items()}


FAMILY = Family(
    "own", "OwnForCausalLM", query_key_norm=True, head_dim=32, from_hf=from_hf, to_hf=to_hf
)
