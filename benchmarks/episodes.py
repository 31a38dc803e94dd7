"""Episodes of 4 turns compared with single responses of as many tokens, and with an ideal schedule.

    python -m benchmarks.episodes --model=SmolLM2-135M

64 responses, 8 to each prompt: 256 tokens at once, or 4 turns of 64 tokens with an environment that
answers. No token ends a turn, so every side samples as many tokens. Sides alternate in order.

- `kept`: a turn continues from the cache of the turn before, as in a run.
- `prefilled`: every turn computes its whole prompt again, as with `rollout.groups_per_call`.
- `N lanes`: with tools that take 0 to 2 s each, as the message says. The ideal schedule takes as
  long as the episodes with tools that answer at once, or as the tools of the slowest episode.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import results
from benchmarks.results import median_interval, table
from configs import default
from semrl_jax import data, models
from semrl_jax.data.turns import ChatTurns
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.sampling.environment_tasks import COLUMN
from semrl_jax.sampling.multi_turn import MultiTurn
from semrl_jax.sampling.requests import Draw
from semrl_jax.support.clock import Clock
from semrl_jax.types import Rollout, SampleRequest, SamplingParams, WeightVersion

GROUPS, GROUP = 8, 8
TURNS, TOKENS = 4, 64


@dataclasses.dataclass(frozen=True)
class Bench:
    """A replica with weights, and the tokenizer of its model."""

    client: RolloutClient
    version: WeightVersion
    tokenizer: object
    seed: int = 0

    def ask(self, requests, *, max_tokens: int = TOKENS, keep: bool = False) -> Iterator[Rollout]:
        """Responses of exactly `max_tokens` tokens."""
        sampling = SamplingParams(max_tokens)
        for rollout in self.client.generate(requests, sampling, version=self.version, keep=keep):
            yield dataclasses.replace(rollout, finish_reason="stop")

    def draw(self, environments: EnvironmentPools) -> Draw:
        turns = ChatTurns(self.tokenizer, ())
        (name,) = environments
        openings = environments[name].openings(self.seed, GROUPS)
        prompts = turns.begun([opening.messages for opening in openings])
        requests = [
            SampleRequest(
                f"{group}/{sample}", group, sample, np.array(prompt.token_ids, np.int32),
                seed=1000 * group + sample,
            )
            for group, prompt in enumerate(prompts)
            for sample in range(GROUP)
        ]  # fmt: skip
        columns = {
            group: json.dumps({COLUMN: opening._asdict()}) for group, opening in enumerate(openings)
        }
        return Draw(requests, {}, columns)

    def single(self, environments: EnvironmentPools) -> float:
        """Seconds of single responses."""
        draw, began = self.draw(environments), time.monotonic()
        found = list(self.ask(draw.requests, max_tokens=TURNS * TOKENS))
        assert all(len(rollout.response_ids) == TURNS * TOKENS for rollout in found)
        return time.monotonic() - began

    def episodes(
        self, environments: EnvironmentPools, num_lanes: int = 1, keep: bool = True
    ) -> tuple[float, float]:
        """Seconds of all episodes, and of the tools in the slowest episode."""
        draw, ends = self.draw(environments), (self.tokenizer.eos_token_id,)
        turns = {name: ChatTurns(self.tokenizer, ends) for name in environments}
        episodes = MultiTurn(
            environments, turns, self.tokenizer, frozenset(ends), TURNS, max_tokens=2**20,
            num_lanes=num_lanes,
        )  # fmt: skip

        def ask(requests, **options) -> Iterator[Rollout]:
            options["keep"] &= keep
            return self.ask(requests, **(options | {"max_tokens": TOKENS}))

        began = time.monotonic()
        found = list(episodes.play(draw, ask, Clock()))
        seconds = time.monotonic() - began
        assert all(rollout.num_policy_tokens == TURNS * TOKENS for rollout in found)
        assert not any(rollout.environment_error for rollout in found)
        self.client.release()
        return seconds, max(rollout.environment_s for rollout in found)


@contextlib.contextmanager
def bench(model: pathlib.Path) -> Iterator[Bench]:
    """A replica of this process with the model's weights."""
    config = models.load_config(model)
    policy, params = models.Policy(config), models.load_params(model, config)
    engine = JaxEngine(policy, max_batch=GROUPS * GROUP, max_prompt_tokens=2048)
    local = LocalReplica(engine)
    with RolloutClient(local=local, run_id="benchmark", attempt_id="1") as client:
        tokenizer = data.load_tokenizer(model)
        version = client.sync_weights(
            models.tensor_specs(config, "float32"),
            lambda: (array for _, array in models.iterate_hf_tensors(params, config, "float32")),
            step=0,
        )
        yield Bench(client, version, tokenizer)


def tools(longest: float) -> EnvironmentPools:
    """Environments that all compute at the same time."""
    environment = default.get_config().environment
    environment.num_workers = GROUPS * GROUP
    name = f"benchmarks.slow_tools:SlowTools:longest={longest}"
    return EnvironmentPools(environment, [name])


def alternated(sides: dict[str, Callable], pairs: int) -> dict[str, list]:
    """What each side returns, by name; the first time of each compiles, and is left out."""
    found = {name: [] for name in sides}
    for number in range(pairs + 1):
        for name in [*sides][:: 1 if number % 2 else -1]:
            value = sides[name]()
            if number:
                found[name].append(value)
            print(f"{name}: {value}", flush=True)
    return found


def compared(found: dict[str, list[float]], base: str) -> list[list[str]]:
    """Rows: ratio of each side to the base, pair by pair, and seconds."""
    rows = []
    for name, seconds in found.items():
        ratios = [own / other for own, other in zip(seconds, found[base])]
        low, high, _ = median_interval(ratios)
        ratio = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
        rows.append([name, ratio, f"{statistics.median(seconds):.1f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--lanes", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of a tool")
    results.add_option(parser)
    arguments = parser.parse_args()
    with bench(arguments.model) as own:
        with tools(0.0) as quick:
            found = alternated(
                {
                    "single": lambda: own.single(quick),
                    "kept": lambda: own.episodes(quick)[0],
                    "prefilled": lambda: own.episodes(quick, keep=False)[0],
                },
                arguments.pairs,
            )
        text = table(["side", "time / single", "s"], compared(found, "single"))
        if arguments.lanes:
            with tools(0.0) as quick, tools(arguments.longest) as slow:
                sides = {"at once": lambda: own.episodes(quick)}
                for lanes in arguments.lanes:
                    sides[f"{lanes} lanes"] = lambda n=lanes: own.episodes(slow, n)
                    sides[f"{lanes} lanes, at once"] = lambda n=lanes: own.episodes(quick, n)
                timed = alternated(sides, arguments.pairs)
            ideal = [
                max(at_once[0], *(timed[f"{n} lanes"][i][1] for n in arguments.lanes))
                for i, at_once in enumerate(timed["at once"])
            ]
            seconds = {name: [each for each, _ in values] for name, values in timed.items()}
            text += "\n\n" + table(
                ["side", "time / ideal", "s"], compared({"ideal": ideal} | seconds, "ideal")
            )
    results.show("Episodes of several turns", text, arguments.json)


if __name__ == "__main__":
    main()
