"""Compares two run directories, bit for bit."""

import collections
import json
import pathlib
import struct

import jax
import numpy as np
import orbax.checkpoint as ocp
from tensorboardX.proto.event_pb2 import Event

from semrl_jax.runs.checkpoint_files import checkpoint_problem, read_meta
from tests.fixtures import read_rows, stable


def assert_same_run(
    workdir: pathlib.Path, expected: pathlib.Path, num_steps: int, costs: tuple[str, ...] = ()
) -> None:
    """Compares the last checkpoint, every logged number except times, and every sampled response.

    Also checks that nothing is logged twice and that no temporary file is left. Numbers with one of
    `costs` in their name are not compared.
    """
    assert_same_state(*(path / "checkpoints" / str(num_steps) for path in (workdir, expected)))
    rows, wanted = (stable(read_rows(path), *costs) for path in (workdir, expected))
    assert [row["step"] for row in rows] == list(range(num_steps + 1))
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys(), want["step"]
        different = {key: (row[key], want[key]) for key in want if row[key] != want[key]}
        assert not different, (want["step"], different)
    assert_same_files(workdir / "rollouts", expected / "rollouts")
    assert (workdir / "warm_start").exists() == (expected / "warm_start").exists()
    if (expected / "warm_start").exists():
        assert_same_files(workdir / "warm_start", expected / "warm_start")
    events = logged_events(workdir / "tensorboard")
    assert max(collections.Counter((tag, step) for tag, step, _ in events).values()) == 1
    wanted = logged_events(expected / "tensorboard")
    assert set(stable_events(events, *costs)) == set(stable_events(wanted, *costs))
    assert "<html" in (workdir / "report.html").read_text()[:500]
    left = [
        str(path)
        for path in workdir.rglob("*")
        if path.name.endswith((".writing", ".removed")) or "-tmp" in path.name
    ]
    assert not left


def assert_same_state(folder: pathlib.Path, expected: pathlib.Path) -> None:
    """Compares parameters, optimiser, shaping state, step and data position."""
    assert checkpoint_problem(folder) == checkpoint_problem(expected) == ""
    assert read_meta(folder) == read_meta(expected)
    states = [restore_on_host(path / "state") for path in (folder, expected)]
    leaves, wanted = (jax.tree_util.tree_flatten_with_path(state)[0] for state in states)
    assert len(leaves) == len(wanted) > 10
    for (path, leaf), (_, want) in zip(leaves, wanted):
        leaf, want = np.asarray(leaf), np.asarray(want)
        assert leaf.dtype == want.dtype and leaf.tobytes() == want.tobytes(), path


def restore_on_host(folder: pathlib.Path) -> dict:
    """Restores NumPy arrays, independent of the devices they were saved from."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=whole))


def assert_same_files(folder: pathlib.Path, expected: pathlib.Path) -> None:
    """Compares files byte by byte. Rollouts contain no times, so their Parquet files are equal."""
    names = sorted(file.name for file in expected.iterdir())
    assert names and sorted(file.name for file in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def logged_events(folder: pathlib.Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every scalar in TensorBoard's files."""
    events = []
    for file in sorted(folder.iterdir()):
        content = memoryview(file.read_bytes())
        while content:
            (length,) = struct.unpack("<Q", content[:8])  # then its checksum, 4 bytes
            event = Event.FromString(bytes(content[12 : 12 + length]))
            content = content[16 + length :]
            events += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    assert events
    return events


def stable_events(
    events: list[tuple[str, int, float]], *others: str
) -> list[tuple[str, int, float]]:
    """Events without those that depend on time, and `others`, as `stable`."""
    named = stable([{json.dumps([tag, step]): value for tag, step, value in events}], *others)[0]
    return [(*json.loads(key), value) for key, value in named.items()]
