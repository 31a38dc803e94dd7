"""Setup of a run: everything it needs, made in an order in which a mistake costs least."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import ml_collections
from jax.sharding import Mesh

from semrl_jax import data, models
from semrl_jax.algorithms.algorithm import Algorithm, load_algorithm
from semrl_jax.cluster.agreement import on_first, run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.console import Reporter
from semrl_jax.errors import UserError
from semrl_jax.evaluation.evaluator import Evaluator, most_requests
from semrl_jax.evaluation.seam import load_problems, load_scores
from semrl_jax.files import read_json_object, write_json
from semrl_jax.model_setup import build_policy, end_token_ids, starting_params
from semrl_jax.models.hosts import processes_of
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.building import configured_mesh
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.measurer import Measurer
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.run import Run
from semrl_jax.runs.starting_model import starting_directory
from semrl_jax.runs.workdir import Workdir
from semrl_jax.sampling.exchange import owning_processes
from semrl_jax.sampling.prompts import (
    check_files,
    training_prompts,
)
from semrl_jax.sampling.replicas import check_addresses, check_fit, open_client
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.training.learner import Learner
from semrl_jax.training.state import TrainState, make_optimizer

T = TypeVar("T")


class Inputs(NamedTuple):
    """What a run is given, read and found right."""

    algorithm: Algorithm
    policy: models.Policy
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    prompts: data.PromptDataset
    problems: Sequence[data.PromptExample]
    scores: Sequence[ModuleType]

    def hashes(self) -> dict[str, str]:
        """By what they are of."""
        return {
            "data": data.dataset_hash(self.prompts),
            "tokenizer": data.tokenizer_hash(self.tokenizer),
            "architecture": self.policy.config.hash,
            "end tokens": " ".join(map(str, self.end_token_ids)),
        }


@dataclasses.dataclass
class OpenRun:
    """The parts of an open run."""

    run: Run
    sampler: Sampler
    evaluator: Evaluator
    learner: Learner
    start: pathlib.Path  # model directory that training starts from

    def first_state(self) -> TrainState:
        """The newest sound checkpoint, or the state before the first update."""
        learner = self.learner
        restored = self.run.checkpoints.restore(learner.abstract_state())
        if restored is not None:
            return restored
        if learner.reference is not None and self.run.config.model.reference_dtype == "float32":
            return learner.first_state(None)
        return learner.first_state(starting_params(self.start, learner.policy, learner.mesh))


@contextlib.contextmanager
def open_run(
    config: ml_collections.ConfigDict,
    workdir: Workdir,
    reporter: Reporter,
    stop: StopRequest,
    peers: Peers,
) -> Iterator[OpenRun]:
    """Builds everything a run needs and takes it down again, whatever ends the block.

    With several processes all call it together; a mistake that one finds ends all.
    """
    mesh = models.make_mesh(config.mesh.to_dict())
    rows = mesh.shape["replica"] * mesh.shape["fsdp"]
    if not config.training.micro_batch_tokens and config.training.micro_batch_size % rows:
        raise UserError(
            f"training.micro_batch_size={config.training.micro_batch_size} must be a multiple of "
            f"the {rows} data shards (mesh.replica * mesh.fsdp); change it or the mesh."
        )
    if config.training.micro_batch_tokens % mesh.shape["sequence"]:
        raise UserError(
            f"training.micro_batch_tokens={config.training.micro_batch_tokens} must be a multiple "
            f"of mesh.sequence={mesh.shape['sequence']}, over which the tokens of a row are split."
        )
    with contextlib.ExitStack() as stack:
        # First: its workers import while the model is made.
        verifier = stack.enter_context(
            VerifierPool(
                num_workers=config.rewards.num_workers,
                timeout_s=config.rewards.timeout_s,
                mode=config.rewards.mode,
                unboxed_penalty=config.rewards.unboxed_penalty,
                function=config.rewards.function,
                failure_score=config.rewards.failure_score,
                memory_limit_gib=config.rewards.memory_limit_gib,
            )
        )
        device_lock = threading.Lock()
        owners = sampling_processes(config, mesh)

        def agreed(phase: str, work: Callable[[], T]) -> T:
            def interruptibly() -> T:
                with stop.interruptible():
                    return work()

            return run_phase(peers, phase, interruptibly)

        # What a mistake may be in comes first; the weights and the warm start are costly.
        def check_inputs() -> Inputs:
            algorithm = load_algorithm(config.algorithms.to_dict())
            scores = load_scores(config.evaluation.scores)
            check_files(config)
            policy, tokenizer = build_policy(config)
            ends = end_token_ids(config, tokenizer)
            check_model_limits(config, policy.config)
            models.check_mesh(policy.config, mesh)
            if config.rollout.engine == "jax" and not config.rollout.addresses:
                check_fit(policy.config, configured_mesh(config, policy.config), mesh)
            prompts = training_prompts(config, tokenizer, reporter.line)
            problems = load_problems(config, tokenizer, reporter.line)
            if config.rewards.function:
                answer = prompts.examples[0].answer
                verifier.validate(f"\\boxed{{{answer}}}", answer)
            return Inputs(algorithm, policy, tokenizer, ends, prompts, problems, scores)

        inputs = agreed("check_inputs", check_inputs)
        policy, tokenizer = inputs.policy, inputs.tokenizer
        record_inputs(peers, workdir, inputs.hashes(), config.model.path)

        def connect() -> RolloutClient | None:
            if peers.index not in owners:
                return None
            place = owners.index(peers.index), len(owners)
            return stack.enter_context(
                open_client(
                    config,
                    policy,
                    tokenizer,
                    device_lock,
                    reporter,
                    run_id=workdir.run_id,
                    attempt_id=workdir.attempt_id,
                    directory=workdir.path,
                    place=place,
                    num_problems=most_requests(inputs.problems, inputs.scores, config),
                )
            )

        def make_start() -> None:
            if peers.index == 0:
                starting_directory(config, policy, tokenizer, workdir.warm_start, reporter)

        def load() -> tuple[pathlib.Path, models.Params | None]:
            start = starting_directory(config, policy, tokenizer, workdir.warm_start, reporter)
            if not inputs.algorithm.needs.reference:
                models.check_params(start, policy.config)  # what the first state will load
                return start, None
            return start, starting_params(start, policy, mesh, config.model.reference_dtype)

        client = agreed("connect", connect)
        agreed("warm_start", make_start)
        start, reference = agreed("load", load)
        measurer = None
        if config.hidden_states.source != "none":
            measurer = stack.enter_context(
                Measurer(
                    max_tokens=config.rollout.max_response_tokens,
                    num_threads=config.metrics.num_threads,
                    stride=config.metrics.stride,
                    dataset_stride=config.metrics.dataset_stride,
                    window=config.metrics.window,
                    method=config.metrics.method,
                    names=tuple(config.metrics.names),
                    layers=tuple(config.metrics.layers),
                    window_growth=config.metrics.window_growth,
                    device_batch=config.metrics.device_batch,
                )
            )
        checkpoints = stack.enter_context(
            contextlib.closing(
                Checkpoints(
                    workdir.checkpoints,
                    keep=config.checkpoints.keep,
                    every_steps=config.checkpoints.every_steps,
                    keep_every=config.checkpoints.keep_every,
                    extra_steps=tuple(config.checkpoints.extra_steps),
                    warn=reporter.line,
                    peers=peers,
                )
            )
        )
        training = config.training
        learner = Learner(
            config=config,
            algorithm=inputs.algorithm,
            policy=dataclasses.replace(policy, mesh=mesh),
            mesh=mesh,
            reference=reference,
            optimizer=make_optimizer(
                learning_rate=training.learning_rate,
                learning_rate_warmup_steps=training.learning_rate_warmup_steps,
                adam_b1=training.adam_b1,
                adam_b2=training.adam_b2,
                weight_decay=training.weight_decay,
                max_grad_norm=training.max_grad_norm,
            ),
            pad_token_id=tokenizer.pad_token_id,
            peers=peers,
            device_lock=device_lock,
        )
        sampler = Sampler(
            config=config,
            architecture=policy.config,
            tokenizer=tokenizer,
            end_token_ids=inputs.end_token_ids,
            prompts=inputs.prompts,
            client=client,
            verifier=verifier,
            measurer=measurer,
            peers=peers,
            owners=owners,
            stop=stop,
            reporter=reporter,
        )
        run = Run(
            config=config,
            workdir=workdir,
            checkpoints=checkpoints,
            tokenizer=tokenizer,
            reporter=reporter,
            stop=stop,
            leads=peers.index == 0,
        )
        evaluator = Evaluator(config, inputs.problems, inputs.scores, sampler)
        yield OpenRun(run, sampler, evaluator, learner, start)


def sampling_processes(config: ml_collections.ConfigDict, mesh: Mesh) -> tuple[int, ...]:
    """The owners of the data shards, as many as there are replicas to sample from.

    Raises:
      UserError: if a replica is named twice.
    """
    check_addresses(config.rollout.addresses)
    owners = owning_processes(processes_of(mesh))
    return owners[: len(config.rollout.addresses)] if config.rollout.addresses else owners


def record_inputs(peers: Peers, workdir: Workdir, hashes: dict[str, str], model_path: str) -> None:
    """Compares what the processes read with each other, and with what the run began with.

    The weights of `model_path` are an input too: the run stays near to them. A warm start is the
    run's own.
    """
    directory = models.find_directory(model_path) if model_path else None
    sample = {"weights": models.weights_sample(directory)} if directory else {}
    found = peers.gather("inputs", hashes | sample)

    def compare() -> None:
        for process, others in enumerate(found):
            for name, value in (hashes | sample).items():
                if others[name] != value:
                    raise UserError(
                        f"process {process} reads other {name} than process {peers.index}; give "
                        "all processes the same files."
                    )

    run_phase(peers, "inputs", compare)

    def check() -> None:
        weights = {"weights": weights_hash(workdir, directory, **sample)} if directory else {}
        workdir.check_inputs(hashes | weights)

    on_first(peers, "inputs", check)


def weights_hash(workdir: Workdir, directory: pathlib.Path, weights: str) -> str:
    """`models.weights_hash`, without reading the files again where none has changed since.

    As with make or git, an unchanged file is one of the same name, size and time of change; here
    its sample must be the same, too, since copies and images may keep or level times.

    Args:
      workdir: records the hash, and what it is of.
      directory: of the model.
      weights: its `models.weights_sample`.
    """
    files = sorted(directory.glob("*.safetensors"))
    state = {"sample": weights, "changed_ns": [file.stat().st_mtime_ns for file in files]}
    with contextlib.suppress(OSError, UserError, KeyError):  # none yet, or torn
        recorded = read_json_object(workdir.weights_record)
        if recorded["state"] == state:
            return recorded["sha256"]
    sha256 = models.weights_hash(directory)
    write_json(workdir.weights_record, {"sha256": sha256, "state": state})
    return sha256


def check_model_limits(
    config: ml_collections.ConfigDict, architecture: models.DecoderConfig
) -> None:
    """Raises UserError for sampling settings outside the model's context or vocabulary."""
    rollout, vocab_size = config.rollout, architecture.vocab_size
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    if length > architecture.max_position_embeddings:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {length} must be at most "
            f"the model's context of {architecture.max_position_embeddings} tokens."
        )
    if rollout.top_k > vocab_size:
        raise UserError(
            f"rollout.top_k={rollout.top_k} must be at most the {vocab_size} tokens of the "
            "vocabulary; 0 keeps all."
        )
    for token in rollout.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"rollout.stop_token_ids has {token}, which is not in the vocabulary of "
                f"{vocab_size} tokens."
            )
