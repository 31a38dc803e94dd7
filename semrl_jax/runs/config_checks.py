"""Checks a whole configuration once, before anything is started or written.

`semrl_jax.settings` checks each section; this module checks combinations of sections. JAX is loaded
only for the last checks, which import modules that a user names.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import ml_collections

from semrl_jax.data.arithmetic import MAX_PROMPT_TOKENS, NUM_HELD_OUT
from semrl_jax.evaluation.entries import benchmark_entries
from semrl_jax.metrics.measurements import MetricKey
from semrl_jax.metrics.metric import load_metric
from semrl_jax.metrics.names import (
    FINAL_LAYER,
    GROUP_INDICATOR,
    METRICS,
    ORDERS,
    metric_name,
    window_sizes,
)
from semrl_jax.sampling.branching import find_rule
from semrl_jax.sampling.prompt_sources import evaluation_files
from semrl_jax.settings.algorithms import add_users_options, importance_options
from semrl_jax.settings.config import check_sections
from semrl_jax.settings.data import check_training_data
from semrl_jax.settings.model import reference_models
from semrl_jax.settings.profile import profiled_steps
from semrl_jax.settings.rewards import VERIFIERS, reward_functions, split_functions
from semrl_jax.settings.rollout import check_quantization, check_training_rollout, num_parts
from semrl_jax.settings.rules import divides
from semrl_jax.shaping import ShapingOptions
from semrl_jax.support.choices import TOKEN_INDICATORS
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import module_names
from semrl_jax.types import SamplingParams, distribution_of

# Their baseline is the mean of the group, also if that takes the place of some rewards.
BY_GROUP_MEAN = ("grpo", "dr_grpo", "rloo", "max_likelihood", "red_weight")
OFF = None  # see `_exclude`


def validate(config: ml_collections.ConfigDict) -> None:
    """UserError for the first wrong field or combination; adds options of a user's algorithm."""
    check_sections(config)
    check_training_data(config.data)
    check_training_rollout(config.rollout)
    _check_data(config)
    _check_environment(config)
    _check_sizes(config)
    _check_given(config)
    _check_branching(config)
    check_quantization(config, config.rollout.engine)
    _check_importance(config)
    _check_ahead(config)
    _check_measured(config)
    _check_lora(config)
    _check_references(config)
    # Last: these import modules that load JAX.
    for name in config.metrics.names:
        if name not in METRICS:
            load_metric(name)
    _check_algorithm(config)
    _check_hints(config)
    if not config.training.num_epochs:
        check_num_steps(config)
    from semrl_jax.training.optimizer import load_direction

    for name in ("training", "critic", "sft"):
        load_direction(config, name)
    _indicators_of_probes(config.metrics.probes)


def check_num_steps(config: ml_collections.ConfigDict) -> None:
    """UserError for settings that a run is too short for; with epochs, once the data is read."""
    from semrl_jax.algorithms.algorithm import load_algorithm

    num_steps, lag = config.training.num_steps, config.rollout.max_staleness
    if profiled_steps(config.profile).stop > num_steps:
        raise UserError(
            f"profile.steps={config.profile.steps!r} must end at training.num_steps at the latest."
        )
    if lag and lag >= num_steps > 0:
        raise UserError(
            f"rollout.max_staleness={lag} must be below training.num_steps={num_steps}; lower it."
        )
    warmup = config.critic.warmup_steps
    if 0 < num_steps <= warmup and load_algorithm(config.algorithms.to_dict()).needs.values:
        raise UserError(
            f"critic.warmup_steps={warmup} must be below training.num_steps={num_steps}: the "
            "policy would never be trained."
        )


def _check_algorithm(config: ml_collections.ConfigDict) -> None:
    from semrl_jax.algorithms.algorithm import load_algorithm
    from semrl_jax.algorithms.importance import check_importance

    add_users_options(config, config.algorithms.name)  # so that a resume compares them
    algorithm = load_algorithm(config.algorithms.to_dict())
    rules, rollout = config.algorithms.batch_rules, config.rollout
    if rules.overlong_tokens > rollout.max_response_tokens:
        raise UserError(
            f"algorithms.batch_rules.overlong_tokens={rules.overlong_tokens} must be at most "
            f"rollout.max_response_tokens={rollout.max_response_tokens}."
        )
    if config.rewards.shuffle and algorithm.needs.spans:
        raise UserError(
            f"rewards.shuffle=True and algorithms.name={config.algorithms.name!r}: steps have "
            "rewards of their own, which other responses have no place for; set it to False."
        )
    rewards = config.rewards
    verifiers, _ = split_functions(reward_functions(rewards.functions))
    names = [each.function for each in verifiers] or [rewards.function or "math"]
    if algorithm.needs.spans and not config.environment.name and not any(":" in n for n in names):
        raise UserError(
            f"algorithms.name={config.algorithms.name!r} needs rewards of steps, and the verifier "
            f"{names[0]!r} judges none; name a function of yours that returns `steps` by "
            "rewards.functions (docs/verifiers.md)."
        )
    importance = importance_options(config)
    if importance["level"] == "none":
        importance |= {"level": "token"}
    try:
        check_importance(**importance)
    except ValueError as error:
        raise UserError(f"algorithms.importance.{error}") from None
    if config.critic.path and not algorithm.needs.values:
        raise UserError(
            f"critic.path is not read with algorithms.name={config.algorithms.name!r}; clear it."
        )
    least = algorithm.needs.least_group if algorithm.needs.groups else 1
    if rollout.group_size < least:
        raise UserError(
            f"rollout.group_size={rollout.group_size} must be at least {least} with "
            f"algorithms.name={config.algorithms.name!r} and its options: it compares the "
            "responses of a group."
        )
    if rollout.given_responses and not (algorithm.needs.groups and algorithm.needs.given):
        raise UserError(
            f"rollout.given_responses={rollout.given_responses} and algorithms.name="
            f"{config.algorithms.name!r}: choose an algorithm that compares the responses of a "
            "group, and whose loss takes `given`, such as 'grpo'."
        )
    if rollout.given_responses and algorithm.needs.given_apart:
        _check_given_apart(config, algorithm.needs.turn_rewards)
    failure, target = config.rewards.failure_score, config.shaping.target
    penalised = (
        (f"rewards.mode={config.rewards.mode!r}", _is_scored_by_math(config), "'mix'"),
        (f"rewards.failure_score={failure:g}", failure < 0, "0 or more"),
        (f"algorithms.batch_rules.overlong_tokens={rules.overlong_tokens}", rules.overlong_tokens,
         "0"),
        (f"shaping.target={target!r}", target in ("reward", "both"), "'advantage'"),
    )  # fmt: skip
    for setting, is_on, way_out in penalised:
        if algorithm.needs.positive_rewards and is_on:
            raise UserError(
                f"{setting} gives rewards below 0, which have no meaning for algorithms.name="
                f"{config.algorithms.name!r}; set it to {way_out}."
            )
    if algorithm.needs.plain_rewards and target in ("reward", "both"):
        raise UserError(
            f"shaping.target={target!r} adds its bonus to the rewards, and algorithms.name="
            f"{config.algorithms.name!r} would take wrong responses with a bonus for correct ones; "
            "set it to 'advantage'."
        )
    rounds = rules.max_sampling_rounds
    if rounds and rollout.group_size < 2:
        raise UserError(
            f"algorithms.batch_rules.max_sampling_rounds={rounds} keeps groups with unequal "
            f"rewards; raise rollout.group_size={rollout.group_size}, or set it to 0."
        )
    late = {"model": config.rewards.model.path}
    late["probability_after"] = config.rewards.probability_after
    for name, value in late.items():
        if rounds and rules.keep_groups_by == "reward" and value:
            raise UserError(
                f"algorithms.batch_rules.max_sampling_rounds={rounds} needs rewards before those "
                f"of rewards.{name} come; set batch_rules.keep_groups_by='correctness'."
            )


def remarks(config: ml_collections.ConfigDict) -> list[str]:
    """Lines about settings that are possible and rarely meant, after `validate`."""
    distils = config.algorithms.name == "distillation"
    if distils and not (reference_models(config.model) or config.data.teacher_input):
        return [
            "warning: algorithms.name='distillation' without model.reference_path: the teacher is "
            "the policy at the start, so there is nothing to learn from it."
        ]
    rewards, own = config.rewards, "reasoning_gym"
    verifiers, _ = split_functions(reward_functions(rewards.functions))
    used = [verifier.function for verifier in verifiers]
    if rewards.function or not used:
        used.insert(0, rewards.function or "math")
    compares = [name for name in used if name in module_names(VERIFIERS)]
    if config.data.task != own or own in used or not compares:
        return []
    return [
        f"warning: rewards: {compares[0]!r} compares a response with the one answer that a problem "
        "has, but data sets of reasoning-gym may take others too; rewards.function="
        f"{own!r} scores by the data set's own scorer."
    ]


def method_line(config: ml_collections.ConfigDict) -> str:
    """What is trained, in one line: the algorithm, and all that is added to it."""
    loss, rewards = config.algorithms.loss, config.rewards
    parts = [config.algorithms.name]
    if config.hidden_states.source != "none" and config.shaping.target != "none":
        parts.append(f"VERL shaping of {config.shaping.target}")
    if "." not in config.algorithms.name:  # else its own options
        for name, of in (("KL", "kl_coefficient"), ("entropy bonus", "entropy_coefficient")):
            if loss[of]:
                parts.append(f"{name} {loss[of]:g}")
    named = [config.model.reference_path, *config.model.references]
    parts += [f"reference {entry}" for entry in named if entry]
    if config.data.curriculum:
        parts.append(f"curriculum {config.data.curriculum}")
    if config.rollout.branching:
        parts.append(f"branching {config.rollout.branching}")
    if config.rollout.hint_rounds:
        parts.append(f"{config.rollout.hint_rounds} rounds of hints")
    if rewards.majority:
        parts.append("majority rewards")
    elif rewards.probability_after:
        parts.append("rewards are probabilities of the reference answer")
    elif _is_scored_by_math(config):
        parts.append(f"{rewards.unboxed_penalty:g} if wrong and unboxed")
    return f"method: {', '.join(parts)}"


def _is_scored_by_math(config: ml_collections.ConfigDict) -> bool:
    """Whether the verifier `math` gives the rewards, with its penalties."""
    rewards = config.rewards
    others = rewards.functions or config.environment.name or rewards.majority
    others = others or rewards.probability_after
    is_math = rewards.function in ("", "math") and not others
    return is_math and rewards.mode == "independent"


def _check_data(config: ml_collections.ConfigDict) -> None:
    data, evaluation = config.data, config.evaluation
    benchmark_entries(evaluation)
    if data.task in ("files", "reasoning_gym") and not config.model.path:
        raise UserError(
            f"data.task={data.task!r} needs model.path: a random model has the tokenizer of "
            "arithmetic; python -m launch.random_model or launch.prepare_model makes a small one."
        )
    if data.task == "files":
        evaluation_files(evaluation.files)
        return
    if data.task == "reasoning_gym" and not any(
        [config.rewards.function, *config.rewards.functions]
    ):
        raise UserError(
            "data.task='reasoning_gym' needs a verifier: set rewards.function='reasoning_gym'."
        )
    if data.files or evaluation.files:
        raise UserError(
            f"data.files and evaluation.files are not read with data.task={data.task!r}."
        )
    if data.task != "arithmetic":
        return
    if evaluation.num_problems > NUM_HELD_OUT:
        raise UserError(
            f"evaluation.num_problems={evaluation.num_problems} must be at most {NUM_HELD_OUT}."
        )
    if config.rollout.max_prompt_tokens < MAX_PROMPT_TOKENS:
        raise UserError(
            f"rollout.max_prompt_tokens must be at least {MAX_PROMPT_TOKENS} in arithmetic."
        )


def _exclude(
    config: ml_collections.ConfigDict, this: str, *others: tuple[str, bool | None, str]
) -> None:
    """UserError for the first of other fields that does not go with `this` setting.

    Each has the way out, and whether its value goes with it; OFF: only an empty value does.
    """
    for field, is_fine, way_out in others:
        value = operator.attrgetter(field)(config)
        if not (is_fine or (is_fine is OFF and not value)):
            raise UserError(f"{this} and {field}={value!r}: {way_out}.")


def _check_environment(config: ml_collections.ConfigDict) -> None:
    """Refuses what does not go with turns."""
    name, data = config.environment.name, config.data
    if (data.task == "environment") != bool(name):
        raise UserError(
            f"data.task={data.task!r} and environment.name={name!r}: set both, or neither."
        )
    if not name:
        return
    measured = config.evaluation.metric_options if config.evaluation.metrics else config.metrics
    one_turn = "set it to 'trainer': a replica sees one turn alone"
    rewarded = ("function", "functions", "majority", "probability_after")
    _exclude(
        config,
        f"environment.name={name!r}",
        ("model.path", bool(config.model.path), "name a model whose tokenizer has a chat template"),
        ("data.template", data.template in ("auto", "chat"),
         "leave it out: messages are rendered by the chat template"),
        ("data.system_prompt", OFF, "leave it out: the environment writes all messages"),
        *((f"rewards.{field}", OFF, "leave it out: the environment gives the rewards")
          for field in rewarded),
        ("data.teacher_input", OFF, "leave it out: an episode has several messages"),
        ("model.references", OFF, "set reference_path: all tasks are of one data source"),
        ("rollout.in_flight", num_parts(config.rollout) == 1,
         "set it to 'wait': with this max_staleness, responses are sampled in parts"),
        ("metrics.placement", config.metrics.placement == "trainer", one_turn),
        ("evaluation.metric_options.placement", measured.placement == "trainer", one_turn),
    )  # fmt: skip


def _check_sizes(config: ml_collections.ConfigDict) -> None:
    data, rollout, training = config.data, config.rollout, config.training
    product = data.prompts_per_step * rollout.group_size
    if training.responses_per_step != product:
        raise UserError(
            f"training.responses_per_step={training.responses_per_step} is derived: {product}."
        )
    # The optimiser step of a smaller last mini-batch would be as large as that of a full one.
    size, total = training.prompts_per_minibatch, data.prompts_per_step
    divides("training.prompts_per_minibatch", size, "data.prompts_per_step", total)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if 0 < training.micro_batch_tokens < longest:
        raise UserError(
            f"training.micro_batch_tokens={training.micro_batch_tokens} must be at least "
            f"{longest}, the longest prompt and response; 0 counts rows by micro_batch_size."
        )
    for name in ("training", "critic"):
        section = config[name]
        if section.learning_rate_final_fraction and section.learning_rate_schedule == "constant":
            raise UserError(
                f"{name}.learning_rate_final_fraction={section.learning_rate_final_fraction:g} is "
                f"not read with {name}.learning_rate_schedule='constant'; set it to 0, or choose "
                "another schedule."
            )
    if training.pack_sequences and not training.micro_batch_tokens:
        raise UserError(
            f"training.pack_sequences=True needs training.micro_batch_tokens of {longest} or more."
        )


def _check_given(config: ml_collections.ConfigDict) -> None:
    """Refuses what does not go with given responses."""
    data, rollout = config.data, config.rollout
    count, field = rollout.given_responses, data.given_field
    if not count and ((field and not rollout.hint_rounds) or rollout.given_when != "always"):
        raise UserError(
            f"data.given_field={field!r} and rollout.given_when={rollout.given_when!r} need "
            "rollout.given_responses above 0; set it, or leave them out."
        )
    if not count:
        return
    _exclude(
        config,
        f"rollout.given_responses={count}",
        ("rollout.group_size", count < rollout.group_size,
         "a group must have a sampled response too"),
        ("data.task", data.task in ("arithmetic", "files"),
         "only rows of files and arithmetic have given responses"),
        ("data.given_field", bool(field) == (data.task == "files"),
         "name the field of data.files that has them; arithmetic has its own"),
        ("rewards.majority", OFF, "given responses would vote; leave one of them out"),
        ("data.curriculum", OFF, "it would count given responses as solved; leave one of them out"),
    )  # fmt: skip


def _check_given_apart(config: ml_collections.ConfigDict, takes_turns: bool) -> None:
    """Refuses what would count given responses in the mean of their group."""
    name = config.algorithms.name
    if name not in BY_GROUP_MEAN:
        raise UserError(
            f"algorithms.loss.given_surrogate='sft' needs an algorithm that compares rewards with "
            f"the mean of their group, {', '.join(BY_GROUP_MEAN)}, not algorithms.name={name!r}; "
            "choose one of them, or 'luffy'."
        )
    would_count = "of given responses would count in the mean of their group; "
    _exclude(
        config,
        "algorithms.loss.given_surrogate='sft'",
        ("algorithms.advantage.kl_reward_coefficient", OFF,
         f"the KL {would_count}set loss.kl_coefficient in its place, or choose 'luffy'"),
        ("algorithms.advantage.credit", not takes_turns,
         f"later turns {would_count}set it to 'episode', or choose 'luffy'"),
    )  # fmt: skip


def _check_hints(config: ml_collections.ConfigDict) -> None:
    """Refuses what does not go with hints."""
    from semrl_jax.algorithms.algorithm import load_algorithm

    rollout, data = config.rollout, config.data
    if not rollout.hint_rounds:
        return
    of_prompts = "it knows prompts without hints; leave one of them out"
    needs = load_algorithm(config.algorithms.to_dict()).needs
    _exclude(
        config,
        f"rollout.hint_rounds={rollout.hint_rounds}",
        ("data.task", data.task in ("arithmetic", "files"),
         "only rows of files and arithmetic have solutions"),
        ("data.given_field", bool(data.given_field) == (data.task == "files"),
         "name the field of data.files that has solutions; arithmetic has its own"),
        ("data.hint_input", "{input}" in data.hint_input and "{hint}" in data.hint_input,
         "it must have {input} and {hint}"),
        ("rollout.given_responses", OFF, "both help groups that fail; leave one of them out"),
        ("rollout.in_flight", num_parts(rollout) == 1, "set it to 'wait'"),
        ("rewards.majority", OFF, "no reference says which groups fail; leave one of them out"),
        ("data.curriculum", OFF,
         "it would count prompts with hints as solved; leave one of them out"),
        ("data.teacher_input", OFF, of_prompts),
        ("model.references", OFF, of_prompts),
        ("rewards.model.tokenizer", config.rewards.model.tokenizer != "own", of_prompts),
        ("algorithms.name", not needs.prompt_state, of_prompts),
    )  # fmt: skip


def _check_branching(config: ml_collections.ConfigDict) -> None:
    """Refuses what does not go with branches."""
    rollout = config.rollout
    rule = find_rule(rollout.branching)
    if rule is None:
        return
    size = 1 + rule.options.branches
    of_parts = "the tokens of a prefix would not count; leave one of them out"
    _exclude(
        config,
        f"rollout.branching={rollout.branching!r}",
        ("rollout.group_size", rollout.group_size % size == 0,
         f"a response and its branches are {size}; choose a multiple"),
        ("environment.name", OFF, "an episode has turns; leave one of them out"),
        ("rollout.in_flight", num_parts(rollout) == 1, "set it to 'wait'"),
        ("rollout.min_tokens", OFF, of_parts),
        ("rollout.presence_penalty", OFF, of_parts),
        ("rollout.frequency_penalty", OFF, of_parts),
        ("algorithms.advantage.credit",
         rule.options.trains_prefix or config.algorithms.advantage.credit != "turn",
         "the turns of a branch and of a whole response differ; set 'episode', or trains_prefix=1"),
        ("metrics.placement",
         config.metrics.placement == "trainer" or config.hidden_states.source != "rollout",
         "set it to 'trainer': a replica sees a part alone"),
    )  # fmt: skip


def _indicators_of_probes(names: Sequence[str]) -> tuple[str, ...]:
    """What the shaping may use of the user's probes; UserError for a module that is none."""
    from semrl_jax.training.probes import indicators_of, load_probe

    return tuple(label for name in names for label in indicators_of(load_probe(name)))


def _check_measured(config: ml_collections.ConfigDict) -> None:
    """Checks that the hidden states and metrics that a setting uses are available."""
    shaping, metrics, source = config.shaping, config.metrics, config.hidden_states.source
    if metrics.placement == "rollout" and source != "rollout":
        raise UserError(
            f"metrics.placement='rollout' measures the replica's hidden states, but "
            f"hidden_states.source={source!r}; set it to 'rollout', or the placement to 'trainer'."
        )
    others = [layer for layer in metrics.layers if layer != FINAL_LAYER]
    if others and source != "rollout":
        raise UserError(
            f"metrics.layers has {others[0]}, but hidden_states.source={source!r} has the final "
            "layer only; set it to 'rollout', or metrics.layers=(-1,)."
        )
    if metrics.of_groups and source == "none":
        raise UserError(
            f"metrics.of_groups={tuple(metrics.of_groups)} needs hidden states, but "
            "hidden_states.source='none'; set another source, or metrics.of_groups=()."
        )
    options = ShapingOptions(**shaping)
    measured = [metric_name(name) for name in metrics.names]
    of_probes = _indicators_of_probes(metrics.probes)
    for indicator in options.tracked:
        if indicator in (*TOKEN_INDICATORS, *of_probes) or (
            indicator == GROUP_INDICATOR and indicator in metrics.of_groups
        ):
            continue
        name, _, layer = MetricKey.parse(indicator)
        if name not in (*measured, *METRICS):
            raise UserError(
                f"shaping uses {indicator!r}, which is unknown; it may use metrics.names, "
                f"such as {METRICS}, with _velocity and _acceleration, {GROUP_INDICATOR} of "
                f"metrics.of_groups, {', '.join(TOKEN_INDICATORS)}, and INDICATORS of "
                "metrics.probes."
            )
        if shaping.target == "none":
            continue
        if source == "none":
            raise UserError(
                f"hidden_states.source='none', but the shaping uses {indicator!r}; set another "
                f"source, shaping.target='none', or one of {', '.join(TOKEN_INDICATORS)}."
            )
        if layer not in metrics.layers:
            raise UserError(
                f"shaping uses {indicator!r}: add it to metrics.layers={tuple(metrics.layers)}."
            )
        if name not in measured:
            raise UserError(
                f"shaping uses {indicator!r}: add it to metrics.names={tuple(metrics.names)}."
            )
    if shaping.target != "none":
        _check_windows(config, options.used)


def _check_windows(config: ml_collections.ConfigDict, used: Sequence[str]) -> None:
    """Checks that the longest response has enough prefixes for the orders in the shaping."""
    metrics, limit = config.metrics, config.rollout.max_response_tokens
    found = len(window_sizes(limit, metrics.stride, metrics.window))
    for name in sorted(used, key=lambda name: -ORDERS[MetricKey.parse(name).order]):
        least = ORDERS[MetricKey.parse(name).order]
        if found >= least:
            continue
        fitting = [
            stride
            for stride in range(1, metrics.stride)
            if len(window_sizes(limit, stride, metrics.window)) >= least
        ]
        way_out = f"set a stride of at most {fitting[-1]}" if fitting else "raise that limit"
        raise UserError(
            f"metrics.stride={metrics.stride} leaves {found} prefix(es) in "
            f"rollout.max_response_tokens={limit} under metrics.window={metrics.window!r}, but the "
            f"shaping uses {name!r}, which needs {least}; {way_out}."
        )


def _check_lora(config: ml_collections.ConfigDict) -> None:
    lora, model = config.lora, config.model
    if not lora.rank:
        return
    if lora.path and not model.path:
        raise UserError(
            f"lora.path={lora.path!r} needs its base, base_model_name_or_path, as model.path."
        )
    if model.param_dtype != "float32":
        raise UserError(
            f"model.param_dtype={model.param_dtype!r} rounds what is trained, float32 adapters "
            "with lora.rank; set it to 'float32', and lora.base_dtype for the base."
        )
    if reference_models(model):
        return
    if "reference" in config.training.offload:
        raise UserError(
            "training.offload moves the reference, with lora.rank the base; remove 'reference'."
        )
    if model.reference_dtype not in ("float32", lora.base_dtype):
        raise UserError(
            f"model.reference_dtype={model.reference_dtype!r} is not read with lora.rank="
            f"{lora.rank}, since the frozen base is the reference; set lora.base_dtype."
        )


def check_reference_addresses(config: ml_collections.ConfigDict) -> None:
    """UserError if a replica of a reference also samples."""
    named = reference_models(config.model).values()
    for address in itertools.chain(*(each.addresses for each in named)):
        if address in config.rollout.addresses:
            raise UserError(
                f"model.reference_addresses and rollout.addresses both name {address!r}; a replica "
                "has one model: start another one."
            )


def _check_references(config: ml_collections.ConfigDict) -> None:
    check_reference_addresses(config)
    named = reference_models(config.model).values()
    is_away = bool(named) and all(each.addresses for each in named)
    if is_away and config.model.reference_path and "reference" in config.training.offload:
        raise UserError(
            "training.offload='reference' moves a reference of the trainer, and with "
            "model.reference_addresses replicas have it; remove 'reference'."
        )


def _check_importance(config: ml_collections.ConfigDict) -> None:
    level, rollout = importance_options(config)["level"], config.rollout
    field = "level" if level == config.algorithms.importance.level else "level_ahead"
    # The trainer's log-probabilities are of the model's own distribution at the temperature.
    own = vars(SamplingParams(1)) | {"temperature": rollout.temperature}
    for of, value in distribution_of(rollout).items():
        if level != "none" and value != own[of]:
            raise UserError(
                f"algorithms.importance.{field}={level!r} compares log-probabilities of "
                f"the model's own distribution, but rollout.{of}={value} samples from another one; "
                f"set rollout.{of}={own[of]:g}, or {field} to 'none'."
            )


def _check_ahead(config: ml_collections.ConfigDict) -> None:
    lag = config.rollout.max_staleness
    if not lag:
        return
    if config.hidden_states.compare_every:
        raise UserError(
            "hidden_states.compare_every compares states of the same weights, and with "
            f"rollout.max_staleness={lag} they differ; set compare_every=0."
        )
    if num_parts(config.rollout) == 1:
        return
    parts = f"rollout.in_flight='keep' with rollout.max_staleness={lag}"
    missed = (
        "responses are sampled in parts, and each part would miss the tokens of those before; set "
        "it to 0, or in_flight='wait'"
    )
    unknown = (
        "responses are sampled in parts, before earlier batches are judged; leave it out, or set "
        "in_flight='wait'"
    )
    _exclude(
        config,
        parts,
        ("rollout.presence_penalty", OFF, missed),
        ("rollout.frequency_penalty", OFF, missed),
        ("data.curriculum", OFF, unknown),
        ("algorithms.batch_rules.max_sampling_rounds", OFF, unknown),
        ("metrics.placement",
         config.metrics.placement == "trainer" or config.hidden_states.source != "rollout",
         "responses are sampled in parts, and each would be measured alone; set it to 'trainer', "
         "or in_flight='wait'"),
    )  # fmt: skip
