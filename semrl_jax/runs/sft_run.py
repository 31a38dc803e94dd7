"""Supervised fine-tuning from start to exit code: reads conversations, trains, saves the model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Generator, Iterator, Mapping, Sequence

import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from semrl_jax import data, models
from semrl_jax.cluster.agreement import run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.data.templates import CHAT
from semrl_jax.models import from_host, replicated
from semrl_jax.models.of_config import build_policy, end_token_ids, find_lora, starting_params
from semrl_jax.runs.adapters import AdapterRecord
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.export import MODEL, Exporter, save_trained
from semrl_jax.runs.lifecycle import EXIT_NOT_SAVED, announce, end_early, exit_code, start
from semrl_jax.runs.memory import check_room, least_parts_sft
from semrl_jax.runs.optimizers import optimizer_of
from semrl_jax.runs.run import Run
from semrl_jax.runs.setup import check_micro_batches, record_inputs
from semrl_jax.runs.workdir import Workdir
from semrl_jax.shaping import init_shaping_state
from semrl_jax.support.clock import Clock
from semrl_jax.support.console import Bar, Reporter, duration, short_path
from semrl_jax.support.errors import Preempted, UserError, prefixed
from semrl_jax.training.fine_tuning import FineTuner, batch_order
from semrl_jax.training.offload import check_offload
from semrl_jax.training.packing import row_plan
from semrl_jax.training.train_state import (
    POLICY,
    DataPosition,
    TrainState,
    abstract_state,
    init_state,
)
from semrl_jax.training.trainee import NonFiniteUpdates

MAX_LINES = 100  # of steps, printed in equal distances
CONVERSATIONS = (
    "row_format", "messages_field", "prompt_fields", "completion_field", "template",
    "system_prompt", "add_special_tokens",
)  # fmt: skip


class Inputs:
    """Inputs of a run, after all checks; `held_out` has the conversations of each file by name."""

    def __init__(self, config: ml_collections.ConfigDict, mesh: Mesh, reporter: Reporter) -> None:
        sft = config.sft
        names = [pathlib.Path(path).stem for path in sft.evaluation_files]
        for field in ("files", "evaluation_files"):
            for path in sft[field]:
                with prefixed(f"sft.{field}"):
                    data.check_file(path)
        if len(set(names)) < len(names):
            raise UserError(
                "sft.evaluation_files: two files have the same name without ending; rename one."
            )
        self.policy, self.tokenizer = build_policy(config)
        architecture = self.policy.config
        models.check_mesh(architecture, mesh)
        self.policy.check_attention(mesh)
        self.lora, self.adapter = find_lora(config, self.policy) or (None, None)
        check_offload(tuple(config.training.offload), mesh.local_devices[0])
        if "parameters" in config.training.offload:
            raise UserError(
                "training.offload='parameters' frees devices for sampling, and launch.sft samples "
                "nothing; remove it."
            )
        if sft.max_tokens > architecture.max_position_embeddings:
            raise UserError(
                f"sft.max_tokens={sft.max_tokens} must be at most the model's context of "
                f"{architecture.max_position_embeddings} tokens."
            )
        if sft.chat_template:
            data.set_chat_template(self.tokenizer, sft.chat_template, "sft.chat_template")
        ends = end_token_ids(config, self.tokenizer)
        template = data.chosen_template(sft.template, self.tokenizer)
        if sft.row_format == "messages":
            template = CHAT
        self.prefix = data.special_prefix(self.tokenizer, template, sft.add_special_tokens)

        reader = data.conversation_reader(
            self.tokenizer, **{name: sft[name] for name in CONVERSATIONS}
        )

        def read(field: str, paths: Sequence[str]) -> data.ConversationDataset:
            found = data.load_conversations(
                paths,
                self.tokenizer,
                reader,
                **{name: sft[name] for name in ("skip_bad_rows", "max_tokens", "too_long")},
                end_token_ids=ends,
                files_field=f"sft.{field}",
                report=reporter.line,
            )
            named = (
                (f"conversation {number} of sft.{field}", one.token_ids)
                for number, one in enumerate(found.conversations)
            )
            data.check_ids(self.tokenizer, architecture.vocab_size, named)
            num_tokens = sum(map(len, found.conversations))
            num_learned = sum(int(one.loss_mask.sum()) for one in found.conversations)
            reporter.line(
                f"{field}: {len(found)} conversations, {num_tokens} tokens, {num_learned} of them "
                "to learn"
            )
            return found

        reporter.line(
            data.template_line(
                "conversations", template, self.tokenizer, sft.add_special_tokens,
                ("sft.template", "sft.add_special_tokens"),
            )
        )  # fmt: skip
        self.conversations = read("files", sft.files)
        self.held_out = {
            name: read("evaluation_files", [path])
            for name, path in zip(names, sft.evaluation_files, strict=True)
        }

    def hashes(self) -> dict[str, str]:
        """Hash by name of the input."""
        return {
            "special tokens before a prompt": " ".join(map(str, self.prefix)),
            "data": self.conversations.hash,
            "tokenizer": data.tokenizer_hash(self.tokenizer),
            "architecture": self.policy.config.hash,
            **({"adapter": models.peft.adapter_hash(self.adapter)} if self.adapter else {}),
        }


@dataclasses.dataclass
class OpenFineTuning:
    """The parts of an open run."""

    run: Run
    inputs: Inputs
    tuner: FineTuner
    batches: list[Int[np.ndarray, " _"]]  # the conversations of each step, by index
    model: pathlib.Path  # the model that training starts from
    peers: Peers

    @property
    def num_steps(self) -> int:
        return len(self.batches)

    @functools.cached_property
    def consumed(self) -> Int[np.ndarray, " steps"]:
        """Conversations read until after each step; one of two epochs counts twice."""
        return np.cumsum(list(map(len, self.batches)))

    def first_state(self) -> TrainState:
        """The newest valid checkpoint, or the state before the first update."""
        tuner, mesh = self.tuner, self.tuner.plan.mesh
        shaping = init_shaping_state()  # of no use here, but part of every checkpoint
        lora, shapes = self.inputs.lora, tuner.policy.shapes()
        trained = shapes if lora is None else lora.shapes(shapes)
        like = abstract_state(trained, tuner.optimizer, shaping, mesh)
        restored = self.run.checkpoints.restore(like)
        if restored is not None:
            return restored
        if lora is None:
            params = starting_params(self.model, tuner.policy, mesh)
        else:
            params = self.inputs.adapter or lora.init(shapes, self.run.config.seed)
        return init_state(params, tuner.optimizer, shaping, mesh)

    def check_stop(self) -> None:
        """Raises Preempted in all processes if one of them was asked to end."""
        run_phase(self.peers, "check_stop", self.run.stop.check)

    def evaluation_is_due(self, step: int) -> bool:
        every = self.run.config.sft.evaluation_every_steps
        return bool(self.inputs.held_out and every) and (
            step % every == 0 or step == self.num_steps
        )

    def evaluate(self, params: models.Params) -> dict[str, float]:
        """The loss on each held-out file."""
        batch_size = self.run.config.sft.batch_size
        return {
            f"eval/{name}/loss": self.tuner.loss(
                params, held_out.conversations, batch_size, self.check_stop
            )
            for name, held_out in self.inputs.held_out.items()
        }

    def step(self, state: TrainState, clock: Clock) -> tuple[TrainState, dict[str, float]]:
        """One update, and its scalars."""
        step = int(state.step)
        everything = self.inputs.conversations.conversations
        batch = [everything[index] for index in self.batches[step]]
        rate = self.tuner.trainee.learning_rate(state.trained(POLICY))
        with clock("update"):
            state, scalars = self.tuner.update(state, batch)
        num_tokens = sum(map(len, batch))
        consumed = int(self.consumed[step])
        epoch, cursor = divmod(consumed, len(everything))
        scalars |= {
            "policy/learning_rate": rate,
            "sft/epoch": consumed / len(everything),
            "sft/num_tokens": float(num_tokens),
            "sft/num_learned_tokens": float(sum(int(one.loss_mask.sum()) for one in batch)),
            "sft/tokens_per_s": num_tokens / clock.seconds("update"),
        }
        done = from_host(np.int32(step + 1), replicated(self.tuner.plan.mesh))
        return state._replace(step=done, position=DataPosition(epoch, cursor)), scalars


def batches_of(config: ml_collections.ConfigDict, inputs: Inputs) -> list[Int[np.ndarray, " _"]]:
    """The conversations of each step, by index."""
    sft = config.sft
    return batch_order(
        list(map(len, inputs.conversations.conversations)),
        seed=config.seed,
        num_epochs=sft.num_epochs,
        num_steps=sft.num_steps,
        batch_size=sft.batch_size,
        batch_tokens=sft.batch_tokens,
    )


@contextlib.contextmanager
def open_fine_tuning(
    config: ml_collections.ConfigDict,
    workdir: Workdir,
    reporter: Reporter,
    stop: StopRequest,
    peers: Peers,
) -> Iterator[OpenFineTuning]:
    """Builds all parts of a run, and closes them at the end; all processes call it together."""
    sft = config.sft
    mesh = models.make_mesh(config.mesh.to_dict())
    check_micro_batches("sft", sft, mesh)

    def check_inputs() -> Inputs:
        with stop.interruptible():
            found = Inputs(config, mesh, reporter)
            parts = least_parts_sft(config, found.policy, found.lora, mesh)
            check_room(config, parts, reporter)
            return found

    inputs = run_phase(peers, "check_inputs", check_inputs)
    model = models.find_directory(config.model.path)
    run_phase(peers, "check_inputs", lambda: models.check_params(model, inputs.policy.config))
    record_inputs(peers, workdir, inputs.hashes(), config.model.path)
    batches = batches_of(config, inputs)
    policy, lora, base, record = inputs.policy, inputs.lora, None, None
    if lora is not None:
        frozen = starting_params(model, policy, mesh, config.lora.base_dtype)
        base = lora.base(frozen)
        record = AdapterRecord.of(lora, config.model.path, model, config.lora.base_dtype)
    tuner = FineTuner(
        policy=dataclasses.replace(policy, mesh=mesh),
        optimizer=optimizer_of(config, "sft", len(batches)),
        plan=row_plan(mesh, sft),
        max_tokens=sft.max_tokens,
        max_skipped_updates=config.training.max_skipped_updates,
        peers=peers,
        base=base,
        dropout=0.0 if lora is None else lora.dropout,
        seed=config.seed,
    )
    checkpoints = Checkpoints(
        workdir.path / "checkpoints", **config.checkpoints, warn=reporter.notice, peers=peers,
        shared=workdir.shared, adapter=record,
        exporter=Exporter(base, policy.config, inputs.tokenizer, model, config.checkpoints.export),
    )  # fmt: skip
    with contextlib.closing(checkpoints):
        run = Run(
            config=config,
            workdir=workdir,
            checkpoints=checkpoints,
            tokenizer=inputs.tokenizer,
            reporter=reporter,
            stop=stop,
            leads=peers.index == 0,
        )
        yield OpenFineTuning(run, inputs, tuner, batches, model, peers)


def fine_tune(
    config: ml_collections.ConfigDict, workdir: str, quiet: bool = False, file: str = "FILE"
) -> int:
    """Starts a supervised fine-tuning, or resumes the one in the directory; codes as `train`.

    `file` is the config's, for the next command that is printed. UserError for a wrong setting,
    file, row or directory, before any training; RuntimeError if the updates stay non-finite.
    """
    work = functools.partial(_fine_tune, file)
    return exit_code(start(config, workdir, open_fine_tuning, work, quiet))


def _fine_tune(
    file: str, config: ml_collections.ConfigDict, opened: OpenFineTuning
) -> Generator[dict[str, float], None, int]:
    run, num_steps = opened.run, opened.num_steps
    state = opened.first_state()
    first_step = int(state.step)
    announce(run, first_step)
    run.begin_rows(first_step)
    try:
        with run.reporter.bar("sft", num_steps, "steps", done=first_step) as bar:
            for step in range(first_step, num_steps):
                opened.check_stop()
                clock = Clock(bar.status)
                held_out = _evaluation(opened, step, state, clock)
                state, scalars = opened.step(state, clock)
                run.write_row(step, held_out | scalars | clock.scalars())
                bar.advance(status=f"loss {scalars['sft/loss']:.3f}")
                if (step + 1) % -(-num_steps // MAX_LINES) == 0 or step + 1 == num_steps:
                    bar.line(_step_line(step + 1, num_steps, scalars, bar))
                if run.checkpoints.due(step + 1, num_steps):
                    run.checkpoints.save(state)
                yield scalars
            clock = Clock(bar.status)
            held_out = _evaluation(opened, num_steps, state, clock)
            if held_out:
                run.write_row(num_steps, held_out | clock.scalars())
    except Preempted as preempted:
        return end_early(run, state, preempted)
    except NonFiniteUpdates as error:
        file = run.keep_minibatch(error.minibatch.named())
        raise RuntimeError(
            f"{error}; the last batch is in {file}. Lower sft.learning_rate, or continue "
            "from an earlier checkpoint (training.resume_from)."
        ) from None
    finally:
        run.end_rows()
    failure = run.checkpoints.failure()
    run.draw_report()
    if failure:
        run.reporter.notice(f"not done: {failure}; make room, the same command goes on")
        return EXIT_NOT_SAVED
    tuner = opened.tuner
    architecture = tuner.policy.config
    save_trained(run, state.params, tuner.base, architecture, opened.model, opened.peers)
    path, model = run.workdir.path, short_path(run.workdir.path / MODEL)
    places = {
        "model": f"{model}/, for transformers, vLLM and config.model.path",
        "report": short_path(path / "report.html"),
        "log": short_path(path / "metrics.jsonl"),
        "checkpoints": f"{short_path(path / 'checkpoints')}/",
    }
    run.reporter.ending(f"done: {num_steps} steps", places, next_commands(file, config, model))
    return 0


def next_commands(file: str, config: ml_collections.ConfigDict, model: str) -> list[list[str]]:
    """What to try with the fine-tuned model, each as the arguments after `python -m`."""
    train = ["launch.train", f"--config={file}", "--workdir=DIR", f"--config.model.path={model}"]
    if config.data.task == "arithmetic":  # the built-in task needs a model of its own tokenizer
        train += ["--config.data.task=files", "--config.data.files=FILE"]
    return [["launch.chat", f"--policy={model}"], train]


def _evaluation(
    opened: OpenFineTuning, step: int, state: TrainState, clock: Clock
) -> dict[str, float]:
    """The held-out losses of the weights before `step`, if they are due; prints them."""
    if not opened.evaluation_is_due(step):
        return {}
    with clock("evaluate"):
        found = opened.evaluate(state.params)
    for key, loss in found.items():
        opened.run.reporter.line(f"eval {step}  {key.split('/')[1]}  loss {loss:.4f}")
    return found


def _step_line(step: int, num_steps: int, scalars: Mapping[str, float], bar: Bar) -> str:
    parts = [
        f"step {step:>4}/{num_steps}",
        f"loss {scalars['sft/loss']:.4f}",
        f"rate {scalars['policy/learning_rate']:.2e}",
        f"{scalars['sft/tokens_per_s']:.0f} tokens/s",
    ]
    if bar.left_s() is not None:
        parts.append(f"left {duration(bar.left_s())}")
    return "  ".join(parts)
