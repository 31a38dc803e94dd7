"""Offline studies and figures from saved hidden states and runs; nothing imports this room.

`runs` and `study_sources` are imported by name: they load the trainer.
"""

from semrl_jax.analysis.responses import (
    draw_rank_curves,
    measure_responses,
    rank_curve,
    response_table,
    write_columns,
    write_rank_curves,
)
from semrl_jax.analysis.states import read_states

__all__ = [
    "draw_rank_curves", "measure_responses", "rank_curve", "read_states", "response_table",
    "write_columns", "write_rank_curves",
]  # fmt: skip
