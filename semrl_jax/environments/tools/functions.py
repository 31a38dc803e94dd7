"""Tools: plain typed functions that a policy calls. Signature and docstring give the JSON schema.

A tool is one function. Its docstring describes every argument in Google style:

    def add(a: int, b: int) -> int:
        '''Adds two numbers.

        Args:
          a: first summand.
          b: second summand.
        '''
        return a + b

The schema is that of `transformers.utils.get_json_schema`, which is slow to import. No JAX here.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Union

from semrl_jax.support.errors import UserError

MAX_ERROR_CHARS = 200
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", re.DOTALL)
_KINDS = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_SCALARS = (int, float, str, bool, type(None))
_SUPPORTED = "int, float, str, bool, list, tuple, dict, None, Any, Enum, Literal and unions of them"
_ARTICLES = {"integer": "an integer", "array": "an array", "object": "an object", "null": "null"}


class Call(NamedTuple):
    """A call that a policy wrote."""

    name: str  # of the tool
    arguments: dict[str, Any]  # by name, as parsed from JSON
    error: str = ""  # why the call is malformed; "" if it is not


class Answer(NamedTuple):
    """The answer to a call."""

    text: str  # for the policy. It can be written as UTF-8. After an error, one line.
    # "" if the function returned a result. Otherwise "malformed", "unknown_tool", "arguments",
    # "exception" (the function raised), or "result" (it has no JSON form).
    error: str = ""


def schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """The JSON schema of each tool, as chat templates take them.

    Raises UserError if two tools have the same name, or one cannot be derived: not a plain
    function, no docstring, an argument without type or description, or an unknown type.
    """
    found = [_schema(function) for function in functions]
    names = [schema["function"]["name"] for schema in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"tools has {twice[0]!r} twice; give each function its own name.")
    return found


def call(functions: Sequence[Callable[..., Any]], request: Call, max_chars: int = 10_000) -> Answer:
    """Runs the function that a policy called.

    An argument is converted only where nothing is lost: 3.0 and "3" to an int, 3 to a float, "true"
    to a bool, a member's value to its Enum, an array to a tuple.

    A text is answered as it is, bytes as UTF-8, and any other result as JSON, in which a number
    that is not finite is NaN, Infinity or -Infinity. NumPy values count as lists and numbers. Lone
    surrogates and bytes that are not UTF-8 become replacement marks. What the function prints goes
    to standard error.

    Args:
      functions: the tools; `schemas` has accepted them.
      request: the call. Every fault in it, and every failure of the function, becomes an answer.
      max_chars: a longer answer ends there, with a note of at most 40 characters.
    """
    if request.error:
        return _failed("malformed", request.error)
    named = {function.__name__: function for function in functions}
    if request.name not in named:
        known = ", ".join(named) or "none"
        return _failed("unknown_tool", f"there is no tool {_shown(request.name)}; tools: {known}")
    function = named[request.name]
    try:
        arguments = _arguments(function, request.arguments)
    except (_MisfitError, RecursionError) as e:
        return _failed("arguments", f"{request.name}: {e}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = function(**arguments)
    except BaseException as e:  # SystemExit and a user's own, too
        return _failed("exception", _error_text(e))
    try:
        text = _text(result)
    except BaseException:  # of the result's own methods, too
        return _failed("result", f"the result, a {type(result).__name__}, has no JSON form")
    if len(text) > max_chars:
        text = f"{text[:max_chars]}\n[{len(text) - max_chars} more characters]"
    return Answer(text)


class _MisfitError(ValueError):
    """A value that does not fit its type; the text is for the policy."""


def _failed(error: str, text: str) -> Answer:
    line = " ".join(text[: 10 * MAX_ERROR_CHARS].split())[:MAX_ERROR_CHARS]
    return Answer("error: " + "".join(c if c.isprintable() else "?" for c in line), error)


def _error_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:
        return type(error).__name__


def _text(result: Any) -> str:
    if isinstance(result, bytes | bytearray):
        return bytes(result).decode("utf-8", "replace")
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=lambda value: value.tolist())
    return str.encode(result, "utf-8", "replace").decode()  # of a subclass, too


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 50 else f"{text[:47]}..."


def _arguments(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the function's types have them."""
    parameters, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
    takes = f"it takes {', '.join(parameters) or 'none'}"
    if unknown := [name for name in given if name not in parameters]:
        raise _MisfitError(f"unknown argument {_shown(unknown[0])}; {takes}")
    for name, parameter in parameters.items():
        if name not in given and parameter.default is parameter.empty:
            raise _MisfitError(f"argument {name!r} is missing; {takes}")
    return {name: _fit(value, hints[name], name) for name, value in given.items()}


def _fit(value: Any, hint: Any, where: str, parse: bool = True) -> Any:
    """The value as a `hint`; with `parse`, also from the text of a number or a bool."""
    options = typing.get_args(hint)
    match _kind(hint):
        case "any":
            return value
        case "union":
            for parse_text in sorted({False, parse}):  # "3" for `int | str` stays a text
                for option in options:
                    with contextlib.suppress(_MisfitError):
                        return _fit(value, option, where, parse_text)
            raise _must_be(where, " or ".join(_article(option) for option in options), value)
        case "enum":
            for allowed, result in _choices(hint).items():
                if json.dumps(value) == allowed:
                    return result
            raise _must_be(where, f"one of {', '.join(_choices(hint))}", value)
        case "string" if isinstance(value, str):
            return value
        case "null" if value is None:
            return value
        case "boolean" if isinstance(value, bool):
            return value
        case "array" if isinstance(value, list):
            items = options if _origin(hint) is tuple else options * len(value)
            if options and len(items) != len(value):
                raise _must_be(where, f"an array of {len(items)} items", value)
            if options:
                pairs = zip(value, items, strict=True)
                value = [_fit(v, t, f"{where}[{i}]", parse) for i, (v, t) in enumerate(pairs)]
            return _origin(hint)(value)
        case "object" if isinstance(value, dict):
            if options:
                return {
                    key: _fit(item, options[1], f"{where}[{_shown(key)}]", parse)
                    for key, item in value.items()
                }
            return value
        case "integer" if type(value) is int or (type(value) is float and value.is_integer()):
            return int(value)
        case "number" if (
            type(value) in (int, float) and abs(value) < 2**1023 and (float(value) == value)
        ):
            return float(value)
        case "integer" | "number" | "boolean" if parse and isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):  # _MisfitError, too
                return _fit(json.loads(value), hint, where, parse=False)
    raise _must_be(where, _article(hint), value)


def _must_be(where: str, what: str, value: Any) -> _MisfitError:
    return _MisfitError(f"argument {where} must be {what}, not {_shown(value)}")


def _article(hint: Any) -> str:
    kind = _kind(hint)
    if kind == "enum":
        return f"one of {', '.join(_choices(hint))}"
    return _ARTICLES.get(kind, f"a {kind}")


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _kind(hint: Any) -> str:
    """The JSON type of a Python type, or "any", "union" or "enum"; TypeError if it has none."""
    origin = _origin(hint)
    if hint is Any:
        return "any"
    if origin in (Union, types.UnionType):
        return "union"
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return "enum"
    if origin in _KINDS:
        return _KINDS[origin]
    raise TypeError(f"type {getattr(hint, '__name__', hint)} is none of {_SUPPORTED}")


def _choices(hint: Any) -> dict[str, Any]:
    """The allowed values of an Enum or a Literal, as JSON, and what each of them becomes."""
    if _origin(hint) is Literal:
        found = [(value, value) for value in typing.get_args(hint)]
    else:
        found = [(member.value, member) for member in hint]
    if not found or any(type(value) not in _SCALARS for value, _ in found):
        raise TypeError(f"the values of {hint} must be numbers, texts, bools or None")
    return {json.dumps(value): result for value, result in found}


def _type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type; TypeError if it has none."""
    options = typing.get_args(hint)
    match kind := _kind(hint):
        case "any":
            return {}
        case "enum":
            values = [json.loads(value) for value in _choices(hint)]
            names = list(dict.fromkeys(_KINDS[type(value)] for value in values))
            return {"type": names[0] if len(names) == 1 else names, "enum": values}
        case "union":
            inner = [_type_schema(option) for option in options if option is not type(None)]
            if len(inner) == 1:
                found = inner[0]
            elif all(each.keys() == {"type"} and isinstance(each["type"], str) for each in inner):
                names = sorted({each["type"] for each in inner})
                found = {"type": names[0] if len(names) == 1 else names}
            else:
                found = {"anyOf": inner}
            return {**found, "nullable": True} if type(None) in options else found
    found = {"type": kind}
    if _origin(hint) is tuple and options:
        if len(options) == 1 or Ellipsis in options:
            raise TypeError(f"type {hint} has no fixed length; use list")
        found["prefixItems"] = [_type_schema(option) for option in options]
    elif kind == "array" and options:
        found["items"] = _type_schema(options[0])
    elif kind == "object" and options:
        found["additionalProperties"] = _type_schema(options[1])
    return found


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", type(function).__name__)
    is_function = inspect.isfunction(function) or inspect.ismethod(function)
    if not is_function or not _NAME.fullmatch(name):
        raise UserError(
            f"tools has {name!r}, which is no function with a name of at most 64 letters, digits "
            "and underscores; wrap it in one."
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(f"tools has {name!r}, which is async or yields; return the result instead.")
    description, texts, returns = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise UserError(f"tools has {name!r} without a docstring; describe it in one sentence.")
    try:
        hints = typing.get_type_hints(function)
    except Exception as e:
        why = f"whose types cannot be read ({_error_text(e)}); import them in its module."
        raise UserError(f"tools has {name!r}, {why}") from e
    properties, required = {}, []
    for argument, parameter in inspect.signature(function).parameters.items():
        where = f"tools has {name!r}, whose argument {argument!r}"
        if argument == "self":
            way_out = f"in __init__, write self.tools = [self.{name}]."
            raise UserError(f"tools has {name!r}, a method of the class; {way_out}")
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where} cannot be given by name; write it out without * and /.")
        if argument not in hints:
            raise UserError(f"{where} has no type; write one, such as {argument}: int.")
        if argument not in texts:
            raise UserError(f"{where} is not described; add it to 'Args:' in the docstring.")
        try:
            properties[argument] = _type_schema(hints[argument])
        except TypeError as e:
            raise UserError(f"{where} has no JSON schema: {e}.") from e
        properties[argument]["description"] = texts[argument]
        if parameter.default is parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        with contextlib.suppress(TypeError):  # the policy does not write it
            found["return"] = _type_schema(hints["return"])
            if returns:
                found["return"]["description"] = returns
    return {"type": "function", "function": found}


def _docstring(text: str) -> tuple[str, dict[str, str], str]:
    """The description, the text of each argument, and the text of the result."""
    description, *rest = _SECTION.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    arguments = {}
    body = inspect.cleandoc(sections.get("Args", ""))
    for item in re.split(r"\n(?=\S)", body):
        if match := _ARGUMENT.match(item):
            arguments[match[1]] = " ".join(match[2].split())
    return description.strip(), arguments, " ".join(sections.get("Returns", "").split())
