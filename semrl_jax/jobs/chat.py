"""A conversation with a policy: one question after the other, each response with its metrics."""

from __future__ import annotations

import contextlib
import math
import pathlib
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax import data, models
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.data.arithmetic import QUESTION_TEMPLATE
from semrl_jax.data.templates import STOP_STRINGS, prompt_renderer
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.jobs.inference import Inference, open_inference, open_measuring
from semrl_jax.jobs.sample import EXIT_PREEMPTED, GRACE_S
from semrl_jax.metrics.names import ORDERS
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs.policies import PolicySource
from semrl_jax.sampling.requests import GENERATION, Measuring, stream_seed
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import compilation
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.types import SampleRequest, distribution_of

EXIT_UNANSWERED = 2
HELP = "a line is a question; /new forgets the conversation, /quit or Ctrl-D ends"
SHORT_NAMES = {
    "effective_rank": "ER",
    "effective_rank_velocity": "ERV",
    "effective_rank_acceleration": "ERA",
}


class Options(NamedTuple):
    """How questions become prompts."""

    # See data.template; "" chooses the template of the run's task, or the tokenizer's chat
    # template if it has one, or "plain"
    template: str = ""
    # Whether a prompt has the questions and responses before it; None: with the chat template
    multi_turn: bool | None = None


def chat(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    options: Options,
    questions: Callable[[], str] | None = None,
) -> int:
    """Answers questions until there are no more; returns 0, or 2 if one of a file had no response.

    UserError for a wrong setting, policy or replica. `config.model.path` and `data.template` are
    not read. `questions` gives the next one, or raises EOFError; None: lines of standard input.
    """
    reporter = Reporter()
    config = source.of_model(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compilation.watching(reporter.line))
        policy, tokenizer = build_policy(config)
        template = options.template or own_template(config, tokenizer)
        prompt_renderer(template, tokenizer, system_prompt=config.data.system_prompt)  # its check
        config.evaluation.stop_strings = tuple(
            config.evaluation.stop_strings or STOP_STRINGS.get(template, ())
        )
        inference, measuring = stack.enter_context(
            open_talk(config, source, policy, tokenizer, reporter)
        )
        multi_turn = data.is_chat(template) if options.multi_turn is None else options.multi_turn
        conversation = Conversation(inference, template, multi_turn, measuring)
        added = config.data.add_special_tokens
        fields = "--template", "--config.data.add_special_tokens"
        reporter.line(data.template_line("prompts", template, tokenizer, added, fields))
        reporter.line(HELP)
        return talk(conversation, questions or next_line, reporter)


@contextlib.contextmanager
def open_talk(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    policy: models.Policy,
    tokenizer: Any,
    reporter: Reporter,
    environments: EnvironmentPools | None = None,
) -> Iterator[tuple[Inference, Measuring | None]]:
    """What answers one request at a time with the weights of a policy, and what measures it."""
    with contextlib.ExitStack() as stack:
        measuring = open_measuring(config, policy, stack)
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="semrl-chat-"))
        inference = stack.enter_context(
            open_inference(
                config,
                policy,
                tokenizer,
                pathlib.Path(directory),
                run_id=secrets.token_hex(8),
                num_requests=1,
                reporter=reporter,
                stop=StopRequest(GRACE_S, EXIT_PREEMPTED),  # not installed: Ctrl-C ends the chat
                environments=environments,
            )
        )
        inference.load(source)
        reporter.line(f"{source.name}, temperature {config.evaluation.temperature:g}")
        yield inference, measuring


def own_template(config: ml_collections.ConfigDict, tokenizer: Any) -> str:
    """The template of a policy's task, or the one that fits its tokenizer."""
    if config.data.task == "arithmetic" and not config.data.files and is_of_the_task(tokenizer):
        return QUESTION_TEMPLATE
    return data.chosen_template(config.data.template, tokenizer)


def encoded_question(
    question: str,
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    template: str,
    turns: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The tokens of a prompt, as in training, after earlier `turns`; or UserError."""
    system_prompt = config.data.system_prompt
    render = prompt_renderer(template, tokenizer, system_prompt=system_prompt, shots=turns)
    prefix = data.special_prefix(tokenizer, template, config.data.add_special_tokens)
    (ids,) = data.encode(tokenizer, render([question]), prefix)
    return ids


def is_of_the_task(tokenizer: Any) -> bool:
    """Whether the tokenizer is the one of the built-in task."""
    return data.tokenizer_hash(tokenizer) == data.tokenizer_hash(data.character_tokenizer())


class Conversation:
    """Asks a policy; remembers the questions and responses if it has several turns."""

    def __init__(
        self, inference: Inference, template: str, multi_turn: bool, measuring: Measuring | None
    ):
        self._inference, self._template = inference, template
        self._multi_turn, self._measuring = multi_turn, measuring
        self._turns: list[tuple[str, str]] = []
        self._count = 0

    def forget(self) -> None:
        """Begins a new conversation."""
        self._turns.clear()

    def ask(self, question: str) -> tuple[Scored, float]:
        """The response and its seconds; UserError if the prompt is refused, empty or too long."""
        prompt_ids, config = self._prompt_ids(question), self._inference.config
        seed = stream_seed(config.seed, GENERATION, self._count, 0)
        scored, seconds = asked(self._inference, self._measuring, self._count, prompt_ids, seed)
        self._count += 1
        if self._multi_turn:
            self._turns.append((question, scored[0].response))
        return scored, seconds

    def _prompt_ids(self, question: str) -> np.ndarray:
        config, tokenizer = self._inference.config, self._inference.tokenizer
        ids = encoded_question(question, config, tokenizer, self._template, self._turns)
        limit = config.rollout.max_prompt_tokens
        if not ids:
            raise UserError("the prompt has no token; ask with words that the tokenizer knows.")
        if len(ids) > limit:
            turns = "; /new forgets the conversation so far" if self._turns else ""
            raise UserError(
                f"the prompt has {len(ids)} tokens, more than rollout.max_prompt_tokens={limit}; "
                f"ask something shorter, or start with --max_prompt_tokens={len(ids)}{turns}."
            )
        prompt_ids = np.array(ids, np.int32)
        vocab_size = self._inference.policy.config.vocab_size
        data.check_ids(tokenizer, vocab_size, [("the prompt", prompt_ids)])
        return prompt_ids


def asked(
    inference: Inference,
    measuring: Measuring | None,
    group: int,
    prompt_ids: Int[np.ndarray, " P"],
    seed: int,
    row: str = "",
) -> tuple[Scored, float]:
    """The response to one prompt, and the seconds that it took; `row` is of the prompt."""
    options = inference.config.evaluation
    started = time.monotonic()
    scored = inference.sampler.sample(
        [SampleRequest(f"chat/{group}", group, 0, prompt_ids, seed)],
        {group: ""},
        columns={group: row},
        measuring=measuring,
        stop_strings=options.stop_strings,
        arrived=lambda rollout: None,
        **distribution_of(options),
    )
    return scored, time.monotonic() - started


def talk(conversation: Conversation, questions: Callable[[], str], reporter: Reporter) -> int:
    """Prints the response to each question; returns the exit code."""
    code = 0
    for question in lines_of(questions):
        if not question:
            continue
        if question == "/new":
            conversation.forget()
            reporter.line("a new conversation")
        elif question.startswith("/"):
            reporter.line(HELP)
        else:
            try:
                scored, seconds = conversation.ask(question)
            except UserError as error:
                reporter.notice(f"no response: {' '.join(str(error).split())}")
                code = 0 if sys.stdin.isatty() else EXIT_UNANSWERED
                continue
            reporter.line(printable(scored[0].response) or "(an empty response)")
            reporter.line(f"[{figures(scored, seconds)}]")
    return code


def figures(scored: Scored, seconds: float) -> str:
    """Length, speed, how the response ended, mean log-probability and metrics."""
    rollout = scored[0].rollout
    sampled = rollout.rollout_logprobs[rollout.response_mask]
    mean = float(sampled.mean()) if len(sampled) else math.nan
    speed = rollout.num_policy_tokens / max(seconds, 1e-9)
    parts = [
        f"{rollout.num_policy_tokens} tokens",
        f"{speed:.0f} tokens/s" if speed >= 1000 else f"{speed:.3g} tokens/s",
        f"ended by {rollout.finish_reason}",
        f"mean log-probability {mean:.3f} nats",
    ]
    orders = list(ORDERS)
    found = sorted(
        scored.metrics.items(),
        key=lambda entry: (entry[0].layer, entry[0].name, orders.index(entry[0].order)),
    )
    for key, ((value,), (valid,)) in found:
        name = SHORT_NAMES.get(key.label, key.label)
        parts.append(f"{name} {value:.3g}" if valid else f"{name} too short")
    return ", ".join(parts)


def printable(text: str) -> str:
    """The text without control characters, which could change the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)


def lines_of(questions: Callable[[], str]) -> Iterator[str]:
    """What is written, up to /quit or the end of the input."""
    while True:
        try:
            question = questions().strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input is not text in {error.encoding}, which Python reads it as "
                f"({error.reason}); convert it, or set PYTHONIOENCODING to its encoding."
            ) from None
        try:
            question.encode()
        except UnicodeEncodeError:  # in the locale C, Python reads any byte, as a surrogate
            raise UserError("standard input is not UTF-8 text (invalid byte).") from None
        if question == "/quit":
            return
        yield question


def next_line() -> str:
    """A line of standard input; where that is no terminal, the question is printed too."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and keeps a history
        return input("> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    if line.strip():
        print(f"> {printable(line.strip())}", flush=True)
    return line
