"""Names of metrics, orders, methods and windows, and what they require. Loads no JAX."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from semrl_jax.support.choices import TOKEN_INDICATORS
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import module_names

METRICS = module_names("semrl_jax.metrics.kinds")
# Metrics of the reference implementation. They are measured where no names are given.
RELEASE_METRICS = (
    "curvature", "effective_rank", "log_effective_rank", "response_entropy", "traditional_rank",
)  # fmt: skip
# Metrics of the mean states of groups of responses. The indicator has one value per response.
GROUP_INDICATOR = "elliptical_novelty"
GROUP_METRICS = (GROUP_INDICATOR, "lidar", "log_determinant")
# Order -> the number of windows from which it is valid.
ORDERS = {"value": 0, "velocity": 2, "acceleration": 3}
METHODS = ("gram", "svd")
WINDOWS = ("exact", "release", "later")
RELEASE_TOKENS = 512
FINAL_LAYER = -1  # after the final norm

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_RESERVED = ("_valid", "_velocity", "_acceleration")  # endings of keys as text


def metric_name(path: str) -> str:
    """The name of the metric that a module declares: the last part of the module's path."""
    return path.rpartition(".")[2]


def check_metrics(field: str, names: Any) -> tuple[str, ...]:
    """Returns names or module paths of metrics as a tuple.

    A name without a dot is one of METRICS. A path with dots is a user's module, which is not
    imported here; see `load_metric`. UserError: they are no sequence of names, or two metrics have
    the same name.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise UserError(f"{field}={names!r} must be a tuple of names, such as ('curvature',).")
    names = tuple(names)
    for name in names:
        if not isinstance(name, str) or not (name in METRICS or _MODULE.fullmatch(name)):
            near = difflib.get_close_matches(str(name), METRICS, n=1)
            raise UserError(
                f"{field} has {name!r}"
                + (f", did you mean {near[0]!r}" if near else "")
                + f"; it may have {', '.join(METRICS)}, and paths of modules, such as "
                "'my_package.my_metric', one for each flag."
            )
        if metric_name(name) in TOKEN_INDICATORS:
            raise UserError(
                f"{field} has {name!r}; {metric_name(name)} is an indicator of the tokens: rename "
                "the module."
            )
        if metric_name(name).endswith(_RESERVED):
            raise UserError(
                f"{field} has {name!r}; the name of a metric must not end with one of "
                f"{', '.join(_RESERVED)}: rename the module."
            )
    found = [metric_name(name) for name in names]
    if twice := [name for name in found if found.count(name) > 1]:
        raise UserError(f"{field} has {twice[0]!r} twice; each metric needs a name of its own.")
    return names


def window_sizes(num_tokens: int, stride: int, window: str) -> list[int]:
    """Tokens of each window of a response; "release" counts the last 512 of its tokens."""
    if window == "exact":
        return list(range(stride, num_tokens + 1, stride))
    if window == "release":
        num_tokens = min(num_tokens, RELEASE_TOKENS)
    if num_tokens < 2 * stride:
        return []
    sizes = range(stride + 1, num_tokens + 1, stride)
    return [*sizes, num_tokens] if window == "later" else list(sizes)
