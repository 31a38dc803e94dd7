"""Episodes of an environment in the terminal: each turn appears when it is written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from semrl_jax import data
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.jobs.chat import asked, figures, lines_of, next_line, open_talk, printable
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs.policies import PolicySource
from semrl_jax.sampling.environment_tasks import first_answers, held_out_tasks
from semrl_jax.sampling.episodes import Ask, Episodes
from semrl_jax.sampling.prompt_sources import check_prompts
from semrl_jax.sampling.requests import GENERATION, Draw, stream_seed
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import compilation
from semrl_jax.support.clock import Clock
from semrl_jax.support.console import Reporter
from semrl_jax.types import Rollout, SampleRequest

MAX_TASKS = 100
HELP = "an empty line plays the next task, a number this task; /quit or Ctrl-D ends"


def play(
    config: ml_collections.ConfigDict, source: PolicySource, lines: Callable[[], str] | None = None
) -> int:
    """Plays held-out tasks of `environment.name`, the first one at once, until there is no line.

    `lines` gives the next one, or raises EOFError; None: lines of standard input. Returns 0;
    UserError for a wrong setting, environment, policy or replica.
    """
    reporter = Reporter()
    config = source.of_model(config)
    name = config.environment.name
    with contextlib.ExitStack() as stack:
        stack.enter_context(compilation.watching(reporter.line))
        policy, tokenizer = build_policy(config)
        environments = stack.enter_context(EnvironmentPools(config.environment, [name]))
        count = min(config.evaluation.num_problems, MAX_TASKS)
        tasks = held_out_tasks(environments[name], count, tokenizer, reporter.line)
        vocab_size = policy.config.vocab_size
        check_prompts("evaluation", tasks, config, tokenizer, vocab_size, reporter.line)
        for line in first_answers(tasks, tokenizer, environments):
            reporter.line(line)
        inference, measuring = stack.enter_context(
            open_talk(config, source, policy, tokenizer, reporter, environments)
        )
        sampler = inference.sampler
        sampler.episodes = Shown(sampler.episodes, tokenizer, reporter.line)
        reporter.line(HELP)
        limit = config.rollout.max_prompt_tokens
        for number, place in enumerate(_places(lines or next_line, len(tasks), reporter)):
            task = tasks[place]
            reporter.line(f"--- task {place}")
            if len(task.prompt_ids) > limit:
                reporter.notice(
                    f"not played: the prompt has {len(task.prompt_ids)} tokens, more than "
                    f"rollout.max_prompt_tokens={limit}; start with a larger --max_prompt_tokens."
                )
                continue
            seed = stream_seed(config.seed, GENERATION, place, number)
            prompt = number, task.prompt_ids, seed, task.columns
            reporter.line(ending(*asked(inference, measuring, *prompt)))
    return 0


@dataclasses.dataclass(frozen=True)
class Shown:
    """Episodes of a single request, of which every message is printed when it is there."""

    episodes: Episodes
    tokenizer: Any
    print: Callable[[str], None]

    is_divisible = False

    @property
    def counters(self) -> Mapping[str, int]:
        return self.episodes.counters

    def play(self, draw: Draw, ask: Ask, clock: Clock) -> Iterator[Rollout]:
        shown = turn = 0

        def ask_and_print(requests: Sequence[SampleRequest], **options: Any) -> Iterator[Rollout]:
            nonlocal shown, turn
            (request,) = requests
            self._print("environment" if turn else "prompt", request.prompt_ids[shown:])
            with contextlib.closing(ask(requests, **options)) as answers:
                for rollout in answers:
                    turn += 1
                    self._print(f"policy, turn {turn}", rollout.response_ids)
                    shown = len(rollout.prompt_ids) + len(rollout.response_ids)
                    yield rollout

        return self.episodes.play(draw, ask_and_print, clock)

    def _print(self, who: str, ids: Sequence[int]) -> None:
        self.print(f"--- {who}")
        self.print(printable(data.full_text(self.tokenizer, ids)).strip("\n"))


def ending(scored: Scored, seconds: float) -> str:
    """The rewards of the turns, the score, and the figures of a response."""
    (item,) = scored
    rewards = ", ".join(f"{reward:g}" for reward in item.rollout.turn_rewards)
    error = f", {printable(item.verdict.error)}" if item.verdict.error else ""
    verdict = "correct" if item.verdict.correct else "wrong"
    return (
        f"[rewards {rewards}; score {item.verdict.score:g}, {verdict}{error}; "
        f"{figures(scored, seconds)}]"
    )


def _places(lines: Callable[[], str], count: int, reporter: Reporter) -> Iterator[int]:
    """The tasks to play: the first one, then those that the lines name."""
    place = 0
    yield place
    for line in lines_of(lines):
        is_number = line.isascii() and line.isdecimal() and len(line) < 10
        if line and not (is_number and int(line) < count):
            reporter.line(f"there are tasks 0 to {count - 1}; {HELP}")
            continue
        place = int(line) if line else (place + 1) % count
        yield place
