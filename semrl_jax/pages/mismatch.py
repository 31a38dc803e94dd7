"""`mismatch.html`: where an engine and the trainer part, by layer and token, in one file."""

from __future__ import annotations

import html
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from semrl_jax.pages.html import content_policy, data_element, filled, rounded
from semrl_jax.support.safe_files import replacing

MOST_TOKENS = 512  # of prompt and response in the page
_TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


class ResponseMap(NamedTuple):
    """One response. Rows of the maps are layers, columns tokens; NaN where nothing is known."""

    tokens: Sequence[str]
    num_prompt: int
    states: Float[np.ndarray, "L N"]  # relative difference from the trainer's pass
    local: Float[np.ndarray, "S N"]  # what each part of the pass adds, divided by its rounding
    logprobs: Float[np.ndarray, " N"]  # engine - trainer, nats


class EngineMap(NamedTuple):
    """One engine."""

    name: str
    sentence: str
    is_healthy: bool
    layers: Sequence[str]  # names of the rows of `states`
    parts: Sequence[str]  # names of the rows of `local`
    ratios: Sequence[float]  # the difference of each part, divided by its rounding
    limit: float  # of the ratios that rounding explains
    responses: Sequence[ResponseMap]


def write_page(file: pathlib.Path, title: str, note: str, engines: Sequence[EngineMap]) -> None:
    """Writes the page; the file is complete or missing. It opens from a disk, without a server."""
    template = _TEMPLATE.read_text("utf-8")
    script = template.split("<script>")[-1].split("</script>")[0]
    parts = {
        "policy": content_policy(script),
        "title": html.escape(title),
        "note": html.escape(note),
        "data": data_element("data", [_data(engine) for engine in engines]),
    }
    with replacing(file) as out:
        out.write(filled(template, parts))


def _data(engine: EngineMap) -> dict[str, Any]:
    return {
        **engine._asdict(),
        "ratios": _numbers(engine.ratios),
        "responses": list(map(_response, engine.responses)),
    }


def _response(each: ResponseMap) -> dict[str, Any]:
    """The tokens around the begin of the response, if there are more than a page shows."""
    first = max(min(each.num_prompt - MOST_TOKENS // 2, len(each.tokens) - MOST_TOKENS), 0)
    shown = slice(first, first + MOST_TOKENS)
    return {
        "first": first,
        "tokens": list(each.tokens[shown]),
        "num_prompt": each.num_prompt - first,
        "states": [_numbers(row[shown]) for row in each.states],
        "local": [_numbers(row[shown]) for row in each.local],
        "logprobs": _numbers(each.logprobs[shown]),
    }


def _numbers(values: Sequence[float] | Float[np.ndarray, " N"]) -> list[float | None]:
    return [rounded(float(value), 3) for value in values]
