"""The page of a mismatch shows the begin of a response after a prompt of any length."""

import json
import re

import numpy as np
import pytest

from semrl_jax.pages.mismatch import MOST_TOKENS, EngineMap, ResponseMap, write_page


@pytest.mark.parametrize(
    ("num_prompt", "length", "first"), [(9, 600, 0), (600, 700, 188), (900, 2000, 644), (5, 8, 0)]
)
def test_the_begin_of_a_response_is_shown(tmp_path, num_prompt, length, first):
    values = np.arange(length, dtype=float)
    tokens = [f"t{i}" for i in range(length)]
    response = ResponseMap(tokens, num_prompt, values[None], values[None], values)
    engine = EngineMap("jax", "healthy", True, ["final"], ["final norm"], [1.0], 5.0, [response])
    write_page(tmp_path / "page.html", "title", "note", [engine])
    text = (tmp_path / "page.html").read_text()
    ((found,),) = (
        each["responses"] for each in json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    )
    last = min(first + MOST_TOKENS, length)
    assert found["first"] == first and found["num_prompt"] == num_prompt - first
    assert found["tokens"] == tokens[first:last]
    assert found["logprobs"] == found["states"][0] == found["local"][0]
    assert found["logprobs"][0] == first and len(found["logprobs"]) == last - first
