"""A disk error during a checkpoint, in one process of several or in all: the run continues."""

import pytest

from semrl_jax.runs.checkpoint_files import checkpoint_problem, checkpoint_steps
from tests.launch.processes import finish, start_processes

NUM_STEPS = 4


def train_on_full_disk(workdir, refused):
    """Two processes of one run; in the named ones, checkpoint 2 cannot be written."""
    full_disk = ("tests.launch.full_disk", "checkpoints:2:2")
    return finish(
        start_processes(
            workdir, 2, f"--config.training.num_steps={NUM_STEPS}",
            "--config.model.intermediate_size=1024",  # its arrays are larger than the limit
            own_launcher=dict.fromkeys(refused, full_disk),
        )
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("refused", [(1,), (0,), (0, 1)], ids=str)
def test_checkpoint_refused_to_one_process_is_reported_and_the_run_continues(tmp_path, refused):
    workdir = tmp_path / "run"
    (code, out, err), (other_code, _, other_err) = train_on_full_disk(workdir, refused)
    assert (code, other_code) == (0, 0), (out, err, other_err)
    (line,) = [line for line in out.splitlines() if "could not be written" in line]
    assert "checkpoint of step 2 could not be written: File too large" in line
    assert "good checkpoint: step 1" in line
    folder = workdir / "checkpoints"
    assert checkpoint_steps(folder) == [3, 4] and len(list(folder.iterdir())) == 2
    assert not any(checkpoint_problem(folder / str(step)) for step in (3, 4))
