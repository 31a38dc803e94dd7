"""The run directory: what may be in it before a run, and what a resumed run may change."""

import pytest

from semrl_jax.errors import UserError
from semrl_jax.training.workdir import open_workdir


def test_the_same_command_goes_again_after_a_replica_that_did_not_start(config, tmp_path):
    """What the replica printed stays, for the message names it."""
    workdir = open_workdir(str(tmp_path / "run"), config)
    (workdir.path / "replica0").mkdir()
    (workdir.path / "replica0" / "log.txt").write_text("no vLLM here\n")
    workdir.discard()
    workdir.close()
    assert [path.name for path in workdir.path.iterdir()] == ["replica0"]
    again = open_workdir(str(tmp_path / "run"), config)
    again.close()
    assert not again.resumed and (again.path / "config.json").exists()


def test_a_directory_that_is_merely_named_like_a_replicas_is_not_ours(config, tmp_path):
    (tmp_path / "replica_of_the_mona_lisa").mkdir()
    with pytest.raises(UserError, match="is not empty and holds no run"):
        open_workdir(str(tmp_path), config)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("rollout", "jax_tensor_parallelism", 2),
        ("rollout", "jax_data_parallelism", 4),
        ("rewards", "num_workers", 7),
        ("metrics", "num_threads", 3),
        ("mesh", "tensor", 2),
    ],
)
def test_a_resumed_run_may_have_other_devices_and_workers(config, tmp_path, section, field, value):
    open_workdir(str(tmp_path / "run"), config).close()
    old, config[section][field] = config[section][field], value
    reopened = open_workdir(str(tmp_path / "run"), config)
    reopened.close()
    assert reopened.changed == (f"{section}.{field}: {old} -> {value}",)


def test_a_resumed_run_may_not_have_other_sampling(config, tmp_path):
    open_workdir(str(tmp_path / "run"), config).close()
    config.rollout.temperature = 0.5
    with pytest.raises(UserError, match=r"another config \(rollout.temperature: 1.0 -> 0.5\)"):
        open_workdir(str(tmp_path / "run"), config)
