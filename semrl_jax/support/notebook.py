"""Progress in a cell of a notebook: one element, which is updated in place and stays."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Task

REDRAW_S = 1.0
ELEMENT = """<div style="line-height:1.6">{what}
<progress value="{done}" max="{total}" style="width:16em;vertical-align:middle"></progress>
{text}</div><pre style="margin:0">{line}</pre>"""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return Console().is_jupyter


@contextlib.contextmanager
def shown(task: Task, describe: Callable[[Task], str]) -> Iterator[None]:
    """Shows a task in the block, with its field `line`; `describe` makes the text after the bar."""
    from IPython.display import display  # a kernel has it

    def drawn() -> dict[str, str]:
        text, line = describe(task), task.fields["line"]
        plain = "\n".join(filter(None, (f"{task.description} {text}", line)))
        element = ELEMENT.format(
            what=html.escape(task.description), done=task.completed, total=task.total,
            text=html.escape(text), line=html.escape(line),
        )  # fmt: skip
        return {"text/plain": plain, "text/html": element}

    last = drawn()
    handle = display(last, raw=True, display_id=True)
    ended = threading.Event()

    def redraw() -> None:
        nonlocal last
        if (now := drawn()) != last:
            last = now
            handle.update(now, raw=True)

    def redraw_often() -> None:
        while not ended.wait(REDRAW_S):
            redraw()

    thread = threading.Thread(target=redraw_often, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        redraw()
