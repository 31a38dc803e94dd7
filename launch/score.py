"""Grades responses that exist already, with any verifier.

    python -m launch.score --samples=generated/responses.parquet --verifier=math \\
        --output=graded.parquet

The file has a row per response, with its text and the reference answer: responses.parquet of
launch.generate, samples.parquet of launch.evaluate, rollouts/ of a run, or your own .jsonl or
.parquet. Writes the rows with the columns score, correct, extracted, boxed and verifier_error to
--output, and prints a summary. docs/generation.md has more. Exit codes: 0 done, 2 wrong setting or
row (one line names it).
"""

import pathlib

from absl import flags

from launch import cli
from semrl_jax.settings.rewards import check_function
from semrl_jax.support.errors import UserError

SAMPLES = flags.DEFINE_string("samples", None, ".jsonl or .parquet file with a row per response")
VERIFIER = flags.DEFINE_string("verifier", None, "a built-in verifier, or package.module:function")
OUTPUT = flags.DEFINE_string("output", None, "file to write, of the same kind as --samples")
RESPONSE = flags.DEFINE_string("response", "response", "field with the text of the response")
REFERENCE = flags.DEFINE_string("reference", "reference", "field with the reference answer")
ROW = flags.DEFINE_string(
    "row", "row", "field with the row of the prompt as JSON, for a verifier that takes it; without "
    "such a field, it gets the whole row"
)  # fmt: skip
GROUP = flags.DEFINE_string(
    "group", None, "field that groups the summary; default: benchmark, or data_source, if there"
)
PREFIX = flags.DEFINE_string(
    "prefix", "", "of the new columns; columns of the same name are replaced"
)
TIMEOUT_S = flags.DEFINE_float("timeout_s", 10.0, "seconds for one response", lower_bound=0)
NUM_WORKERS = flags.DEFINE_integer("num_workers", 2, "worker processes", lower_bound=1)
MEMORY_LIMIT_GIB = flags.DEFINE_float("memory_limit_gib", 2.0, "of one worker; 0: no limit")


def main() -> int:
    samples, output = pathlib.Path(cli.required(SAMPLES)), pathlib.Path(cli.required(OUTPUT))
    verifier = cli.required(VERIFIER)
    check_function("--verifier", verifier)
    if samples.suffix != output.suffix:
        raise UserError(f"--output={output} must end in {samples.suffix or '.jsonl or .parquet'}.")
    if output.exists() and samples.exists() and output.samefile(samples):
        raise UserError(f"--output={output} is the --samples; name another file.")
    from semrl_jax.jobs import score  # here: mistakes and --help are quick
    from semrl_jax.rewards import VerifierPool

    fields = score.Fields(RESPONSE.value, REFERENCE.value, ROW.value, GROUP.value, PREFIX.value)
    score.check_file(samples)
    cli.output_file("output", OUTPUT.value, make_directory=True)
    with VerifierPool(
        function=verifier,
        timeout_s=TIMEOUT_S.value,
        num_workers=NUM_WORKERS.value,
        memory_limit_gib=MEMORY_LIMIT_GIB.value,
    ) as pool:
        score.check_rows(samples, fields, takes_row=pool.takes_row)
        score.score(samples, output, pool, fields)
    return 0


if __name__ == "__main__":
    cli.run(main, __doc__)
