"""Schemas against transformers; arguments, results and failures of tools."""

import enum
import json
import subprocess
import sys
import typing
from typing import Any, Literal, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from semrl_jax.environments.tools.functions import Answer, Call, call, schemas
from semrl_jax.support.errors import UserError


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


def every_type(
    a: int,
    b: float,
    c: str,
    d: bool,
    e: list,
    f: dict,
    g: list[list[int]],
    h: dict[str, float],
    i: tuple[int, str],
    j: int | str,
    k: Optional[int],  # noqa: UP045
    l: Literal["x", 2, None],  # noqa: E741
    m: Unit,
    n: Any,
    o: list[int] | dict[str, int] | None = None,
    p: int | float = 3,
    q: tuple = (),
) -> list[float]:
    """Takes every type.

    It has a second paragraph: with
    two lines.

    Args:
      a: first.
      b: second,
        continued: here
      c: third.
      d: d. e: no argument.
      e: e.
      f: f.
      g: g.
      h: h.
      i: i.
      j: j.
      k: k.
      l: l.
      m: m.
      n: n.
      o: o.
      p: p.
      q: q.

    Returns:
      What it returns.

    Raises:
      ValueError: never.
    """


def nothing() -> "subprocess.Popen":
    """Has no argument, and a result without a schema."""


class Counter:
    """Its methods are tools."""

    def __init__(self):
        self.count = 0

    def advance(self, steps: int = 1) -> int:
        """Advances the counter.

        Args:
            steps: how far.
        """
        self.count += steps
        return self.count


@pytest.mark.parametrize("function", [every_type, nothing, Counter().advance])
def test_schema_is_that_of_transformers(function):
    assert schemas([function]) == [get_json_schema(function)]


def documented(function, *arguments):
    function.__doc__ = "Does it.\n\nArgs:\n" + "".join(f"  {name}: it.\n" for name in arguments)
    return function


def refused_functions():
    def untyped(a):
        """Does it.

        Args:
          a: it.
        """

    def undescribed(a: int):
        """Does it."""

    def unknown_name(a: "Missing"):  # noqa: F821 - as in a user's file
        """Does it."""

    def silent(a: int):
        pass

    async def later():
        """Does it."""

    def typed(hint):
        def function(a):
            return a

        function.__annotations__["a"] = hint
        return documented(function, "a")

    class Weekday(enum.Enum):
        MONDAY = object()

    yield untyped, "whose argument 'a' has no type"
    yield undescribed, "whose argument 'a' is not described"
    yield unknown_name, "whose types cannot be read (NameError: name 'Missing'"
    yield silent, "without a docstring"
    yield later, "async or yields"
    yield len, "is no function with a name"
    yield (lambda: 1), "'<lambda>', which is no function with a name"
    yield Counter, "is no function"
    yield documented(lambda_named("many", lambda *a: 0), "a"), "cannot be given by name"
    yield typed(np.ndarray), "type ndarray is none of int, float"
    yield typed(dict[str, set]), "type set is none of"
    yield typed(tuple[int, ...]), "no fixed length"
    yield typed(Weekday), "must be numbers, texts, bools or None"


def lambda_named(name, function):
    function.__name__ = name
    return function


@pytest.mark.parametrize(("function", "message"), list(refused_functions()))
def test_a_schema_that_cannot_be_derived_is_one_line(function, message):
    with pytest.raises(UserError) as e:
        schemas([function])
    assert message in str(e.value)
    assert str(e.value).startswith("tools has ")
    assert "\n" not in str(e.value)


def tool_of(hint):
    """A tool of one argument, which answers the argument's representation."""

    def show(a):
        return repr(a)

    show.__annotations__["a"] = hint
    return documented(show, "a")


@pytest.mark.parametrize(
    ("hint", "value", "result"),
    [
        (int, 3, "3"),
        (int, 3.0, "3"),
        (int, "-3", "-3"),
        (int, 10**400, repr(10**400)),
        (int, 3.5, None),
        (int, "3.5", None),
        (int, "three", None),
        (int, True, None),
        (int, "true", None),
        (int, None, None),
        (float, 3, "3.0"),
        (float, "0.5", "0.5"),
        (float, 2**53 + 1, None),
        (float, 10**400, None),
        (float, float("inf"), None),
        (float, float("nan"), None),
        (float, "NaN", None),
        (float, "[" * 100_000, None),
        (bool, "true", "True"),
        (bool, 1, None),
        (bool, "True", None),
        (str, 3, None),
        (str, "3", "'3'"),
        (int | str, "3", "'3'"),
        (int | bool, "3", "3"),
        (int | None, None, "None"),
        (int | None, "x", None),
        (list[int], [1, "2", 3.0], "[1, 2, 3]"),
        (list[int | str], [1, "2"], "[1, '2']"),
        (list[int], [1, "x"], None),
        (list[int], 1, None),
        (list, [1, "x"], "[1, 'x']"),
        (tuple[int, str], [1, "2"], "(1, '2')"),
        (tuple[int, str], [1], None),
        (tuple, [1], "(1,)"),
        (dict[str, float], {"a": 1}, "{'a': 1.0}"),
        (dict[str, float], {"a": "x"}, None),
        (dict, {"a": "x"}, "{'a': 'x'}"),
        (Unit, "m", "<Unit.METRE: 'm'>"),
        (Unit, "METRE", None),
        (Literal["x", 1], 1, "1"),
        (Literal["x", 1], True, None),
        (Any, {"a": None}, "{'a': None}"),
    ],
)
def test_arguments_are_converted_only_where_nothing_is_lost(hint, value, result):
    answer = call([tool_of(hint)], Call("show", {"a": value}))
    if result is not None:
        assert answer == Answer(result)
    else:
        assert answer.error == "arguments"
        assert answer.text.startswith("error: show: argument a")
        assert "must be" in answer.text
        assert len(answer.text) < 210


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
      a: first.
      b: second.
    """
    print("adding")
    return a + b


@pytest.mark.parametrize(
    ("request_", "text", "error"),
    [
        (Call("add", {"a": 1}), "1", ""),
        (Call("sub", {}), 'error: there is no tool "sub"; tools: add, nothing', "unknown_tool"),
        (Call("add", {}), "error: add: argument 'a' is missing; it takes a, b", "arguments"),
        (
            Call("add", {"a": 1, "c\n": 2}),
            'error: add: unknown argument "c\\n"; it takes a, b',
            "arguments",
        ),
        (
            Call("add", {"a": [], "b": {}}),
            "error: add: argument a must be an integer, not []",
            "arguments",
        ),
        (Call("", {}, "no JSON\nhere"), "error: no JSON here", "malformed"),
    ],
)
def test_a_faulty_call_is_answered_with_one_line(request_, text, error, capsys):
    assert call([add, nothing], request_) == Answer(text, error)
    assert not capsys.readouterr().out


class Hostile(BaseException):
    def __str__(self):
        raise RuntimeError


class HostileText(str):
    def encode(self, *args):
        raise RuntimeError

    def __len__(self):
        return -1


RESULTS = {
    "none": None,
    "nan": [float("nan"), float("-inf")],
    "bytes": b"caf\xc3\xa9 \xff",
    "numpy": {"a": np.arange(3), "b": np.float32(0.5)},
    "surrogate": "a\ud800b",
    "text": HostileText("x"),
    "unicode": ["é"],
    "set": {1},
    "object": object(),
    "keys": {(1, 2): 3},
    "loop": (loop := []),
    "deep": json.loads("[" * 900 + "]" * 900),
}
loop.append(loop)
EXCEPTIONS = {
    "two lines": ValueError("two\n lines\x00"),
    "no text": ValueError(),
    "unreadable": Hostile(),
    "exit": SystemExit(3),
    "long": RuntimeError("x" * 10_000),
    "interrupt": KeyboardInterrupt(),
}


def give(name: str):
    """Gives a result.

    Args:
      name: of the result.
    """
    if name in EXCEPTIONS:
        raise EXCEPTIONS[name]
    return RESULTS[name]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("none", "null", ""),
        ("nan", "[NaN, -Infinity]", ""),
        ("bytes", "café �", ""),
        ("numpy", '{"a": [0, 1, 2], "b": 0.5}', ""),
        ("surrogate", "a?b", ""),
        ("text", "x", ""),
        ("unicode", '["é"]', ""),
        ("set", "error: the result, a set, has no JSON form", "result"),
        ("object", "error: the result, a object, has no JSON form", "result"),
        ("keys", "error: the result, a dict, has no JSON form", "result"),
        ("loop", "error: the result, a list, has no JSON form", "result"),
        ("two lines", "error: ValueError: two lines?", "exception"),
        ("no text", "error: ValueError", "exception"),
        ("unreadable", "error: Hostile", "exception"),
        ("exit", "error: SystemExit: 3", "exception"),
        ("long", "error: RuntimeError: " + "x" * 186, "exception"),
        ("interrupt", "error: KeyboardInterrupt", "exception"),
        ("missing", "error: KeyError: 'missing'", "exception"),
    ],
)
def test_every_result_and_exception_is_answered(name, text, error):
    assert call([give], Call("give", {"name": name})) == Answer(text, error)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                    max_leaves=20))  # fmt: skip
def test_any_argument_is_answered_in_utf8(value):
    for hint in typing.get_type_hints(every_type).values():
        answer = call([tool_of(hint)], Call("show", {"a": value}))
        assert answer.error in ("", "arguments")
        answer.text.encode()


def test_the_module_loads_no_large_library():
    code = (
        "import sys, semrl_jax.environments.tools.functions, semrl_jax.environments.tools.formats\n"
        "assert not {'jax', 'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
