"""A trainer in a real Jupyter kernel: cells train, are interrupted, and go on."""

import os
import re
import signal
import threading

import nbclient
import nbformat
import pytest

from tests.library.conftest import ROWS, SIZES

FIRST = """
import semrl_jax
trainer = semrl_jax.Trainer(
    {workdir!r}, model={model!r}, config="grpo", prompts={rows},
    reward=lambda response, reference: len(response) / 100, **{sizes},
)
steps = []
for step in trainer:
    steps.append(step.number)
    print("finished", step.number, flush=True)
"""


@pytest.mark.slow
def test_cells_train_stop_at_an_interrupt_and_go_on(chat_model, tmp_path):
    sizes = SIZES | {"training": SIZES["training"] | {"num_steps": 200}}
    first = FIRST.format(
        workdir=str(tmp_path / "run"), model=str(chat_model), rows=ROWS[:8], sizes=sizes
    )
    cells = [
        first,
        "saved = trainer.log.num_rows\ntrainer.config.training.num_steps = saved + 2\n"
        "for step in trainer: steps.append(step.number)",
        "print(saved, steps == list(range(saved + 2)))",
        "semrl_jax.Trainer('x', config='grp')",
        "trainer.policy.generate('1+2=', max_tokens=4)",
    ]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    client = nbclient.NotebookClient(notebook, timeout=600, allow_errors=True)
    finished = threading.Event()

    def interrupt():
        finished.wait()
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    def seen(cell, cell_index, **_):
        if cell_index == 0:
            threading.Thread(target=watch, args=(cell,), daemon=True).start()

    def watch(cell):
        while not any("finished 1" in output.get("text", "") for output in cell.outputs):
            threading.Event().wait(0.05)
        finished.set()

    client.on_cell_start = seen
    threading.Thread(target=interrupt, daemon=True).start()
    client.execute(cwd=str(tmp_path))
    first, second, third, wrong, sampled = (cell.outputs for cell in notebook.cells)
    printed = "".join(output.get("text", "") for output in first)
    assert "saved in" in printed and "step  " not in printed
    (bar,) = (output.data for output in first if output.output_type == "display_data")
    assert '<progress value="' in bar["text/html"]
    assert re.search(r"^train \d+/200, .*\nstep +\d+/200 ", bar["text/plain"])
    assert first[-1].output_type == "error" and first[-1].ename == "KeyboardInterrupt"
    assert not [output for output in (*second, *sampled) if output.output_type == "error"]
    saved, is_whole = third[0].text.split()
    assert is_whole == "True" and 2 <= int(saved) < 200
    assert wrong[0].ename == "UserError"
    assert "\n".join(wrong[0].traceback).startswith("UserError: config='grp' is unknown")
    assert "Response(text=" in sampled[-1].data["text/plain"]
