"""Samplers with only the parts that a test needs."""

from typing import Any

from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.models import DecoderConfig
from semrl_jax.sampling.episodes import SingleTurn
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.weights import WeightSync

ARCHITECTURE = DecoderConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8,
)  # fmt: skip


def made(kind: type, **parts) -> Any:
    """An object of a dataclass with only these parts, which may be fakes."""
    found = object.__new__(kind)
    vars(found).update(parts)
    if hasattr(kind, "__post_init__"):
        found.__post_init__()
    return found


def sampler_of(config=None, **parts) -> Sampler:
    """A sampler with only these parts; those of its sync of weights among them."""
    of_sync = {name: parts.pop(name) for name in WeightSync.__annotations__ if name in parts}
    defaults = {"client": None, "peers": Peers(), "stop": StopRequest(60.0, 75)}
    defaults["architecture"] = ARCHITECTURE
    sync = made(WeightSync, config=config, **defaults | of_sync)
    defaults = {"sampling": (0,), "episodes": SingleTurn()}
    defaults |= dict.fromkeys(("weights", "verifier", "tokenizer"))
    return made(Sampler, config=config, sync=sync, **defaults | parts)
