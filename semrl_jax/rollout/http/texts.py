"""Prompts and responses as texts: the chat template, tool calls, and text while it is sampled."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from typing import Any

from semrl_jax.data.stop_strings import TokenBytes, before_stop, stop_text
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.data.turns import ChatTurns
from semrl_jax.environments.tools.formats import ToolFormat, choose_format
from semrl_jax.environments.tools.functions import Answer
from semrl_jax.support.choices import TOKEN_IDS
from semrl_jax.support.safe_files import parse_json


class Texts:
    """The tokenizer of the policy, and its chat template."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.end_token_ids = tuple(end_token_ids)
        self.bytes = TokenBytes(tokenizer)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """The token ids of a text, which may have control tokens."""
        return self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The prompt of a conversation, up to the place where the assistant's message begins.

        Control tokens that a message writes out stay text. Raises ValueError if there is no chat
        template, or it refuses the messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; take /v1/completions.")
        messages, form = [_as_templates_take(each) for each in messages], self._form(tools)
        if form and not form.in_template:
            messages, tools = form.told([_as_text(each, form) for each in messages], tools), ()
        (begun,) = ChatTurns(self.tokenizer, self.end_token_ids, tools).begun([messages])
        if begun.error:
            reason = " ".join(begun.error.split())[:200]
            raise ValueError(f"messages: the chat template refuses them ({reason}).")
        return begun.token_ids

    def text(self, ids: Sequence[int], stop_strings: Sequence[str] = ()) -> str:
        """A response without special tokens, up to its stop string."""
        return before_stop(stop_text(self.tokenizer, ids), stop_strings)

    def tool_calls(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The calls in a response, as a message has them; those that cannot be read are left out.

        Their text is then the message's.
        """
        form = self._form(tools)
        calls = form.parse(self.tokenizer.decode(ids)) if form else []
        if any(call.error for call in calls):
            return []
        return [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]

    def _form(self, tools: Sequence[Mapping[str, Any]]):
        return choose_format(self.tokenizer.chat_template, field="tools") if tools else None


class StreamedText:
    """The text that each further token adds, once it is sure.

    A character whose bytes are not complete waits, and what may be the begin of a stop string.
    """

    def __init__(self, texts: Texts, stop_strings: Sequence[str]):
        self._texts, self._stop_strings = texts, stop_strings
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held, self._is_first = "", True

    def add(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        data = b"".join(map(self._texts.bytes.__getitem__, token_ids))
        if self._is_first and data.startswith(b" "):  # which some decoders strip
            data = data[not self._texts.text(token_ids).startswith(" ") :]
        self._is_first &= not data
        text = self._held + self._decoder.decode(data, is_last)
        if is_last:
            return before_stop(text, self._stop_strings)
        sure = before_stop(text, self._stop_strings)
        if len(sure) == len(text):
            sure = text[: len(text) - _overlap(text, self._stop_strings)]
        self._held = text[len(sure) :]
        return sure


def _overlap(text: str, stop_strings: Sequence[str]) -> int:
    """The length of the longest end of a text with which a stop string begins."""
    longest = max(map(len, stop_strings), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stop_strings):
            return count
    return 0


def _as_templates_take(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's form: text parts joined, arguments of calls as objects."""
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content", "")
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("messages: only parts of type 'text' are supported.")
        content = "".join(str(part.get("text", "")) for part in content)
    message["content"] = content
    if message["role"] == TOKEN_IDS:  # which may be control tokens
        raise ValueError(f"messages: a chat has no role {TOKEN_IDS!r}; take /v1/completions.")
    if message["role"] == "developer":  # OpenAI's newer name of it, which most templates ignore
        message["role"] = "system"
    for call in message.get("tool_calls", ()):
        function = call.get("function")
        if not isinstance(function, dict):
            raise ValueError("messages: a tool call must have an object as 'function'.")
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = parse_json((function["arguments"] or "{}").encode())
            except ValueError:
                raise ValueError("messages: a tool call's arguments must be JSON.") from None
    return message


def _as_text(message: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """A message for a template that knows no tools: calls and answers in the form's own texts."""
    if message["role"] == "tool":
        return form.messages([Answer(message["content"])])[0]
    calls = [
        f"```json\n{json.dumps(each['function'])}\n```" for each in message.get("tool_calls", ())
    ]
    return {
        "role": message["role"],
        "content": "\n".join(filter(None, (message["content"], *calls))),
    }
