"""Checkpoints are restored exactly, and not used if they are incomplete or altered."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from semrl_jax import models
from semrl_jax.runs import checkpoints as module
from semrl_jax.runs.checkpoint_files import (
    FORMAT_VERSION,
    checkpoint_problem,
    checkpoint_steps,
    file_checksums,
    restore_params,
    save_params,
    write_manifest,
)
from semrl_jax.runs.checkpoints import Checkpoints, disk_refusal
from semrl_jax.shaping import init_shaping_state
from semrl_jax.support.errors import UserError
from semrl_jax.training.optimizer import Optimizer, make_optimizer
from semrl_jax.training.train_state import DataPosition, everywhere, init_state, init_trained
from tests.cases import raised, refused
from tests.fixtures import random_params
from tests.training.recorded import record

MESH = {"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 2}
RECORDED = pathlib.Path(record.__file__).parent


def make_state(mesh_shape=None, seed=0, hidden_size=16):
    """On a mesh of all devices, or on one device, where a save takes a third of the time."""
    one_device = jax.devices()[:1] if mesh_shape is None else None
    policy = models.Policy(
        models.DecoderConfig(
            vocab_size=24, hidden_size=hidden_size, intermediate_size=16, num_layers=1, num_heads=2,
            num_kv_heads=2, head_dim=8,
        )
    )  # fmt: skip
    optimizer = make_optimizer(
        learning_rate=1e-2, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.99,
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    return init_state(
        random_params(policy, seed), optimizer, init_shaping_state(),
        models.make_mesh(mesh_shape or {}, one_device),
    )  # fmt: skip


def at_step(state, step):
    """A state that differs at every step."""
    params = jax.tree.map(lambda leaf: leaf + step, state.params)
    shaping = state.shaping._replace(baseline=state.shaping.baseline + step)
    return state._replace(
        params=params, shaping=shaping, step=jnp.int32(step),
        position=DataPosition(step // 3, step % 3),
    )  # fmt: skip


def assert_same(actual, expected):
    assert actual.position == expected.position
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.fixture(scope="module")
def two_checkpoints(state, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    save(directory, state, (1, 2), keep=2)
    return directory


@pytest.fixture
def saved(two_checkpoints, tmp_path):
    """A copy of two checkpoints, of steps 1 and 2."""
    return shutil.copytree(two_checkpoints, tmp_path / "checkpoints")


def save(directory, state, steps, **options):
    checkpoints = Checkpoints(directory, **options)
    for step in steps:
        checkpoints.save(at_step(state, step))
    checkpoints.close()
    return checkpoints


def restore(directory, state):
    warnings = []
    checkpoints = Checkpoints(directory, keep=2, warn=warnings.append)
    restored = checkpoints.restore(state)
    checkpoints.close()
    return restored, warnings


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.slow
def test_a_critic_and_the_state_of_an_algorithm_are_restored_on_another_mesh(tmp_path):
    def with_critic(state, mesh, value):
        params = models.with_head(jax.tree.map(lambda leaf: leaf + value, state.params), bias=value)
        critic = init_trained(params, Optimizer(*optax.sgd(1.0, momentum=0.9)), mesh)
        algorithm = everywhere({"kl_coefficient": np.float32(value)}, mesh)
        return state._replace(critic=critic, algorithm=algorithm)

    mesh, shape = models.make_mesh(MESH), {"replica": 2, "fsdp": 1, "sequence": 2, "tensor": 2}
    whole = with_critic(make_state(MESH), mesh, 0.5)
    save(tmp_path, whole, (1,), keep=2)
    other = with_critic(make_state(shape, seed=1), models.make_mesh(shape), 0.25)
    restored, warnings = restore(tmp_path, other)
    assert not warnings
    assert_same(restored, at_step(whole, 1))
    for leaf, like in zip(jax.tree.leaves(restored.critic), jax.tree.leaves(other.critic)):
        assert leaf.sharding == like.sharding
    plain = make_state(MESH)
    refused(r"algorithm/kl_coefficient is float32.* there and missing", restore, tmp_path, plain)


def test_the_newest_checkpoint_is_restored_exactly_on_another_mesh(tmp_path):
    state = make_state(MESH)
    save(tmp_path, state, (1, 2), keep=2)
    other = make_state({"replica": 2, "fsdp": 1, "sequence": 2, "tensor": 2}, seed=1)
    restored, warnings = restore(tmp_path, other)
    assert not warnings
    assert_same(restored, at_step(state, 2))
    kernel = restored.params["layers"]["up"]["kernel"]
    assert kernel.sharding == other.params["layers"]["up"]["kernel"].sharding


def test_an_empty_directory_restores_nothing(tmp_path, state):
    assert restore(tmp_path, state) == (None, [])


@pytest.mark.slow
def test_only_required_checkpoints_are_kept(tmp_path, state):
    save(tmp_path, state, range(1, 8), keep=2, keep_every=3, extra_steps=(1, 4))
    assert names(tmp_path) == ["1", "3", "4", "6", "7"]
    assert_same(restore(tmp_path, state)[0], at_step(state, 7))


def test_checkpoints_are_due_at_the_configured_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, every_steps=4, keep_every=6, extra_steps=(1, 9))
    due = [step for step in range(1, 15) if checkpoints.due(step, num_steps=14)]
    assert due == [1, 4, 6, 8, 9, 12, 14]
    never = Checkpoints(tmp_path, keep=1, every_steps=0)
    assert [step for step in range(1, 15) if never.due(step, 14)] == [14]


def test_an_invalid_checkpoint_does_not_count_as_kept(saved, state):
    """Step 2 is altered, so step 1 is the last valid one. When 3 is sealed, only 2 is removed."""
    next((saved / "2" / "state" / "d").iterdir()).write_bytes(b"x")
    checkpoints = Checkpoints(saved, keep=2, warn=lambda line: None)
    assert int(checkpoints.restore(state).step) == 1
    checkpoints.save(at_step(state, 3))
    checkpoints.wait()
    assert names(saved) == ["1", "3"]
    checkpoints.save(at_step(state, 4))
    checkpoints.close()
    assert names(saved) == ["3", "4"]


def test_no_checkpoint_is_removed_before_the_new_one_is_sealed(saved, state, monkeypatch):
    """A kill before the seal must leave a valid checkpoint, also with keep=1."""
    seen = []

    def look(folder):
        seen.append(names(saved))
        write_manifest(folder)

    monkeypatch.setattr(module, "write_manifest", look)
    save(saved, state, (3,), keep=1)
    assert seen == [["1", "2", "3"]] and names(saved) == ["3"]


def test_a_checkpoint_is_kept_if_an_old_one_cannot_be_removed(saved, state, monkeypatch):
    """On NFS, a directory is not empty while another process reads a file that was in it."""
    lines, rmtree = [], shutil.rmtree

    def is_read(path):
        if path.name.endswith(module.REMOVED):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", is_read)
    checkpoints = Checkpoints(saved, keep=1, warn=lines.append)
    checkpoints.restore(state)
    checkpoints.save(at_step(state, 3))
    assert checkpoints.failure() == "" and checkpoint_problem(saved / "3") == ""
    assert len(lines) == 1 and "old checkpoints are not removed ([Errno" in lines[0]
    monkeypatch.undo()
    checkpoints.save(at_step(state, 4))
    checkpoints.close()
    assert names(saved) == ["4"]


def payload_files(directory: pathlib.Path, step: int) -> list[str]:
    return sorted(file_checksums(directory / str(step)))


def assert_previous_used(directory, state, named):
    restored, warnings = restore(directory, state)
    assert_same(restored, at_step(state, 1))
    assert len(warnings) == 1 and "checkpoint 2 is not used" in warnings[0]
    assert named in warnings[0]


def damaged(damage: str, file: pathlib.Path) -> str:
    """Damages one file; returns what the warning must name."""
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "delete":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "add":
        file = file.with_name("stranger")
        file.write_bytes(b"x")
    return str(file)


def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(saved, state):
    """Damages each file, including files of Orbax and tensorstore."""
    files = payload_files(saved, 2)
    assert {"state/_METADATA", "state/manifest.ocdbt", "meta/metadata"} < set(files)
    assert any(name.startswith("state/ocdbt.process_0/d/") for name in files)
    for file in (saved / "2" / name for name in files):
        content = file.read_bytes()
        for damage in ("truncate", "delete", "empty", "add"):
            named = damaged(damage, file)
            assert named in checkpoint_problem(saved / "2")
            file.write_bytes(content)
            file.with_name("stranger").unlink(missing_ok=True)
    assert int(restore(saved, state)[0].step) == 2
    assert_previous_used(saved, state, damaged("truncate", file))


def test_a_flipped_bit_at_any_offset_is_found(saved, state):
    """At random offsets over all bytes of the newest checkpoint, manifest included."""
    random = np.random.default_rng(0)
    files = [file for file in sorted((saved / "2").rglob("*")) if file.is_file()]
    ends = np.cumsum([file.stat().st_size for file in files])
    for offset in random.choice(ends[-1], 100, replace=False):
        index = int(np.searchsorted(ends, offset, side="right"))
        content = files[index].read_bytes()
        position = int(offset - (ends[index] - len(content)))
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(random.integers(8))
        files[index].write_bytes(flipped)
        named = files[index] if files[index].name != "manifest.0.json" else saved / "2"
        assert str(named) in checkpoint_problem(saved / "2")
        files[index].write_bytes(content)
    assert int(restore(saved, state)[0].step) == 2


def test_a_checkpoint_without_its_manifest_is_not_complete(saved, state):
    manifest = saved / "2" / "manifest.0.json"
    for content in ("{}", "", "[]", "null", "{", '{"a": 1}', "\0", "[" * 100_000):
        manifest.write_text(content)
        assert str(saved / "2") in checkpoint_problem(saved / "2")
    manifest.unlink()
    assert_previous_used(saved, state, str(saved / "2"))


def test_foreign_entries_in_the_directory_do_no_harm(saved, state):
    (saved / "7").mkdir()  # not a checkpoint
    (saved / "8").write_text("a file")
    (saved / "3.orbax-checkpoint-tmp").mkdir()  # left by a kill
    (saved / "3.orbax-checkpoint-tmp" / "state").mkdir()
    (saved / "1.removed").mkdir()
    (saved / "007").mkdir()
    (saved / "notes").write_text("mine")
    restored, warnings = restore(saved, state)
    assert_same(restored, at_step(state, 2))
    assert [line.split(" is")[0] for line in warnings] == ["checkpoint 8", "checkpoint 7"]
    save(saved, state, (7, 8), keep=2)
    assert names(saved) == ["007", "7", "8", "notes"]
    assert_same(restore(saved, state)[0], at_step(state, 8))


def test_a_checkpoint_under_another_name_is_not_used(saved, state):
    shutil.copytree(saved / "1", saved / "5")
    restored, warnings = restore(saved, state)
    assert int(restored.step) == 2 and "that of step 1, under another name" in warnings[0]


def test_a_pipe_or_a_dangling_link_among_the_files_does_no_harm(saved, state):
    os.mkfifo(saved / "2" / "pipe")
    assert_previous_used(saved, state, "pipe")
    (saved / "2" / "pipe").unlink()
    (saved / "2" / "link").symlink_to("nowhere")
    assert_previous_used(saved, state, "link")


def test_a_restart_from_step_0_is_reported_if_no_checkpoint_is_valid(saved, state):
    for step in (1, 2):
        (saved / str(step) / "manifest.0.json").unlink()
    restored, warnings = restore(saved, state)
    assert restored is None
    assert [line.split(":")[0] for line in warnings] == [
        "checkpoint 2 is not used",
        "checkpoint 1 is not used",
        f"none of the 2 checkpoints in {saved} can be trusted",
    ]


@pytest.mark.parametrize("damage", ["unsealed", "altered"])
def test_a_repeated_step_replaces_its_invalid_checkpoint(saved, state, damage):
    """The second attempt at step 2 must not seal the files of the first."""
    if damage == "unsealed":
        (saved / "2" / "manifest.0.json").unlink()
    else:
        file = saved / "2" / max(payload_files(saved, 2), key=len)
        file.write_bytes(file.read_bytes() + b"x")
    warnings = []
    checkpoints = Checkpoints(saved, keep=2, warn=warnings.append)
    restored = checkpoints.restore(state)
    assert int(restored.step) == 1 and len(warnings) == 1
    checkpoints.save(at_step(state, 2))
    checkpoints.save(at_step(state, 2))  # as after a signal: already saved
    checkpoints.close()
    restored, warnings = restore(saved, state)
    assert not warnings
    assert_same(restored, at_step(state, 2))


def rewrite_meta(folder, **fields):
    meta = folder / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | fields))
    write_manifest(folder)


def test_metadata_with_missing_or_wrong_fields_is_a_problem(saved):
    meta = saved / "2" / "meta" / "metadata"
    right = json.loads(meta.read_text())
    for field, wrong in {
        "step": (None, True, "2"),
        "format_version": ("2",),
        "num_processes": (None, "2"),
        "position": (
            None, [0, 2], {"epoch": 0}, {"epoch": 0, "cursor": 2, "more": 0},
            {"epoch": 0, "cursor": -1}, {"epoch": 0.0, "cursor": 2},
        ),
    }.items():  # fmt: skip
        contents = [right | {field: value} for value in wrong]
        if field != "num_processes":  # format 1 had none
            contents.append({name: value for name, value in right.items() if name != field})
        for content in contents:
            meta.write_text(json.dumps(content))
            write_manifest(saved / "2")
            assert str(meta) in checkpoint_problem(saved / "2"), content


def test_a_valid_checkpoint_that_orbax_cannot_read_is_named_and_kept(saved, state):
    """Its manifest matches, so it is not damaged. If it were skipped, it would be removed later."""
    for content in ("[" * 100_000, "[]", '{"tree_metadata": 3}'):
        (saved / "2" / "state" / "_METADATA").write_text(content)
        write_manifest(saved / "2")
        refused(r"checkpoints/2 matches its manifest, but cannot be read", restore, saved, state)


def test_a_valid_checkpoint_that_tensorstore_cannot_read_is_named(saved, state):
    for file in (saved / "2" / "state").rglob("d/*"):
        file.write_bytes(b"x" * file.stat().st_size)
    write_manifest(saved / "2")
    refused(r"checkpoints/2 matches its manifest, but cannot be read", restore, saved, state)
    refused("cannot be read", restore_params, saved / "2", jax.eval_shape(lambda: state.params))


def test_a_manifest_is_not_written_through_a_link(saved):
    (saved / "thesis.tex").write_text("years of work")
    for name in ("manifest.0.writing", "manifest.0.json"):
        (saved / "2" / name).unlink(missing_ok=True)
        (saved / "2" / name).symlink_to(saved / "thesis.tex")
        write_manifest(saved / "2")
        assert (saved / "thesis.tex").read_text() == "years of work"
        assert checkpoint_problem(saved / "2") == ""


def test_a_dangling_link_with_the_name_of_a_checkpoint_is_replaced(saved, state):
    (saved / "3").symlink_to("nowhere")
    warnings = []
    save(saved, state, (3,), keep=2, warn=warnings.append)
    assert not warnings
    assert checkpoint_problem(saved / "3") == "" and not (saved / "3").is_symlink()


def test_a_newer_format_is_refused(saved, state):
    rewrite_meta(saved / "2", format_version=FORMAT_VERSION + 1)
    refused(rf"format_version={FORMAT_VERSION + 1}.*update", restore, saved, state)


def test_a_checkpoint_needs_the_manifest_of_every_process(saved, state):
    rewrite_meta(saved / "2", num_processes=2)
    assert_previous_used(saved, state, "manifest.1.json")
    shutil.copy(saved / "2" / "manifest.0.json", saved / "2" / "manifest.1.json")
    restored, warnings = restore(saved, state)
    assert int(restored.step) == 2 and not warnings


def test_a_checkpoint_of_another_architecture_is_a_user_error(saved):
    expected = r"params/embed/embedding is float32\[24, 16\] there and float32\[24, 32\] here"
    refused(expected, restore, saved, make_state(hidden_size=32))


def test_a_checkpoint_with_other_names_is_a_user_error(saved, state):
    params = dict(state.params)
    params["extra"] = params.pop("final_norm")
    with pytest.raises(UserError, match=r"params/extra is missing there and dict|params/extra/"):
        restore(saved, state._replace(params=params))


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_checkpoint_of_an_earlier_version_is_restored_bit_for_bit(version, tmp_path):
    folder = RECORDED / str(version)
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


def test_a_file_outside_a_manifest_of_format_1_does_no_harm(tmp_path):
    """Format 1 did not list tensorstore's manifests; a flipped bit in one must not end the run."""
    shutil.copytree(RECORDED / "1" / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "3" / "state" / "manifest.ocdbt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    restored, warnings = restore(tmp_path / "checkpoints", record.blank_state())
    assert restored is None and "it cannot be read" in warnings[0]


def test_parameters_are_restored_from_both_kinds_of_checkpoints(saved, state, tmp_path):
    expected = at_step(state, 2).params
    like = jax.eval_shape(lambda: expected)
    jax.tree.map(np.testing.assert_array_equal, restore_params(saved / "2", like), expected)
    save_params(tmp_path / "0", expected)
    assert checkpoint_problem(tmp_path / "0") == ""
    jax.tree.map(np.testing.assert_array_equal, restore_params(tmp_path / "0", like), expected)
    other = make_state(hidden_size=32).params
    refused("params/embed/embedding", restore_params, tmp_path / "0", other)


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Limits the size of files, like a disk that is full for large files; needs no privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 8000])  # a small file is refused, or a part of the state
def test_a_disk_error_in_a_save_is_reported_and_the_next_save_tries_again(saved, state, limit):
    warnings = []
    checkpoints = Checkpoints(saved, keep=2, warn=warnings.append)
    checkpoints.restore(state)
    with file_size_limit(limit):
        checkpoints.save(at_step(state, 3))
        checkpoints.wait()
    assert checkpoint_steps(saved) == [1, 2]
    assert len(warnings) == 1
    for part in ("of step 3", "File too large", "MiB free in", "last good checkpoint: step 2"):
        assert part in warnings[0]
    assert "of step 3 could not be written" in checkpoints.failure()
    checkpoints.save(at_step(state, 4))
    assert checkpoints.failure() == ""
    checkpoints.close()
    assert len(warnings) == 1
    assert_same(restore(saved, state)[0], at_step(state, 4))
    assert names(saved) == ["2", "4"]


def test_the_other_writes_of_a_failed_save_print_nothing(tmp_path, state, monkeypatch):
    """They end after the first failed write, in threads of tensorstore that print tracebacks."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    arrays = {str(i): jnp.zeros((256, 256)) for i in range(30)}
    warnings = []
    checkpoints = Checkpoints(tmp_path, keep=2, warn=warnings.append)
    with file_size_limit(100_000):
        checkpoints.save(state._replace(params=arrays))
        checkpoints.close()
    assert len(warnings) == 1 and "File too large" in warnings[0]
    assert not printed


def test_a_disk_error_is_recorded_before_files_are_removed(saved, state, monkeypatch):
    """On a shared disk, another process or a person may have removed the files already."""

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    def gone(path):
        raise FileNotFoundError(errno.ENOENT, "gone", str(path))

    checkpoints = Checkpoints(saved, keep=2, warn=lambda line: None)
    checkpoints.restore(state)
    monkeypatch.setattr(module, "write_manifest", full)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)  # between attempts to remove
    checkpoints.save(at_step(state, 3))
    monkeypatch.setattr(module.shutil, "rmtree", gone)
    assert "of step 3 could not be written: No space left" in checkpoints.failure()
    monkeypatch.undo()
    checkpoints.save(at_step(state, 4))
    assert checkpoints.failure() == ""
    checkpoints.close()
    assert names(saved) == ["2", "4"]


class Exporter:
    """Writes one file; the disk refuses the second of three."""

    def __init__(self):
        self.errors = [None, OSError(errno.ENOSPC, "No space left on device"), None]

    def whole(self, params, peers):
        return params

    def write(self, directory, params):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights")
        if error := self.errors.pop(0):
            raise error


def test_the_model_of_a_checkpoint_is_a_part_of_it(tmp_path, state):
    warnings = []
    options = {"export": "float32", "exporter": Exporter(), "keep": 1, "warn": warnings.append}
    checkpoints = Checkpoints(tmp_path, **options)
    for step, there in ((1, ["1"]), (2, ["1"]), (3, ["3"])):
        checkpoints.save(at_step(state, step))
        checkpoints.wait()
        assert names(tmp_path) == there
    checkpoints.close()
    assert "checkpoint of step 2 could not be written: No space left" in warnings[0]
    model = tmp_path / "3" / "model" / "model.safetensors"
    assert model.read_bytes() == b"weights" and not checkpoint_problem(tmp_path / "3")
    assert_same(restore(tmp_path, state)[0], at_step(state, 3))
    model.write_bytes(b"changed")
    assert "model.safetensors has been altered" in checkpoint_problem(tmp_path / "3")


def test_no_save_begins_if_the_disk_refuses_a_small_file(saved, state, monkeypatch):
    """Otherwise the other processes would wait for a save that process 0 could not begin."""
    begun = []
    checkpoints = Checkpoints(saved, keep=2, warn=lambda line: None)
    monkeypatch.setattr(checkpoints._checkpointer, "save", lambda *_, **__: begun.append(1))
    with file_size_limit(0):
        checkpoints.save(at_step(state, 3))
    assert not begun and "of step 3 could not" in checkpoints.failure()
    checkpoints.close()
    assert checkpoint_steps(saved) == [1, 2]


def test_a_full_disk_is_recognised_by_the_error_text(saved, state, tmp_path):
    """A real full disk, if this machine allows mounting one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs privileges; the limit on file sizes is tested everywhere")
    try:
        warnings = []
        checkpoints = Checkpoints(disk, keep=1, warn=warnings.append)
        for step in (1, 2, 3):
            checkpoints.save(at_step(state, step))
            checkpoints.wait()
        assert 1 <= len(warnings) <= 3
        assert all("No space left on device" in line for line in warnings)
        assert "No space left on device" in checkpoints.failure()
        checkpoints.close()
        assert all(not checkpoint_problem(disk / str(s)) for s in checkpoint_steps(disk))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_error_is_found_in_chained_errors():
    chained = RuntimeError("save failed")
    chained.__cause__ = ValueError("UNKNOWN: write: [OS error 28: ENOSPC No space left on device]")
    assert disk_refusal(chained).errno == errno.ENOSPC
    assert disk_refusal(PermissionError(errno.EACCES, "no")).errno == errno.EACCES
    assert disk_refusal(TypeError("a defect")) is None


def test_an_error_that_the_disk_did_not_cause_is_raised(tmp_path, state, monkeypatch):
    def fail(folder):
        raise TypeError("a defect")

    monkeypatch.setattr(module, "write_manifest", fail)
    warnings = []
    checkpoints = Checkpoints(tmp_path, keep=2, warn=warnings.append)
    checkpoints.save(at_step(state, 1))
    raised(TypeError, "a defect", checkpoints.wait)
    assert not warnings
