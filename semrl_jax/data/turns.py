"""Token ids of a conversation over several turns, in which the policy's own ids are kept.

Nothing that the policy wrote is tokenised again. What others wrote is tokenised once, with the text
that the chat template puts between two messages of the policy. This text is found by difference: a
conversation is rendered with a placeholder for the message, once up to it and once up to the next
one, and the first rendering must be the beginning of the second. A template that changes earlier
messages when others follow is refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.data.chat_templates import TemplateError, render_chat
from semrl_jax.data.templates import chat_template_text
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.choices import TOKEN_IDS
from semrl_jax.support.errors import UserError

PLACEHOLDER = "x"
# Own messages that templates are known to change: without thinking, without blanks at the ends.
_THOUGHT, _BLANKS = "<think>\na\n</think>\n\nb", " \na \n"
# A control token in others' text becomes a character of this plane while the template is rendered.
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


class Transcript(NamedTuple):
    """A conversation up to the place where the policy's next message begins."""

    # With a placeholder for each message of the policy, and marks for control tokens
    messages: tuple[Mapping[str, str], ...]
    text: str  # as the template renders them

    @property
    def is_of_ids(self) -> bool:
        """Whether others write token ids, in which the policy's own ids are never repeated."""
        return _is_of_ids(self.messages)


class Continued(NamedTuple):
    """A transcript after a message of the policy and an answer; or the error of the template."""

    transcript: Transcript | None
    token_ids: list[int]  # of all text between the policy's message and its next one
    error: str = ""


class ChatTurns:
    """Tokenises what others write in a conversation.

    Control tokens that are written out in others' text, such as <|im_end|>, become the tokens of
    their characters, so that a text cannot end its own message. Others' text includes the
    descriptions of tools. Messages with the role `TOKEN_IDS` are taken as they are.

    Args:
      tokenizer: has a chat template.
      end_token_ids: that end a message of the policy.
      tools: JSON schemas of the tools that the chat template describes.

    Raises:
      UserError: if it has no chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "an environment needs a chat template; give model.path a chat_template.jinja."
            )
        self._tokenizer = tokenizer
        self._ends = frozenset(end_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        self._controls = sorted(
            str(token) for i, token in added if token.special or i in self._ends
        )
        self._tools = self._marked(tools)

    def begun(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[Continued]:
        """Transcripts of prompts, with the token ids of each."""
        texts = (each for each in conversations if not _is_of_ids(each))
        marked = [tuple(map(self._marked, messages)) for messages in texts]
        rendered = zip(marked, self._rendered(marked), strict=True)
        begun = (
            Continued(None, [], str(found))
            if isinstance(found, TemplateError)
            else Continued(Transcript(messages, found), self._encoded(found))
            for messages, found in rendered
        )
        return [self._given(each) if _is_of_ids(each) else next(begun) for each in conversations]

    def ended(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        """Token ids of whole conversations, which nobody continues; TemplateError if refused."""
        marked = [tuple(map(self._marked, messages)) for messages in conversations]
        found = self._rendered(marked, is_open=False)
        if failed := [each for each in found if isinstance(each, TemplateError)]:
            raise failed[0]
        return list(map(self._encoded, found))

    def continued(
        self,
        transcripts: Sequence[Transcript],
        answers: Sequence[Sequence[Mapping[str, str]]],
        last_tokens: Sequence[int],
    ) -> list[Continued]:
        """The transcripts after a message of the policy each, and an answer to it.

        If the policy's last token ends a message, the template's own end token is left out: Llama 3
        ends a call with <|eom_id|>, others with <|eot_id|>.
        """
        asked = [*zip(transcripts, answers, last_tokens, strict=True)]
        texts = iter(self._continued([each for each in asked if not _is_of_ids(each[1])]))
        return [self._given(each[1]) if _is_of_ids(each[1]) else next(texts) for each in asked]

    def _continued(
        self, asked: Sequence[tuple[Transcript, Sequence[Mapping[str, str]], int]]
    ) -> list[Continued]:
        longer = [
            (*before.messages, _own(PLACEHOLDER), *map(self._marked, answer))
            for before, answer, _ in asked
        ]
        found = []
        rendered = self._rendered(longer)
        for (before, _, last), messages, text in zip(asked, longer, rendered, strict=True):
            if isinstance(text, TemplateError):
                found.append(Continued(None, [], str(text)))
                continue
            between = _after(before.text, PLACEHOLDER, text)
            if between is None:
                found.append(Continued(None, [], "the chat template rewrites earlier messages"))
                continue
            ids = self._encoded(between)
            if ids and ids[0] in self._ends and last in self._ends:
                del ids[0]
            if ids:
                found.append(Continued(Transcript(messages, text), ids))
            else:
                found.append(Continued(None, [], "the chat template writes nothing between turns"))
        return found

    def _given(self, messages: Sequence[Mapping[str, str]]) -> Continued:
        """What is continued with token ids, which may have been truncated."""
        try:
            ids = [int(i) for message in messages for i in json.loads(message["content"])]
        except (TypeError, ValueError, OverflowError, RecursionError):
            reason = "its token ids are no list; environment.max_observation_chars may be too small"
            return Continued(None, [], reason)
        if not ids or not 0 <= min(ids) <= max(ids) < len(self._tokenizer):
            return Continued(None, [], "its token ids are none, or not all in the vocabulary")
        return Continued(Transcript(tuple(messages), self._tokenizer.decode(ids)), ids)

    def check(
        self, messages: Sequence[Mapping[str, str]], answer: Sequence[Mapping[str, str]]
    ) -> list[str]:
        """UserError if the template changes the policy's messages; returns lines for the user."""
        if _is_of_ids(messages):
            return []
        first = tuple(map(self._marked, messages))
        reply = tuple(map(self._marked, answer))
        probes = (PLACEHOLDER, f"{PLACEHOLDER} y.", _THOUGHT, _BLANKS)
        later = [(*first, _own(text), *reply) for text in probes]
        twice = (*later[0], _own(PLACEHOLDER), *reply)
        before, *rendered, last = self._rendered([first, *later, twice])
        way_out = (
            "give the directory of model.path a chat_template.jinja that writes every message as "
            "it is, or choose an environment with other messages"
        )
        for text in (before, *rendered, last):
            if isinstance(text, TemplateError):
                roles = ", ".join(message["role"] for message in (*messages, *answer))
                raise UserError(
                    f"the tokenizer's chat template refuses messages of the environment ({roles}: "
                    f"{' '.join(str(text).split()):.200}); {way_out}."
                )
        plain, other, thought, blanks = (
            _after(before, probe, text) for probe, text in zip(probes, rendered, strict=True)
        )
        if plain is None or _after(rendered[0], PLACEHOLDER, last) is None:
            raise UserError(
                "the tokenizer's chat template rewrites earlier messages when others follow, so "
                f"the policy's own tokens would not be its context; {way_out}."
            )
        stripped = blanks != plain
        if stripped:
            blanks = _after(before, _BLANKS.strip(), rendered[-1])
        if not other == thought == blanks == plain:
            what = "thinking" if other == blanks == plain else "words"
            raise UserError(
                f"the tokenizer's chat template removes {what} from earlier messages of the policy,"
                " which keeps its own tokens as context: it would be trained on conversations that "
                f"the template never writes; {way_out}."
            )
        if not plain:
            raise UserError(
                f"the tokenizer's chat template writes nothing between two messages; {way_out}."
            )
        if not stripped:
            return []
        return [
            "the tokenizer's chat template strips blanks at the ends of earlier messages; the "
            "policy keeps its own tokens, with these blanks"
        ]

    def _marked(self, value: Any) -> Any:
        """A message or schema with marks in all its texts: a template may write any of them."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(each) for key, each in value.items()}
        return [*map(self._marked, value)] if isinstance(value, list | tuple) else value

    def _marked_text(self, text: str) -> str:
        text = _MARKS.sub("\ufffd", text)
        if not self._controls:
            return text
        return self._pattern.sub(
            lambda found: chr(_FIRST_MARK + self._controls.index(found[0])), text
        )

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _rendered(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], is_open: bool = True
    ) -> list[str | TemplateError]:
        """Their texts; `is_open`: up to the place where the policy's next message begins."""
        template = chat_template_text(self._tokenizer, self._tools)

        def render(conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
            asked = [(messages, is_open) for messages in conversations]
            rendered = render_chat(self._tokenizer, template, asked, tools=self._tools)
            return [each.text for each in rendered]

        try:
            return [*render(conversations)]
        except TemplateError as error:
            if len(conversations) == 1:
                return [error]
            return [found for each in conversations for found in self._rendered([each], is_open)]

    def _encoded(self, text: str) -> list[int]:
        """Token ids of a rendered text, in which marks stand for control tokens as text."""
        ids: list[int] = []
        start = 0
        for mark in _MARKS.finditer(text):
            ids += self._ids(text[start : mark.start()])
            ids += self._as_text(self._controls[ord(mark[0]) - _FIRST_MARK])
            start = mark.end()
        return ids + self._ids(text[start:])

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer([text], add_special_tokens=False)["input_ids"][0] if text else []

    def _as_text(self, control: str) -> list[int]:
        """Ids of the characters of a control token."""
        found = self._tokenizer([control], add_special_tokens=False, split_special_tokens=True)
        ids = found["input_ids"][0]
        if not self._control_ids.isdisjoint(ids):  # it is not special for the tokenizer
            ids = [i for character in control for i in self._ids(character)]
        return ids

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.convert_tokens_to_ids(self._controls))


def _is_of_ids(messages: Sequence[Mapping[str, str]]) -> bool:
    return bool(messages) and messages[0]["role"] == TOKEN_IDS


def _own(text: str) -> Mapping[str, Any]:
    return {"role": "assistant", "content": text}


def _after(before: str, own: str, text: str) -> str | None:
    """What follows the policy's message in a text that begins with `before`, but for blanks."""
    if not text.startswith(before):
        return None
    begin = text.find(own, len(before))
    if begin < 0 or text[len(before) : begin].strip():
        return None
    return text[begin + len(own) :]
