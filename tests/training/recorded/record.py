"""Records a checkpoint of the current format, so that later versions can be held to it.

    python -m tests.training.recorded.record /recorded

Makes `<format_version>/` next to this file: `checkpoints/3/`, a state whose arrays all differ from
their initial values, and `expected.npz`, every array of that state by its path, saved without
Orbax, and the data position. Run once when the format changes; what is recorded is never recorded
again. The argument is a directory to write in first: Orbax puts its absolute path into the files.
"""

import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

from semrl_jax import models
from semrl_jax.runs.checkpoint_files import FORMAT_VERSION
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.optimizer import make_optimizer
from semrl_jax.training.train_state import DataPosition, TrainState, init_state

HERE = pathlib.Path(__file__).parent
STEP = 3
ARCHITECTURE = models.DecoderConfig(
    vocab_size=8, hidden_size=4, intermediate_size=4, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=2,
)  # fmt: skip


def blank_state() -> TrainState:
    """A state with the shapes and dtypes of what is recorded."""
    optimizer = make_optimizer(
        learning_rate=1e-2, learning_rate_warmup_steps=2, adam_b1=0.9, adam_b2=0.99,
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    return init_state(
        models.Policy(ARCHITECTURE).init(jax.random.key(0)),
        optimizer,
        init_shaping_state(),
        models.make_mesh({"replica": len(jax.devices()), "fsdp": 1, "sequence": 1, "tensor": 1}),
    )


def recorded_state() -> TrainState:
    """The state that is recorded: every array is random, without regard to its meaning."""
    random = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            value = random.standard_normal(leaf.shape).astype(leaf.dtype)
        elif leaf.dtype == jnp.bool_:
            value = random.integers(2, size=leaf.shape).astype(bool)
        else:
            value = random.integers(1, 100, size=leaf.shape).astype(leaf.dtype)
        return jax.device_put(value, leaf.sharding)

    state = jax.tree.map(fill, blank_state()._replace(position=None))
    step = jax.device_put(jnp.int32(STEP), state.step.sharding)
    return state._replace(step=step, position=DataPosition(2, 5))


def arrays_by_path(state: TrainState) -> dict[str, np.ndarray]:
    """Every leaf of a state under its path, position included."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def main(directory: pathlib.Path) -> None:
    if (HERE / str(FORMAT_VERSION)).exists():
        raise SystemExit(f"format {FORMAT_VERSION} is recorded already")
    state = recorded_state()
    checkpoints = Checkpoints(directory / "checkpoints", keep=1)
    checkpoints.save(state)
    checkpoints.close()
    np.savez_compressed(directory / "expected.npz", **arrays_by_path(state))
    shutil.move(directory, HERE / str(FORMAT_VERSION))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
