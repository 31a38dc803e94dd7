"""Checkpoints: exact, and never trusted when torn or altered."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.checkpoints import Checkpoints, file_checksums
from semrl_jax.training.state import DataPosition, init_state, make_optimizer
from tests.training.recorded import record

MESH = {"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 2}
RECORDED = pathlib.Path(record.__file__).parent


def make_state(mesh_shape, seed=0):
    policy = models.Policy(
        models.DecoderConfig(
            vocab_size=24, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
            num_kv_heads=2, head_dim=8,
        )
    )  # fmt: skip
    optimizer = make_optimizer(
        learning_rate=1e-2, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.99,
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    return init_state(
        policy.init(jax.random.key(seed)), optimizer, init_shaping_state(),
        models.make_mesh(mesh_shape),
    )  # fmt: skip


def at_step(state, step):
    """A state that differs at every step."""
    params = jax.tree.map(lambda leaf: leaf + step, state.params)
    return state._replace(
        params=params, step=jnp.int32(step), position=DataPosition(step // 3, step % 3)
    )


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, of steps 1 and 2."""
    state = make_state(MESH)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(at_step(state, step))
    checkpoints.close()
    return tmp_path, state


def restore(directory, state):
    warnings = []
    checkpoints = Checkpoints(directory, keep=2, warn=warnings.append)
    restored = checkpoints.restore(state)
    checkpoints.close()
    return restored, warnings


def test_the_newest_comes_back_exactly_on_another_mesh(saved):
    directory, state = saved
    other = make_state({"replica": 2, "fsdp": 1, "sequence": 2, "tensor": 2}, seed=1)
    restored, warnings = restore(directory, other)
    assert not warnings
    assert restored.position == DataPosition(0, 2)
    jax.tree.map(np.testing.assert_array_equal, restored, at_step(state, 2))
    kernel = restored.params["layers"]["up"]["kernel"]
    assert kernel.sharding == other.params["layers"]["up"]["kernel"].sharding


def test_only_so_many_are_kept(saved):
    directory, state = saved
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(at_step(state, 3))
    checkpoints.close()
    assert sorted(path.name for path in directory.iterdir()) == ["2", "3"]


def test_nothing_is_restored_from_nothing(tmp_path):
    assert restore(tmp_path, make_state(MESH)) == (None, [])


def payload_files(directory: pathlib.Path, step: int) -> list[str]:
    return sorted(file_checksums(directory / str(step)))


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "add"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(saved, damage):
    directory, state = saved
    random = np.random.default_rng(0)
    for name in payload_files(directory, 2):
        file = directory / "2" / name
        content = file.read_bytes()
        if damage == "flip":
            offset = int(random.integers(max(len(content), 1)))
            if not content:
                continue
            file.write_bytes(
                content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :]
            )
        elif damage == "truncate":
            if not content:
                continue
            file.write_bytes(content[:-1])
        elif damage == "delete":
            file.unlink()
        else:
            file.with_name("stranger").write_bytes(b"x")
        restored, warnings = restore(directory, state)
        assert int(restored.step) == 1, name
        named = name if damage != "add" else "stranger"
        assert len(warnings) == 1 and "checkpoint 2 is not used" in warnings[0]
        assert named in warnings[0]
        file.write_bytes(content)
        file.with_name("stranger").unlink(missing_ok=True)
    assert int(restore(directory, state)[0].step) == 2


def test_a_checkpoint_without_its_manifest_is_not_complete(saved):
    directory, state = saved
    manifest = directory / "2" / "manifest.0.json"
    manifest.write_text(manifest.read_text()[:-10])
    restored, warnings = restore(directory, state)
    assert int(restored.step) == 1 and "missing or unreadable" in warnings[0]
    manifest.unlink()
    restored, warnings = restore(directory, state)
    assert int(restored.step) == 1 and "was not completed" in warnings[0]


@pytest.mark.parametrize("damage", ["unsealed", "altered"])
def test_a_step_redone_replaces_what_cannot_be_trusted(saved, damage):
    """The second attempt at step 2 must not seal the files of the first."""
    directory, state = saved
    if damage == "unsealed":
        (directory / "2" / "manifest.0.json").unlink()
    else:
        file = directory / "2" / max(payload_files(directory, 2), key=lambda n: len(n))
        file.write_bytes(file.read_bytes() + b"x")
    warnings = []
    checkpoints = Checkpoints(directory, keep=2, warn=warnings.append)
    restored = checkpoints.restore(state)
    assert int(restored.step) == 1 and len(warnings) == 1
    checkpoints.save(at_step(state, 2))
    checkpoints.save(at_step(state, 2))  # asked again by a signal: nothing to do
    checkpoints.close()
    restored, warnings = restore(directory, state)
    assert not warnings
    jax.tree.map(np.testing.assert_array_equal, restored, at_step(state, 2))


def test_a_newer_format_is_refused(saved):
    directory, state = saved
    meta = next((directory / "2" / "meta").iterdir())
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format_version": 2}))
    (directory / "2" / "manifest.0.json").write_text(json.dumps(file_checksums(directory / "2")))
    with pytest.raises(RuntimeError, match="format_version=2"):
        restore(directory, state)


def test_a_failed_save_is_told_at_the_next_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=2)

    def fail(folder):
        raise OSError("no space left on device")

    monkeypatch.setattr("semrl_jax.training.checkpoints.file_checksums", fail)
    checkpoints.save(at_step(make_state(MESH), 1))
    with pytest.raises(OSError, match="no space left"):
        checkpoints.wait()


@pytest.mark.parametrize(
    "folder", sorted(RECORDED.glob("[0-9]*")), ids=lambda folder: f"format_{folder.name}"
)
def test_what_an_earlier_version_wrote_comes_back_bit_for_bit(folder, tmp_path):
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    restored, warnings = restore(tmp_path / "checkpoints", record.blank_state())
    assert not warnings
    actual = record.arrays_by_path(restored)
    with np.load(folder / "expected.npz") as expected:
        assert actual.keys() == set(expected.files)
        for path in expected.files:
            assert actual[path].dtype == expected[path].dtype, path
            assert actual[path].tobytes() == expected[path].tobytes(), path
    assert restored.position == DataPosition(2, 5) and int(restored.step) == record.STEP
