"""Training steps of this project: an embedded JAX replica, and every part of launch.train.

`work["shaping"]` selects hidden states, metrics and VERL shaping, or none of them. `work["ours"]`
overrides settings.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import contextlib
import json
import pathlib
import tempfile

import jax
import ml_collections

from benchmarks import cpu_clock
from benchmarks.peers.protocol import Driver
from configs import default
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.runs import EXIT_PREEMPTED, validate
from semrl_jax.runs.setup import open_run
from semrl_jax.runs.workdir import open_workdir
from semrl_jax.support import compilation
from semrl_jax.support.console import Reporter
from semrl_jax.training.loop import run_steps


def settings(work: dict, prompts: pathlib.Path) -> ml_collections.ConfigDict:
    """The default config with the work of the benchmark."""
    config = default.get_config()
    config.model.path = work["model"]
    config.data.task = "files"
    config.data.files = (str(prompts),)
    config.data.template = "plain"  # prompts of a real model have their template
    config.data.prompts_per_step = len(work["prompts"])
    config.rollout.group_size = work["group_size"]
    config.rollout.max_prompt_tokens = work["prompt_tokens"]
    config.rollout.max_response_tokens = work["response_tokens"]
    config.algorithms.loss.kl_coefficient = 0.0
    config.algorithms.loss.entropy_coefficient = 0.0
    config.rewards.function = "benchmarks.peers.reward:vowels"
    config.training.num_steps = 10**6
    config.training.prompts_per_minibatch = len(work["prompts"])  # one update per step
    config.training.micro_batch_size = 4
    config.training.learning_rate = work["learning_rate"]
    config.training.weight_decay = 0.0
    config.evaluation.every_steps = 0
    config.evaluation.held_out = False
    config.checkpoints.every_steps = 10**6
    config.logging.rollouts_every_steps = 0
    config.logging.plot_every_steps = 0
    if not work["shaping"]:
        config.hidden_states.source = "none"
        config.shaping.target = "none"
    config.update_from_flattened_dict(work["ours"])
    validate(config)
    return config


def main() -> None:
    driver = Driver()
    work = driver.work
    compilation.keep_programs()
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompts = scratch / "prompts.jsonl"
        lines = [json.dumps({"question": text, "answer": "0"}) for text in work["prompts"]]
        prompts.write_text("\n".join(lines))
        config = settings(work, prompts)
        opening = open_workdir(str(scratch / "run"), config)
        workdir = stack.enter_context(contextlib.closing(opening))
        stop = StopRequest(config.training.grace_s, EXIT_PREEMPTED)
        opened = stack.enter_context(open_run(config, workdir, Reporter(), stop, Peers()))
        # Without end tokens, every response has its full length.
        ends = tuple(work["end_token_ids"])
        opened.evaluator.sampler.end_token_ids = ends  # the source has the same sampler
        state = opened.first_state()
        driver.report(
            versions={},
            num_params=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            prompt_tokens=[
                len(example.prompt_ids) for example in opened.source.source.batches.prompts.examples
            ],
        )
        opened.run.begin_rows(0)
        bar = stack.enter_context(opened.run.reporter.bar("train", 10**6, "steps"))
        stack.enter_context(cpu_clock.installed())
        driver.wait()
        for result in run_steps(opened.parts, state):
            opened.run.record(result, bar)
            clock = result.clock.scalars()
            driver.report(
                rollout_s=clock["time/sample_s"],
                update_s=clock["time/update_s"],
                num_tokens=sum(len(item.rollout.response_ids) for item in result.scored),
                stages=clock,
            )
            driver.wait()


if __name__ == "__main__":
    main()
