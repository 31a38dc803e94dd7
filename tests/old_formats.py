"""Files of responses as earlier releases wrote them."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

EVALUATION = {"group_id": "problem", "sample_index": "sample"}
GENERATION = {"group_id": "prompt_index", "benchmark": "data_source"}


def make_old(file, names):
    """Renames columns of a file, as in `EVALUATION` or `GENERATION`."""
    table = pq.read_table(file)
    old = [names.get(name, name) for name in table.column_names]
    assert set(names) <= set(table.column_names)
    pq.write_table(table.rename_columns(old), file)


def make_old_rollouts(file):
    """Makes a file of a run: metrics were 0.0 where not valid, with a validity next to them."""
    table = pq.read_table(file)
    for name in [name for name in table.column_names if name.startswith("metrics/")]:
        invalid = pc.is_nan(table[name])
        valid = pc.if_else(invalid, 0.0, 1.0)
        place = table.column_names.index(name)
        table = table.set_column(place, name, pc.if_else(invalid, 0.0, table[name]))
        table = table.append_column(f"{name}_valid", valid)
    error = pc.if_else(pc.equal(table["verifier_error"], ""), pa.scalar(None, pa.string()),
                       table["verifier_error"])  # fmt: skip
    table = table.set_column(table.column_names.index("verifier_error"), "verifier_error", error)
    pq.write_table(table.drop_columns(["num_tokens", "mean_logprob", "boxed"]), file)
