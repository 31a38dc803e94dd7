"""Episodes with an environment: the policy and the environment write in turn."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax import data
from semrl_jax.data.turns import ChatTurns, Continued, Transcript
from semrl_jax.environments.journal import Place
from semrl_jax.environments.pool import Answer, EnvironmentPools, Episode
from semrl_jax.rollout.client.dispatch import split_into_calls
from semrl_jax.sampling.environment_tasks import chat_turns, opening_of
from semrl_jax.sampling.episodes import Ask
from semrl_jax.sampling.requests import Draw, stream_seed
from semrl_jax.sampling.splicing import cut, joined, with_context
from semrl_jax.settings.rollout import slots_of_replicas
from semrl_jax.support.clock import Clock
from semrl_jax.support.isolation import error_line
from semrl_jax.types import FinishReason, Rollout, SampleRequest


@dataclasses.dataclass(frozen=True, eq=False)
class MultiTurn:
    """Episodes in lanes: each call of the policy has the next turn of a lane's open episodes.

    The groups of a draw are dealt into lanes in their order. `num_lanes` of them are played turn by
    turn, each in its turn, so that the environments of one lane answer while the policy writes for
    another. Then the next lanes are played. The lanes that are played together have at most
    `max_open` episodes: engines keep the cache of each for its next turn.

    An episode ends
    - when the environment says so;
    - when the environment fails; its reward is then `rewards.failure_score`;
    - after `max_turns` turns; the last one is rewarded, and its answer is left out;
    - when a turn of the policy reaches `max_tokens`, the limit of all tokens of the episode. The
      environment does not get such a message: half a call of a tool must not run;
    - when an answer leaves no room for one more token. It is left out.
    In the last two cases the finish reason is "length", else the one of the policy's last turn. The
    rewards of all turns count. A prompt without an environment is answered in a single turn.

    An environment may begin further conversations. The policy sees one of them at a time, and the
    episode is the sequence of all their tokens, each with the number of its conversation.

    Equal draws give equal episodes, to the bit, by induction over the calls. Lanes and the first
    call follow from the draw. After n equal calls the policy's tokens are equal, since an engine
    rounds by the contents of its calls alone (rollout/engines/keeping.py). The environment's answer
    to each episode follows from its task, seed and messages, and so do the next turn's tokens and
    seed, and each lane's open episodes. The lane of call n + 1 follows from the lanes' order; it
    waits for all its answers and asks in the order of the draw. Time decides only in what order
    episodes of one call end, which no result depends on. The exceptions are a call of the
    environment beyond `environment.timeout_s`, and an environment that keeps no promise.
    """

    environments: EnvironmentPools
    turns: Mapping[str, ChatTurns]  # by environment, whose tools the chat template may describe
    tokenizer: Any
    end_token_ids: frozenset[int]  # tokens that end a message; they are no part of its text
    max_turns: int
    max_tokens: int
    num_lanes: int = 1
    max_open: int | None = None  # None: no limit

    is_divisible = False

    @classmethod
    def of(
        cls,
        config: ml_collections.ConfigDict,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        environments: EnvironmentPools,
    ) -> MultiTurn:
        """The episodes of a config that has environments."""
        rollout = config.rollout
        stop_words = data.stop_word_ids(tokenizer, rollout.stop_words)
        return cls(
            environments=environments,
            turns={
                name: chat_turns(tokenizer, environments[name], end_token_ids)
                for name in environments
            },
            tokenizer=tokenizer,
            end_token_ids=frozenset((*end_token_ids, *rollout.stop_token_ids, *stop_words)),
            max_turns=config.environment.max_turns,
            max_tokens=rollout.max_response_tokens,
            num_lanes=config.environment.num_lanes,
            max_open=slots_of_replicas(rollout),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        return self.environments.counters

    def play(self, draw: Draw, ask: Ask, clock: Clock) -> Iterator[Rollout]:
        lanes = self._dealt(draw.requests)
        for first in range(0, len(lanes), self.num_lanes):
            with contextlib.ExitStack() as stack:
                together = lanes[first : first + self.num_lanes]
                playing = [self._opened(draw._replace(requests=lane), stack) for lane in together]
                for turn in range(self.max_turns + 1):
                    for i, lane in enumerate(playing):
                        if turn:
                            with clock("environment_wait"):
                                over = [one.take_answer() for one in lane]
                            lane = yield from self._continued(lane, over, turn)
                        playing[i] = yield from self._asked(lane, turn, ask)

    def _dealt(self, requests: Sequence[SampleRequest]) -> list[list[SampleRequest]]:
        """Lanes of whole groups; as few as `max_open` permits, of about equal sizes."""
        sizes = collections.Counter(request.group_id for request in requests)
        if not sizes:
            return []
        most = len(sizes)  # groups of a lane
        if self.max_open is not None:
            most = max(self.max_open // (self.num_lanes * max(sizes.values())), 1)
        num_rounds = -(-len(sizes) // (self.num_lanes * most))
        return split_into_calls(requests, -(-len(sizes) // (self.num_lanes * num_rounds)))

    def _opened(self, draw: Draw, stack: contextlib.ExitStack) -> list[_Played]:
        """All episodes of a draw; the stack ends them. The policy need not wait for them."""
        openings = {group: opening_of(row) for group, row in draw.columns.items()}
        played = []
        for request in draw.requests:
            opening, one = openings.get(request.group_id), _Played(request)
            if opening is not None:
                place = Place(draw.step, request.sample_id)
                one.environment = self.environments.open(opening, place)
                one.turns = self.turns[opening.environment]
                stack.callback(one.environment.end)
            played.append(one)
        for turns, ones in _by_turns(one for one in played if one.environment is not None):
            groups = dict.fromkeys(one.request.group_id for one in ones)
            begun = turns.begun([openings[group].messages for group in groups])
            by_group = dict(zip(groups, begun, strict=True))
            for one in ones:
                first = by_group[one.request.group_id].transcript
                one.conversations[0] = _Conversation(first, [one.request.prompt_ids])
        return played

    def _asked(
        self, playing: Sequence[_Played], turn: int, ask: Ask
    ) -> Generator[Rollout, None, list[_Played]]:
        """Asks for one turn of each; yields those that end, and returns the others in order."""
        if not playing:
            return []
        by_id = {one.request.sample_id: one for one in playing}
        requests = [one.next_request(turn) for one in playing]
        # An answer that is too long for its own episode loses its end. All other tokens are the
        # same as with a limit of its own.
        room = max(self.max_tokens - one.num_tokens for one in playing)
        keep = turn + 1 < self.max_turns and any(one.environment for one in playing)
        with contextlib.closing(ask(requests, max_tokens=room, keep=keep)) as answers:
            for rollout in answers:
                one = by_id.pop(rollout.sample_id)
                reason = one.add(rollout, self.max_tokens)
                if one.environment is None:
                    yield one.so_far
                elif reason == "length":
                    one.rewards += [0.0] * one.is_own
                    yield one.ended("length")
                else:
                    one.answer = one.environment.step(self._said(one, rollout))
        return [one for one in playing if one.answer is not None]

    def _continued(
        self, playing: Sequence[_Played], over: Sequence[bool], turn: int
    ) -> Generator[Rollout, None, list[_Played]]:
        """Goes on with answers; yields episodes that end, also if `over`; returns the others."""
        going = []
        for one, is_over in zip(playing, over, strict=True):
            if is_over:
                yield one.ended()
            elif turn == self.max_turns:
                one.environment.count("out of turns")
                yield one.ended()
            else:
                going.append(one)
        texts: dict[_Played, Continued] = {}
        for turns, ones in _by_turns(going):
            known = [one for one in ones if one.current in one.conversations]
            found = turns.continued(
                [one.conversation.transcript for one in known],
                [one.messages for one in known],
                [int(one.conversation.token_ids[-1][-1]) for one in known],
            )
            texts.update(zip(known, found, strict=True))
            new = [one for one in ones if one.current not in one.conversations]
            texts.update(zip(new, turns.begun([one.messages for one in new]), strict=True))
        open_ones = []
        for one in going:
            text = texts[one]
            if text.error:
                one.error = error_line("invalid", text.error)
                one.environment.count("invalid")
                yield one.ended()
            elif one.num_tokens + len(text.token_ids) >= self.max_tokens:
                yield one.ended("length")
            else:
                one.go_on(text)
                open_ones.append(one)
        return open_ones

    def _said(self, one: _Played, rollout: Rollout) -> str:
        """What the environment reads of a turn."""
        ids = rollout.response_ids
        if one.conversation.transcript.is_of_ids:
            # Nine digits are exact for float32.
            logprobs = [float(f"{value:.9g}") for value in rollout.rollout_logprobs.tolist()]
            return json.dumps({"token_ids": ids.tolist(), "logprobs": logprobs})
        ids = ids[:-1] if int(ids[-1]) in self.end_token_ids else ids
        return data.full_text(self.tokenizer, ids)


def _by_turns(played: Iterable[_Played]) -> Iterable[tuple[ChatTurns, list[_Played]]]:
    """The episodes of each kind of turns, which are rendered together."""
    found: dict[ChatTurns, list[_Played]] = {}
    for one in played:
        found.setdefault(one.turns, []).append(one)
    return found.items()


@dataclasses.dataclass(eq=False)
class _Conversation:
    """What the policy sees of an episode."""

    transcript: Transcript  # up to the policy's next turn
    token_ids: list[Int[np.ndarray, " _"]]  # of all up to there, in parts


@dataclasses.dataclass(eq=False)
class _Played:
    """An episode that is being played."""

    request: SampleRequest
    environment: Episode | None = None  # None if the prompt has none
    turns: ChatTurns | None = None
    conversations: dict[int, _Conversation] = dataclasses.field(default_factory=dict)
    current: int = 0  # the conversation of the policy's next turn
    numbers: list[Int[np.ndarray, " _"]] = dataclasses.field(default_factory=list)  # see Rollout
    so_far: Rollout | None = None  # all turns
    rewards: list[float] = dataclasses.field(default_factory=list)
    answer: Future[Answer] | None = None  # of the environment, which is awaited
    messages: Sequence[Mapping[str, str]] = ()  # of its last answer
    is_own: bool = True  # whether the policy's next message is trained on
    error: str = ""
    seconds: float = 0.0
    verdicts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def num_tokens(self) -> int:
        return 0 if self.so_far is None else len(self.so_far.response_ids)

    @property
    def conversation(self) -> _Conversation:
        return self.conversations[self.current]

    def next_request(self, turn: int) -> SampleRequest:
        if self.so_far is None:
            return self.request
        return dataclasses.replace(
            self.request,
            prompt_ids=np.concatenate(self.conversation.token_ids),
            seed=stream_seed(self.request.seed, turn),
        )

    def add(self, rollout: Rollout, max_tokens: int) -> FinishReason:
        """Adds a turn of the policy, within the limit of the episode; returns why it ended."""
        room = max_tokens - self.num_tokens
        if len(rollout.response_ids) > room:
            rollout = cut(rollout, room, "length")
        if self.so_far is None:  # the first message is always its own
            self.so_far = rollout
        elif self.is_own:
            self.so_far = joined(self.so_far, rollout)
        else:
            self.so_far = with_context(self.so_far, rollout.response_ids)
        if self.environment is not None:
            self._follow(rollout.response_ids)
        return rollout.finish_reason

    def go_on(self, text: Continued) -> None:
        """Adds what the environment wrote."""
        ids = np.array(text.token_ids, np.int32)
        if self.current not in self.conversations:
            self.conversations[self.current] = _Conversation(text.transcript, [])
        self.conversation.transcript = text.transcript
        self.so_far = with_context(self.so_far, ids)
        self._follow(ids)

    def _follow(self, token_ids: Int[np.ndarray, " _"]) -> None:
        self.conversation.token_ids.append(token_ids)
        self.numbers.append(np.full(len(token_ids), self.current, np.int32))

    def take_answer(self) -> bool:
        """Waits for the environment; returns whether the episode is over."""
        turn, error, seconds, verdicts = self.answer.result()
        self.answer = None
        self.rewards += [0.0] * self.is_own
        self.is_own = turn.is_own
        given = turn.reward if isinstance(turn.reward, list) else [turn.reward]
        for place, reward in enumerate(given, len(self.rewards) - len(given)):
            self.rewards[place] += reward
        self.messages, self.error, self.current = turn.messages, error, turn.conversation
        self.seconds += seconds
        self.verdicts.update(verdicts)
        return turn.done

    def ended(self, reason: FinishReason | None = None) -> Rollout:
        """The whole episode; ends the environment."""
        self.environment.end()
        return dataclasses.replace(
            self.so_far,
            conversations=np.concatenate(self.numbers) if len(self.conversations) > 1 else None,
            finish_reason=reason or self.so_far.finish_reason,
            turn_rewards=np.array(self.rewards, np.float32),
            environment_error=self.error,
            environment_s=self.seconds,
            verdicts={name: float(self.verdicts[name]) for name in self.environment.verdicts},
        )
