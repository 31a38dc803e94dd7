"""Setup of a run, in an order in which user mistakes are found before slow work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import ml_collections
from jax.sharding import Mesh

from semrl_jax import data, models
from semrl_jax.algorithms.algorithm import Algorithm, check_functions, load_algorithm
from semrl_jax.cluster.agreement import on_first, run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.data.curricula import PromptHistory, find_curriculum
from semrl_jax.environments.journal import Journal
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.evaluation.entries import benchmark_settings, check_benchmarks, environment_names
from semrl_jax.evaluation.evaluator import Evaluator, most_requests, plans_of
from semrl_jax.evaluation.graders import open_graders
from semrl_jax.evaluation.problems import load_problems
from semrl_jax.evaluation.protocols import load_scores
from semrl_jax.metrics.batch import check_users_metrics
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.models.hosts import processes_of
from semrl_jax.models.of_config import (
    build_policy,
    end_token_ids,
    find_lora,
    find_references,
    find_value_model,
    starting_params,
    value_params,
)
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.building import configured_mesh, read_token
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.runs.adapters import AdapterRecord
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.config_checks import (
    check_num_steps,
    check_reference_addresses,
    method_line,
    remarks,
)
from semrl_jax.runs.export import Exporter
from semrl_jax.runs.inputs import Inputs
from semrl_jax.runs.memory import check_room, least_parts
from semrl_jax.runs.optimizers import optimizer_of
from semrl_jax.runs.references import check_sources, open_references, reference_params
from semrl_jax.runs.run import Run
from semrl_jax.runs.starting_model import starting_directory
from semrl_jax.runs.workdir import ANSWERS, Workdir
from semrl_jax.sampling.choosing_source import check_memory, open_source
from semrl_jax.sampling.environment_tasks import first_answers
from semrl_jax.sampling.episodes import Episodes, SingleTurn
from semrl_jax.sampling.exchange import sampling_processes
from semrl_jax.sampling.hints import Hints
from semrl_jax.sampling.multi_turn import MultiTurn
from semrl_jax.sampling.prompt_sources import check_files, check_prompts, training_prompts
from semrl_jax.sampling.replicas import is_embedded, open_client, take_addresses
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.source import Source
from semrl_jax.sampling.weights import WeightSync
from semrl_jax.settings.model import reference_models
from semrl_jax.settings.rewards import reward_functions, split_functions
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import read_json_object, write_json
from semrl_jax.training.learner import Critic, Learner
from semrl_jax.training.loop import Parts
from semrl_jax.training.offload import check_gives_back, check_offload, drop, host_copies, is_away
from semrl_jax.training.passes import NONE, UPDATE, PassPlan
from semrl_jax.training.probability_reward import ProbabilityReward
from semrl_jax.training.probes import Probes, Tools, load_probes
from semrl_jax.training.reward_model import RewardModel, find_reward_model
from semrl_jax.training.teacher_prompts import TeacherPrompts
from semrl_jax.training.train_state import TrainState

T = TypeVar("T")
METRIC_OPTIONS = ("stride", "window", "method")


@dataclasses.dataclass
class OpenRun:
    """The parts of an open run."""

    run: Run
    source: Source
    evaluator: Evaluator
    learner: Learner
    probes: Probes
    start: pathlib.Path  # model directory that training starts from
    critic_start: pathlib.Path | None = None  # of the critic; None: the policy's parameters
    adapter: models.Params | None = None  # to start from; None: a new one, or no LoRA
    critic_head: models.Params | None = None  # to start from, with LoRA

    @property
    def parts(self) -> Parts:
        """What makes the steps."""
        run, learner = self.run, self.learner
        check_stop = functools.partial(run_phase, learner.peers, "advantages", run.stop.check)
        return Parts(run.config, self.source, self.evaluator, learner, self.probes, check_stop)

    def first_state(self) -> TrainState:
        """The newest valid checkpoint, or the state before the first update."""
        state = self._first_state()
        resting = self.learner.resting(state)
        drop(state, resting)
        return resting

    def _first_state(self) -> TrainState:
        learner = self.learner
        restored = self.run.checkpoints.restore(learner.abstract_state())
        if restored is not None:
            return restored
        if learner.lora is not None:
            return learner.first_state(*self._first_adapters())
        critic = None
        if self.critic_start is not None:
            critic = value_params(self.critic_start, learner.critic.model, learner.mesh)
        model = self.run.config.model
        starts_there = learner.reference is not None and not model.reference_path
        if starts_there and model.reference_dtype == "float32":
            return learner.first_state(None, critic)
        params = starting_params(self.start, learner.policy, learner.mesh)
        return learner.first_state(params, critic)

    def _first_adapters(self) -> tuple[models.Params, models.Params | None]:
        """Adapters of the policy, and adapters of the critic with its head."""
        learner, seed = self.learner, self.run.config.seed
        policy = self.adapter or learner.lora.init(learner.base.params, seed)
        if learner.critic is None:
            return policy, None
        # Another seed than the policy's, which is below 2^32.
        critic = learner.lora.init(learner.critic.base.params, seed + 2**32)
        return policy, critic | {models.VALUE_HEAD: self.critic_head}


def check_inputs(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    verifier: VerifierPool,
    environments: EnvironmentPools,
    report: Callable[[str], None],
) -> Inputs:
    """Checks everything that the config names but weights and replicas; writes nothing.

    The verifier is tried on the first prompt, each environment on its first task. `report` gets
    lines about rows that were skipped. Raises UserError for the first input that cannot be used.
    """
    algorithm = load_algorithm(config.algorithms.to_dict())
    check_functions(algorithm, config.rollout.group_size)
    scores = load_scores(config.evaluation.scores)
    plans_of(scores, config.evaluation)  # a wrong plan is found here
    check_files(config)
    check_benchmarks(config)
    policy, tokenizer = build_policy(config)
    end_tokens = end_token_ids(config, tokenizer)
    check_model_limits(config, policy.config, tokenizer)
    if algorithm.needs.spans and not config.environment.name:
        data.TokenBytes(tokenizer)  # finds the tokens in which steps end, or says that it cannot
    if config.rollout.router_replay and not policy.config.routed_experts:
        raise UserError(
            f"rollout.router_replay=True replays the choice of experts, and a model of model_type="
            f"{policy.config.model_type!r} has none; set it to False."
        )
    if config.hidden_states.source != "none":
        check_metrics_of(config.metrics, policy)
    if config.evaluation.metrics:
        check_metrics_of(config.evaluation.metric_options, policy)
    models.check_mesh(policy.config, mesh)
    policy.check_attention(mesh)
    lora, adapter = find_lora(config, policy) or (None, None)
    check_offload(tuple(config.training.offload), mesh.local_devices[0])
    if config.rollout.in_turns:
        check_offload(True, mesh.local_devices[0], "rollout.in_turns")
        check_gives_back(config, mesh.local_devices[0])
    plan = PassPlan.of(algorithm, config)
    _check_reference(config, algorithm, plan)
    check_memory(config, policy.config, lora)
    if is_embedded(config):
        configured_mesh(config, policy.config)
    keep = {"keep_columns": verifier.takes_row, "environments": environments}
    prompts = training_prompts(config, tokenizer, report, **keep)
    prompts = dataclasses.replace(
        prompts, is_shuffled=config.data.shuffle, curriculum=find_curriculum(config.data.curriculum)
    )
    if config.rollout.hint_rounds:
        Hints(config, tokenizer).check(prompts.examples)
    needing = {
        "rewards.probability_after": bool(config.rewards.probability_after),
        "data.teacher_input": "{answer}" in config.data.teacher_input,
    }
    if not all(example.answer for example in prompts.examples):
        for field in (field for field, is_set in needing.items() if is_set):
            raise UserError(f"{field} needs a reference answer of each prompt, and one has none.")
    if prompts.curriculum is not None:  # a first draw finds its mistakes
        start = data.Position(0, 0, PromptHistory.nothing(len(prompts)))
        data.next_rows(prompts, config.seed, start, 1)
    if epochs := config.training.num_epochs:
        per_step = config.data.prompts_per_step
        config.training.num_steps = max(1, epochs * len(prompts) // per_step)
        check_num_steps(config)
    problems = load_problems(config, tokenizer, report, **keep)
    for of, examples in (("training", prompts.examples), ("evaluation", problems)):
        check_prompts(of, examples, config, tokenizer, policy.config.vocab_size, report)
    verifiers, _ = split_functions(reward_functions(config.rewards.functions))
    if config.rewards.function or verifiers:
        first = prompts.examples[0]
        verifier.validate(f"\\boxed{{{first.answer}}}", first.answer, first.columns)
    episodes: Episodes = SingleTurn()
    if environments:
        for line in first_answers([*prompts.examples, *problems], tokenizer, environments):
            report(line)
        episodes = MultiTurn.of(config, tokenizer, end_tokens, environments)
        name, credit = config.environment.name, config.algorithms.advantage.credit
        if name and environments[name].is_self_play and credit != "turn":
            raise UserError(
                f"environment.name={name!r} is self-play; set algorithms.advantage.credit=turn."
            )
    critic = critic_directory = None
    if algorithm.needs.values:
        critic = models.ValueModel.of(dataclasses.replace(policy, mesh=mesh))
    if path := config.critic.path:
        of_policy = config, policy, tokenizer, mesh
        critic, critic_directory, _ = find_value_model("critic.path", path, *of_policy)
    check_reference_addresses(config)  # again: `rollout.addresses_file` has been read
    if config.model.reference_addresses or config.rollout.addresses:
        read_token(config.rollout.token_file)  # before a warm start, not after it
    references = find_references(config, policy, tokenizer, mesh)
    check_sources(references, prompts, report)
    teachers = [files.model.config for files in references.values()]
    teachers += [policy.config] * ("" not in references)
    return Inputs(
        algorithm=algorithm,
        plan=plan,
        policy=policy,
        references=references,
        critic=critic,
        critic_directory=critic_directory,
        tokenizer=tokenizer,
        end_token_ids=end_tokens,
        prompts=prompts,
        problems=problems,
        episodes=episodes,
        scores=scores,
        reward_model=find_reward_model(
            "rewards.model.path",
            config.rewards.model.path,
            config,
            policy,
            tokenizer,
            mesh,
            prompts.examples,
        ),
        lora=lora,
        adapter=adapter,
        prefix=data.special_prefix(
            tokenizer, prompts.examples[0].template, config.data.add_special_tokens
        ),
        teacher=TeacherPrompts.of(
            config, tokenizer, prompts, min(teachers, key=lambda c: c.max_position_embeddings)
        ),
    )


def _check_reference(
    config: ml_collections.ConfigDict, algorithm: Algorithm, plan: PassPlan
) -> None:
    """UserError for settings of a reference or teacher that the passes of an update do not read."""
    if config.metrics.drift_every and plan.reference == NONE:
        raise UserError(
            f"metrics.drift_every={config.metrics.drift_every} needs a reference, which algorithms."
            f"name={config.algorithms.name!r} has with algorithms.loss.kl_coefficient above 0."
        )
    for named in reference_models(config.model).values():
        if config.metrics.drift_every:
            raise UserError(
                f"metrics.drift_every={config.metrics.drift_every} measures how far the states "
                f"have moved since the start, but {named.field}={named.path!r} is another model; "
                "set 0."
            )
        if plan.reference == NONE:
            raise UserError(
                f"{named.field}={named.path!r} is not read: algorithms.name="
                f"{config.algorithms.name!r} with these settings has no reference; remove it, or "
                "set algorithms.loss.kl_coefficient above 0."
            )
    if "reference" in config.training.offload and plan.reference == NONE:
        raise UserError(
            f"training.offload={tuple(config.training.offload)}: algorithms.name="
            f"{config.algorithms.name!r} with these settings has no reference; remove 'reference'."
        )
    if algorithm.needs.exact_kl and plan.reference != UPDATE:
        raise UserError(
            "algorithms.loss.kl_estimator='exact' compares policy and reference in the update, "
            "which has the reference only without training.offload='reference', "
            "data.teacher_input, model.references and model.reference_addresses; remove one."
        )
    if plan.own_teacher and plan.reference != NONE:
        raise UserError(
            f"algorithms.name={config.algorithms.name!r} needs a reference and its own teacher, "
            "which take the same place; set algorithms.loss.kl_coefficient=0."
        )
    if plan.own_teacher and not config.data.teacher_input:
        raise UserError(
            "algorithms.advantage.teacher='policy' needs data.teacher_input: without it, teacher "
            "and policy are equal."
        )
    if (text := config.data.teacher_input) and plan.reference == NONE and not plan.own_teacher:
        raise UserError(
            f"data.teacher_input={text!r:.200} is not read: algorithms.name="
            f"{config.algorithms.name!r} with these settings has no reference; remove it."
        )


@contextlib.contextmanager
def open_run(
    config: ml_collections.ConfigDict,
    workdir: Workdir,
    reporter: Reporter,
    stop: StopRequest,
    peers: Peers,
) -> Iterator[OpenRun]:
    """Builds all parts of a run, and closes them at the end; all processes call it together."""
    mesh = models.make_mesh(config.mesh.to_dict())
    check_micro_batches("training", config.training, mesh)
    with contextlib.ExitStack() as stack:
        # The pool comes first: its workers import modules while the model is built.
        verifier = stack.enter_context(VerifierPool.of(config.rewards))
        names = environment_names(config)
        environments = stack.enter_context(EnvironmentPools(config.environment, names))
        device_lock = threading.Lock()
        take_addresses(config, peers)
        sampling = sampling_processes(processes_of(mesh), len(config.rollout.addresses))

        def agreed(phase: str, work: Callable[[], T]) -> T:
            def interruptibly() -> T:
                with stop.interruptible():
                    return work()

            return run_phase(peers, phase, interruptibly)

        def check() -> Inputs:
            reporter.line(method_line(config))
            for line in remarks(config):
                reporter.notice(line)
            found = check_inputs(config, mesh, verifier, environments, reporter.line)
            check_room(config, least_parts(config, found, mesh), reporter)
            return found

        # All user input is checked first, because weights and warm start take long.
        inputs = agreed("check_inputs", check)
        settings = benchmark_settings(config)
        policy, tokenizer = inputs.policy, inputs.tokenizer
        record_inputs(peers, workdir, inputs.hashes(), config.model.path)
        if environments:
            environments.keep_answers(Journal(workdir.path / ANSWERS, peers.index))

        def connect() -> RolloutClient | None:
            if peers.index not in sampling:
                return None
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
                    place=(sampling.index(peers.index), len(sampling)),
                    num_problems=most_requests(inputs.problems, inputs.scores, config, settings),
                )
            )

        def find_start() -> pathlib.Path:
            directory = workdir.path / "warm_start"
            return starting_directory(config, policy, tokenizer, directory, reporter)

        def load() -> tuple[pathlib.Path, models.Params | None, models.Params | None]:
            """Where training starts, the base of adapters, and the reference."""
            start, other, base = find_start(), inputs.reference, None
            if inputs.lora is not None:
                base = starting_params(start, policy, mesh, config.lora.base_dtype)
                base = host_copies(base) if is_away(config, "parameters") else base
                if other is None:
                    return start, base, base
            if not inputs.loads_reference:
                models.check_params(start, policy.config)  # the first state will load them
                return start, base, None
            directory, model = (start, policy) if other is None else (other.directory, other.model)
            return start, base, reference_params(config, directory, model, mesh)

        measurer = None
        if config.hidden_states.source != "none":
            measurer = stack.enter_context(open_measurer(config, config.metrics))
            if config.metrics.placement == "trainer":
                dtype = jax.numpy.dtype(config.hidden_states.dtype)
                num_responses = config.training.responses_per_step
                # Compiles while this thread loads or makes the model.
                measurer.prepare(policy.config.hidden_size, dtype, num_responses)
        client = agreed("connect", connect)
        agreed("warm_start", lambda: find_start() if peers.index == 0 else None)
        start, base, reference = agreed("load", load)
        references = agreed(
            "load", lambda: open_references(stack, config, inputs, mesh, stop, reporter)
        )
        lora, record = inputs.lora, None
        if lora is not None:
            base = lora.base(base)
            record = AdapterRecord.of(lora, config.model.path, start, config.lora.base_dtype)

        def load_reward_model() -> RewardModel | None:
            if inputs.reward_model is None:
                return None
            shared = {"peers": peers, "device_lock": device_lock}
            return RewardModel.load(inputs.reward_model, config, mesh, **shared)

        reward_model = agreed("load", load_reward_model)
        graders = open_graders(stack, config, inputs.problems, settings)
        evaluation_measurer = None
        if config.evaluation.metrics:
            options = config.evaluation.metric_options
            evaluation_measurer = stack.enter_context(
                open_measurer(config, options, config.evaluation.metric_series)
            )
        checkpoints = Checkpoints(
            workdir.path / "checkpoints", **config.checkpoints, warn=reporter.notice, peers=peers,
            shared=workdir.shared, adapter=record,
            exporter=Exporter(base, policy.config, tokenizer, start, config.checkpoints.export),
        )  # fmt: skip
        stack.enter_context(contextlib.closing(checkpoints))
        critic = critic_head = None
        if inputs.critic is not None:
            critic = Critic(inputs.critic, optimizer_of(config, "critic"))
            if lora is not None:
                frozen, critic_head = agreed(
                    "load", lambda: critic_base(config, inputs, base, mesh)
                )
                critic = critic._replace(base=lora.base(frozen))
        learner = Learner(
            config=config,
            algorithm=inputs.algorithm,
            plan=inputs.plan,
            policy=dataclasses.replace(policy, mesh=mesh),
            critic=critic,
            mesh=mesh,
            reference=reference,
            num_seen=len(inputs.prompts) if inputs.prompts.curriculum else 0,
            reference_policy=None if inputs.reference is None else inputs.reference.model,
            teacher=inputs.teacher,
            references=references,
            prompt_numbers=inputs.prompts.numbers if inputs.algorithm.needs.prompt_state else {},
            probability=ProbabilityReward.of(config, tokenizer, policy.config),
            optimizer=optimizer_of(config, "training"),
            pad_token_id=tokenizer.pad_token_id,
            peers=peers,
            device_lock=device_lock,
            reward_model=reward_model,
            lora=lora,
            base=base,
        )
        sync = WeightSync(config, policy.config, client, peers, stop, reporter)
        sampler = Sampler(
            config, tokenizer, inputs.end_token_ids, sync, verifier, sampling, inputs.episodes
        )
        source, sampler = stack.enter_context(
            open_source(config, sampler, inputs.prompts, measurer)
        )
        run = Run(
            config=config,
            workdir=workdir,
            checkpoints=checkpoints,
            tokenizer=tokenizer,
            reporter=reporter,
            stop=stop,
            leads=peers.index == 0,
            answers=environments.journal,
        )
        evaluator = Evaluator(
            config=config,
            problems=inputs.problems,
            scores=inputs.scores,
            sampler=sampler,
            settings=settings,
            graders=graders,
            measurer=evaluation_measurer,
        )
        yield OpenRun(
            run,
            source,
            evaluator,
            learner,
            load_probes(Tools(config, inputs.plan, peers, measurer, stop)),
            start,
            inputs.critic_directory,
            inputs.adapter,
            critic_head,
        )


def critic_base(
    config: ml_collections.ConfigDict, inputs: Inputs, policy: models.Base, mesh: Mesh
) -> tuple[models.Params, models.Params]:
    """The frozen part of a critic with adapters, perhaps the policy's own, and its first head."""
    if inputs.critic_directory is None:
        params = models.with_head(policy.params)
    else:
        params = value_params(inputs.critic_directory, inputs.critic, mesh)
    head = params.pop(models.VALUE_HEAD)
    if inputs.critic_directory is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(config.lora.base_dtype), params)
        if is_away(config, "parameters"):
            params = host_copies(params)
    return params, head


def check_metrics_of(metrics: ml_collections.ConfigDict, policy: models.Policy) -> None:
    """Raises UserError if a user's metric in a section such as `config.metrics` cannot be used."""
    options = {name: metrics[name] for name in METRIC_OPTIONS}
    check_users_metrics(metrics.names, policy.config.hidden_size, **options)


def open_measurer(
    config: ml_collections.ConfigDict, metrics: ml_collections.ConfigDict, series: bool = False
) -> Measurer:
    """The measurer of a section such as `config.metrics`; `series`: see `Measurer`."""
    options = metrics.to_dict()
    del options["placement"]
    for field in ("of_groups", "drift_every", "probes"):  # of batches for training
        options.pop(field, None)
    options |= {name: tuple(options[name]) for name in ("names", "layers")}
    return Measurer(max_tokens=config.rollout.max_response_tokens, series=series, **options)


def check_micro_batches(name: str, section: ml_collections.ConfigDict, mesh: Mesh) -> None:
    """Raises UserError if micro-batches of the section `name` cannot be split over the mesh."""
    rows = math.prod(mesh.shape[axis] for axis in models.DATA_AXES)
    if not section.micro_batch_tokens and section.micro_batch_size % rows:
        raise UserError(
            f"{name}.micro_batch_size={section.micro_batch_size} must be a multiple of the {rows} "
            "data shards (mesh.replica * mesh.fsdp * mesh.expert)."
        )
    if section.micro_batch_tokens % mesh.shape["sequence"]:
        raise UserError(
            f"{name}.micro_batch_tokens={section.micro_batch_tokens} must be a multiple "
            f"of mesh.sequence={mesh.shape['sequence']}, over which the tokens of a row are split."
        )


def record_inputs(peers: Peers, workdir: Workdir, hashes: dict[str, str], model_path: str) -> None:
    """UserError if the inputs differ between processes, or from the first start.

    The weights in `model_path` are an input too, because the KL penalty refers to them.
    """
    directory = models.find_directory(model_path) if model_path else None
    own = hashes | ({"weights": models.weights_sample(directory)} if directory else {})
    found = peers.gather("inputs", own)

    def compare() -> None:
        for process, others in enumerate(found):
            for name, value in own.items():
                if others.get(name) != value:
                    raise UserError(
                        f"process {process} reads other {name} than process {peers.index}."
                    )

    run_phase(peers, "inputs", compare)

    def check() -> None:
        weights = {}
        if directory:
            weights["weights"] = weights_hash(workdir, directory, own["weights"])
        workdir.check_inputs(own | weights)

    on_first(peers, "inputs", check)


def weights_hash(workdir: Workdir, directory: pathlib.Path, sample: str) -> str:
    """`models.weights_hash`; reads the files only if they have changed since the last start.

    Files are unchanged if their times and their sample are: copies and images may keep old times.
    """
    files = sorted(directory.glob("*.safetensors"))
    state = {"sample": sample, "changed_ns": [file.stat().st_mtime_ns for file in files]}
    record = workdir.path / "weights.json"
    with contextlib.suppress(OSError, UserError, KeyError):  # missing or incomplete
        recorded = read_json_object(record)
        if recorded["state"] == state:
            return recorded["sha256"]
    sha256 = models.weights_hash(directory)
    write_json(record, {"sha256": sha256, "state": state})
    return sha256


def check_context(config: ml_collections.ConfigDict, architecture: models.DecoderConfig) -> None:
    """Raises UserError if prompt and response may be longer than the model's context."""
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if length > architecture.max_position_embeddings:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {length} must be at most "
            f"the model's context of {architecture.max_position_embeddings} tokens."
        )


def check_model_limits(
    config: ml_collections.ConfigDict, architecture: models.DecoderConfig, tokenizer: Any
) -> None:
    """Raises UserError for sampling settings that model or tokenizer do not permit."""
    rollout, vocab_size = config.rollout, architecture.vocab_size
    check_context(config, architecture)
    for section in ("rollout", "evaluation"):
        if (top_k := config[section].top_k) > vocab_size:
            raise UserError(
                f"{section}.top_k={top_k} must be at most vocab_size={vocab_size}; 0 keeps all."
            )
    for token in rollout.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"rollout.stop_token_ids has {token}, but vocab_size is {vocab_size}.")
    data.stop_word_ids(tokenizer, rollout.stop_words)
    if rollout.stop_strings or config.evaluation.stop_strings:
        data.TokenBytes(tokenizer)
