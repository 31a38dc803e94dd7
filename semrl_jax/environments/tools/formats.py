"""Forms of tool calls in text: Hermes and Qwen, Llama 3, and a JSON code block.

A model's chat template has one of them, if any. It writes the tools into the system message, and
the messages of role "tool" in the model's own form. For a template without one, or for another form
than its own, `instructions` tells the policy what to write, and the answers are a user's message.

A call that cannot be parsed is a `Call` with `error`. Its answer tells the policy why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from semrl_jax.environments.tools.functions import Answer, Call, call, schemas
from semrl_jax.support.errors import UserError

_AROUND_ANSWER = 80  # characters of a mark that it was truncated, and of <tool_response>
MAX_CALLS = 32  # of one response; the next one is answered with an error, and the rest is ignored
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "</s>")
_XML = re.compile("<function=|<arg_key>")  # of Qwen3-Coder, Functionary and GLM
_TAKES_TOOLS = re.compile(r"\{%[^%]*\btools\b")  # a loop over them, or a condition
_BLOCK = re.compile(r"^```(?:json|tool_call)[ \t]*\n(.*?)(?:\n```|\Z)", re.MULTILINE | re.DOTALL)
_LOOKS_LIKE_CALL = re.compile(r'"(?:name|arguments|parameters)"\s*:')
_BLANKS, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;]*")


class ToolFormat(NamedTuple):
    """How tools, calls and answers are written."""

    name: str  # "hermes", "llama3" or "json"
    # Whether the chat template writes it: give the schemas to the template as `tools`.
    in_template: bool
    example: str  # a call as the policy must write it
    find: Callable[[str], Iterator[Call]]  # the calls in a response

    def parse(self, response: str) -> list[Call]:
        """The calls in a response, in their order; [] if it makes none.

        The response has its special tokens: Llama's `<|python_tag|>` is one. An end marker is
        ignored, and so is everything before the end of the thoughts, `</think>`.
        """
        response = response.rstrip()
        for end in _ENDS:
            response = response.removesuffix(end)
        _, thinks, rest = response.rpartition("</think>")
        if not thinks and "<think>" in response:
            return []
        calls = []
        for found in self.find(rest):
            if len(calls) == MAX_CALLS:
                return [*calls, _malformed(f"there are more than {MAX_CALLS}")]
            calls.append(found)
        return calls

    def instructions(self, schemas: Sequence[dict[str, Any]]) -> str:
        """The text for the system message; "" if the chat template writes its own."""
        if self.in_template or not schemas:
            return ""
        tools = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        return (
            f"You can call these tools:\n{tools}\n\nTo call one, write its name and arguments:\n"
            f"{self.example}\nThe answer comes in the next message."
        )

    def told(
        self, messages: Sequence[dict[str, str]], schemas: Sequence[dict[str, Any]]
    ) -> list[dict[str, str]]:
        """A prompt with the instructions in its system message, if the policy needs them."""
        instructions = self.instructions(schemas)
        if not instructions:
            return [*messages]
        first, rest = {"role": "system", "content": ""}, messages
        if messages[0]["role"] == "system":
            first, *rest = messages
        text = "\n\n".join(filter(None, (first["content"], instructions)))
        return [{**first, "content": text}, *rest]

    def messages(self, answers: Sequence[Answer]) -> list[dict[str, str]]:
        """The messages that follow a response: the answers to its calls, in their order."""
        if self.in_template:
            return [{"role": "tool", "content": answer.text} for answer in answers]
        texts = (f"<tool_response>\n{answer.text}\n</tool_response>" for answer in answers)
        return [{"role": "user", "content": "\n".join(texts)}] if answers else []


class Toolbox:
    """Tools, their schemas, and the form in which the policy calls them; raises as `schemas`."""

    def __init__(self, functions: Sequence[Callable[..., Any]]):
        self.functions, self.schemas = list(functions), schemas(functions)
        self.form = choose_format(None)

    def told(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        return self.form.told(messages, self.schemas)

    def answers(self, response: str, max_chars: int) -> list[Answer]:
        """Runs the tools that a response calls, in turn; each answer has a part of `max_chars`."""
        calls = self.form.parse(response) if self.functions else []
        room = max_chars // max(1, len(calls)) - _AROUND_ANSWER
        return [call(self.functions, each, max(0, room)) for each in calls]


def choose_format(
    chat_template: str | None, name: str = "auto", field: str = "environment.tool_format"
) -> ToolFormat:
    """The form of tool calls of a model.

    Args:
      chat_template: of its tokenizer; None if it has none.
      name: "hermes", "llama3" or "json". "auto" takes the form of the template, or "json" if the
        template knows no tools.
      field: of the config that has the name. UserError: there is no such form, or the template
        has another one than these.
    """
    if name not in ("auto", *_FORMATS):
        raise UserError(f"{field}={name!r} must be one of auto, {', '.join(_FORMATS)}.")
    own = _own_format(chat_template or "")
    if name == "auto" and own is None:
        raise UserError(
            f"{field}='auto': the chat template writes tool calls in none of the known forms; "
            f"name one of {', '.join(_FORMATS)}, which is then described in the system message."
        )
    chosen = own if name == "auto" else name
    return tool_format(chosen, chosen == own and chosen != "json")


def tool_format(name: str, in_template: bool) -> ToolFormat:
    return ToolFormat(name, in_template, *_FORMATS[name])


def schema_of(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool that another program offers, as chat templates take it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _own_format(template: str) -> str | None:
    """The form that a template writes; "json" if it knows no tools, None if it is another one."""
    if not _TAKES_TOOLS.search(template):
        return "json"
    if _XML.search(template):
        return None
    if "<tool_call>" in template and "arguments" in template:
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3"
    return None


def _hermes_calls(text: str) -> Iterator[Call]:
    start, end, at = "<tool_call>", "</tool_call>", 0
    while (at := text.find(start, at)) >= 0:
        at += len(start)
        try:
            value, after = _read_json(text, at)
            close = text.find(end, after)
            if text[after : close if close >= 0 else None].strip():
                raise ValueError("there is text after the JSON object")
            yield _as_call(value)
        except ValueError as e:
            close = text.find(end, at)
            yield _malformed(e)
        at = close + len(end) if close >= 0 else len(text)


def _llama_calls(text: str) -> Iterator[Call]:
    before, tag, body = text.partition("<|python_tag|>")
    body = (body if tag else before).strip()
    if not body.startswith("{"):
        if tag:  # the code interpreter's form
            yield Call("python", {"code": body})
        return
    at = 0
    while at < len(body):
        start = at
        try:
            value, at = _read_json(body, start)
            if tag or _is_call(value):
                yield _as_call(value)
        except ValueError as e:
            if tag or _LOOKS_LIKE_CALL.search(body, start):
                yield _malformed(e)
            return
        at = _BETWEEN.match(body, at).end()


def _block_calls(text: str) -> Iterator[Call]:
    for block in _BLOCK.finditer(text):
        try:
            value, after = _read_json(block[1], 0)
            if block[1][after:].strip():
                raise ValueError("there is text after the JSON object")
            for each in value if isinstance(value, list) else [value]:
                if _is_call(each):
                    yield _as_call(each)
        except ValueError as e:
            if _LOOKS_LIKE_CALL.search(block[1]):
                yield _malformed(e)


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value from there on, and its end; ValueError with a short reason."""
    start = _BLANKS.match(text, at).end()
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as e:
        raise ValueError(f"invalid JSON: {e.msg} at character {e.pos - start + 1}") from None
    except RecursionError:
        raise ValueError("invalid JSON: nested too deep") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"invalid JSON: {name}")


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and ("name" in value or "function" in value)


def _as_call(value: Any) -> Call:
    """Reads {"name", "arguments" or "parameters"}, also as "function" of an object."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('a call must be a JSON object with a text as "name"')
    key = "parameters" if "parameters" in value else "arguments"
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        raise ValueError(f"{json.dumps(key)} must be a JSON object")
    return Call(value["name"], arguments)


def _malformed(reason: ValueError | str) -> Call:
    return Call("", {}, f"the call cannot be read: {reason}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # strict, as vLLM's parsers are
_FORMATS = {
    "hermes": (
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>',
        _hermes_calls,
    ),
    "llama3": ('{"name": "NAME", "parameters": {"ARGUMENT": VALUE}}', _llama_calls),
    "json": ('```json\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n```', _block_calls),
}
