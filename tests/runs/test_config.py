"""Contradictions between settings are named before a run starts."""

import dataclasses
import importlib
import json

import pytest

from configs import (
    default,
    gsm8k,
    gsm8k_qwen2_5_0_5b,
    quickstart,
    quickstart_ppo,
    recorded,
    smollm2,
)
from semrl_jax.runs import setup, train, validate
from semrl_jax.runs.config_checks import check_sections, method_line, remarks
from semrl_jax.settings import moved
from semrl_jax.settings.rewards import reward_functions
from semrl_jax.support.errors import UserError
from tests.cases import refused


@pytest.mark.parametrize("module", [default, quickstart, quickstart_ppo])
def test_shipped_configs_are_valid(module):
    validate(module.get_config().lock())


@pytest.mark.parametrize("prompts", [1, 7, 16, 36])
@pytest.mark.parametrize(
    "module", [default, quickstart, gsm8k, gsm8k_qwen2_5_0_5b, quickstart_ppo, smollm2]
)
def test_another_number_of_prompts_needs_no_second_setting(module, prompts):
    config = module.get_config()
    config.data.prompts_per_step = config.warm_start.batch_size = prompts
    config.rollout.max_response_tokens = 8192
    validate(config.lock())
    assert prompts % config.training.prompts_per_minibatch == 0


def test_parts_of_a_batch_that_fit_stay_as_they_are():
    config = default.get_config()
    for prompts, part in ((48, 24), (240, 24), (16, 16), (36, 36)):
        config.data.prompts_per_step = prompts
        assert config.training.prompts_per_minibatch == part
    config.training.prompts_per_minibatch = 5
    for prompts, choice in ((48, "4 or 6"), (7, "1 or 7"), (3, "3")):
        config.data.prompts_per_step = prompts
        refused(rf"={prompts}; set it to {choice}, or change data.pro", validate, config)


def test_a_warm_up_of_the_critic_leaves_steps_for_the_policy():
    config = quickstart_ppo.get_config()
    config.critic.warmup_steps = config.training.num_steps
    refused(r"critic.warmup_steps=40 must be below training.num_steps", validate, config)


def test_evaluation_settings_follow_data_until_they_are_set():
    config = quickstart.get_config()
    config.data.template = "abel"
    assert config.evaluation.template == "abel"
    config.evaluation.template = "numina"
    config.evaluation.answer_after = "####"
    assert (config.data.template, config.data.answer_after) == ("abel", "")
    assert config.to_dict()["evaluation"]["question_fields"] == ("question",)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("training.responses_per_step", 7, "training.responses_per_step=7 is derived"),
        ("training.prompts_per_minibatch", 5, "prompts_per_minibatch=5 must divide"),
        ("training.micro_batch_tokens", 71, "micro_batch_tokens=71 must be at least 72"),
        ("training.learning_rate_final_fraction", 0.5, "not read with training.learning_rate_sch"),
        ("critic.learning_rate_final_fraction", 0.5, "critic.learning_rate_final_fraction=0.5 is"),
        ("training.pack_sequences", True, "pack_sequences=True needs .* of 72 or more"),
        ("training.num_steps", 2**31, r"training.num_steps=2147483648 must be below 2\^31"),
        ("training.grace_s", 1e300, r"training.grace_s=1e\+300 must be below 2\^31"),
        ("seed", 2**63, r"seed=9223372036854775808 must be below 2\^63"),
        ("profile.steps", "3", r"profile.steps='3' must be FIRST:END, as 3:6 for"),
        ("profile.steps", "-1:2", r"profile.steps='-1:2' must be FIRST:END"),
        ("profile.steps", "3:3", r"profile.steps='3:3' has no step; 3:4 is one"),
        ("profile.steps", "28:31", r"steps='28:31' must end at training.num_steps at the"),
        ("rollout.group_size", 1, r"rollout.group_size=1 must be at least 2"),
        ("rollout.jax_process_cores", 1, "is for rollout.jax_processes; set both"),
        ("rollout.max_staleness", 30, r"max_staleness=30 must be below training.num_steps=30"),
        ("rollout.temperature", 0.0, "samples equal responses, without advantage"),
        ("rollout.stop_strings", ("a", ""), "has an empty text; leave it out"),
        ("rollout.stop_strings", ("a" * 129,), "aaa; each text has 1 to 128"),
        ("rollout.stop_strings", ("a", "a"), "rollout.stop_strings has 'a' twice; keep one"),
        ("rollout.stop_strings", ("\ufffd",), "which is not valid Unicode text"),
        ("rollout.stop_strings", ("\udc80",), "which is not valid Unicode text"),
        ("evaluation.stop_strings", tuple(map(str, range(65))), "number of evaluation.stop_string"),
        ("rollout.stop_words", ("verl:gpt",), "has 'verl:gpt'; the presets are verl:llama, "),
        ("data.num_prompts", 8, r"data.num_prompts=8 must be at least"),
        ("metrics.stride", 40, "leaves 1 prefix.* which needs 3; set a stride of at most 18"),
        ("metrics.names", ("rank",), "metrics.names has 'rank'"),
        ("metrics.names", ("curvature",), "add it to metrics.names"),
        ("hidden_states.source", "none", "hidden_states.source='none', but the shaping uses"),
        ("shaping.kappa", 1.0, "shaping.kappa=1.0"),
        ("shaping.alpha", 0.0, "shaping.alpha=0.0"),
        ("shaping.explore_weights", (1.0,), "explore_weights"),
        ("shaping.guidance", "luck", "luck"),
        ("shaping.guidance", "avg_response_entropy", "'avg_response_entropy', which is unknown"),
        ("shaping.guidance", "layer_3/effective_rank", "add it to metrics.layers"),
        ("metrics.names", ("mine.effective_rank", "effective_rank"), "'effective_rank' twice"),
        ("metrics.layers", (0,), "metrics.layers=.0,. must have -1, the final layer"),
        ("metrics.layers", (), "must have -1, the final layer"),
        ("metrics.layers", (-1, -2), "must have -1, the final layer"),
        ("metrics.layers", (-1, 0, 0), "each once"),
        ("rollout.addresses", ("127.0.0.1",), "='127.0.0.1' must be host:port"),
        ("rollout.addresses", ("localhost:88993",), "='localhost:88993' must be host:port"),
        ("algorithms.importance.cap", 0.9, "importance.cap=0.9 must be at least 1"),
        ("model.num_heads", 3, "must divide model.hidden_size=128"),
        ("rewards.functions", ("maths",), "='maths' must be .* it, 'model', or .* math_text,"),
        ("rewards.functions", ("",), "rewards.functions has an empty text; leave it out"),
        ("rewards.functions", ("math:weight=0",), "weight='0' must be a number other than 0"),
        ("rewards.functions", ("math:weight=nan",), "weight='nan' must be a number other than"),
        ("rewards.functions", ("math:weight=x",), "math:weight=x': weight='x' must be a number"),
        ("rewards.functions", ("math:wait=1",), "'wait' is not a setting of a reward; choose"),
        ("rewards.functions", ("math:weight=1:weight=2",), "weight is set twice; keep one"),
        ("rewards.functions", ("math:name=a/b",), "name='a/b' must be letters, digits"),
        ("rewards.functions", ("math:name=shaped",), "name='shaped' must be .* not one of"),
        ("rewards.functions", ("math", "a.b:math"), "a.b:math': another entry is named 'math' too"),
        ("rewards.functions", ("model",), "has 'model', but rewards.model.path is empty"),
        ("rewards.functions", ("model", "model:name=b"), "another entry is 'model' too; there is"),
        ("rewards.model.path", "judge", "path='judge' needs an entry 'model' in rewards.functions"),
        ("warm_start.micro_batch_size", 7, "warm_start.micro_batch_size=7 must divide"),
        ("sft.max_tokens", 1, "sft.max_tokens=1 must be at least 2"),
        ("sft.batch_tokens", 100, "sft.batch_tokens=100 must be at least sft.max_tokens=2048"),
        ("sft.micro_batch_tokens", 0, "sft.pack_sequences=True needs sft.micro_batch_tokens"),
        ("algorithms.loss.entropy_coefficient", -1.0, "entropy_coefficient=-1.0 must be at least"),
        ("algorithms.loss.kl_coefficient", float("nan"), "kl_coefficient=nan must be a finite"),
        ("rollout.temperature", 1e-30, "must be 0 or at least 0.01"),
        ("evaluation.num_problems", 2000, r"evaluation.num_problems=2000 must be at most 512"),
        ("rollout.max_prompt_tokens", 11, "rollout.max_prompt_tokens must be at least 12"),
        ("seed", 2**40, "seed=1099511627776 must be at most"),
        ("evaluation.metric_series", True, r"metric_series=True needs evaluation\.metrics=True"),
        ("rewards.model.max_tokens", 8, "max_tokens=8 needs rewards.model.tokenizer='own'"),
        ("rewards.model.max_tokens", 1, "max_tokens=1 needs rewards.model.tokenizer='own'"),
        (
            "rollout.given_when",
            "failed",
            "given_when='failed' need rollout.given_responses above 0",
        ),
        ("data.given_field", "solution", "given_field='solution' and .* need rollout.given_respo"),
        ("rewards.model.truncation", "both", "truncation='both' must be one of 'right', 'left'"),
    ],
)
def test_a_contradiction_is_named(field, value, message):
    config = quickstart.get_config()
    config.update_from_flattened_dict({field: value})
    refused(message, validate, config)


def test_turns_and_a_lag_exclude_each_other():
    config = quickstart.get_config()
    config.update_from_flattened_dict({"rollout.in_turns": True, "rollout.max_staleness": 1})
    with pytest.raises(UserError, match=r"in_turns=True: replicas sleep .*max_staleness=1 makes"):
        validate(config)


def test_series_of_metrics_need_the_states_in_the_trainer(config):
    config.evaluation.update(metrics=True, metric_series=True)
    validate(config)
    config.evaluation.metric_options.placement = "rollout"
    refused(r"metric_series=True needs .*placement='trainer'", validate, config)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout.temperature": 0.0},
        {"rollout.max_staleness": 1, "rollout.in_flight": "keep"},
        {"data.task": "files"},
        {"data.num_prompts": 1},
    ],
)
def test_rules_of_training_are_not_applied_where_nothing_is_trained(fields):
    config = default.get_config()
    config.update_from_flattened_dict(fields)
    check_sections(config)
    with pytest.raises(UserError):
        validate(config)


def test_rewards_are_named_in_one_field():
    config = quickstart.get_config()
    config.rewards.functions = ("math", "a.b:math:name=other:weight=-0.5")
    validate(config)
    assert reward_functions(config.rewards.functions) == [
        ("math", "math", 1.0, "math"),
        ("a.b:math:name=other:weight=-0.5", "a.b:math", -0.5, "other"),
    ]
    config.rewards.function = "math_text"
    config.rewards.model.path = "judge"
    config.rewards.functions = ("model:weight=2",)  # the function only judges correctness
    validate(config)
    config.rewards.functions = ("model", "math")
    refused("rewards.function and rewards.functions are both set", validate, config)


def test_a_stride_needs_to_allow_only_the_orders_in_use():
    config = quickstart.get_config()
    limit = config.rollout.max_response_tokens
    config.shaping.indicators = ("effective_rank_velocity",)
    config.shaping.explore_weights = config.shaping.exploit_weights = (1.0,)
    config.shaping.guidance = "effective_rank"
    config.metrics.stride = limit // 2
    validate(config)
    config.metrics.stride = limit // 2 + 1
    refused(r"leaves 1 prefix.*velocity", validate, config)
    config.shaping.indicators = ("effective_rank",)
    validate(config)


def test_fixed_mixing_puts_no_limit_on_the_stride_for_its_unused_guidance():
    config = quickstart.get_config()
    config.shaping.mixing = "half"
    config.metrics.stride = config.rollout.max_response_tokens // 2
    validate(config)


@pytest.mark.parametrize(
    ("window", "limit", "stride", "largest"),
    [
        ("exact", 60, 21, 20),
        ("release", 60, 20, 19),  # the third prefix would end at its 61st token
        ("release", 2048, 200, 170),  # every window has 512 tokens
        ("later", 60, 31, 29),
    ],
)
def test_the_stride_limit_depends_on_the_window_rule(window, limit, stride, largest):
    config = quickstart.get_config()
    config.rollout.max_response_tokens = limit
    config.metrics.window = window
    config.metrics.stride = stride
    refused(f"set a stride of at most {largest}\\.", validate, config)
    config.metrics.stride = largest
    validate(config)
    config.metrics.stride, config.rollout.max_response_tokens = 1, 2
    config.rollout.max_prompt_tokens = 12
    refused("raise that limit", validate, config)


OF_SPREAD = """
from semrl_jax.metrics import Metric

METRIC = Metric(of_spectrum=lambda sigma, scale, num_rows, width: sigma[0] * scale, min_tokens=2)
"""


def test_a_metric_of_a_users_module_is_imported_when_the_config_is_checked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    config = quickstart.get_config()
    config.metrics.names = ("effective_rank", "my_package.spread")
    config.shaping.guidance = "spread_velocity"
    refused(r"'my_package.spread' cannot be imported .ModuleNotFound", validate, config)
    (tmp_path / "my_package" / "spread.py").write_text(OF_SPREAD)
    importlib.invalidate_caches()
    validate(config)
    config.metrics.placement = "rollout"
    refused(r"'my_package.spread', but with metrics.placement=", validate, config)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_need_the_whole_vocabulary(level):
    config = quickstart.get_config()
    config.algorithms.importance.level = level
    validate(config)
    for field, value in {
        "top_p": 0.9, "top_k": 50, "min_p": 0.1, "presence_penalty": -0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.2, "min_tokens": 4,
    }.items():  # fmt: skip
        config = quickstart.get_config()
        config.rollout[field] = value
        validate(config)
        config.algorithms.importance.level = level
        refused(rf"level='{level}'.* rollout.{field}={value} samples", validate, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout.presence_penalty": 2.5}, r"presence_penalty=2.5 must be in \[-2, 2\]"),
        ({"rollout.repetition_penalty": 1e-39}, r"penalty=1e-39 must be in \[0.001, 1000\]"),
        ({"rollout.min_tokens": 9999}, "min_tokens=9999 must be at most rollout.max_response_"),
        ({"rollout.min_tokens": 1, "rollout.stop_strings": ("x",)}, "are texts; set min_tokens=0"),
        ({"evaluation.frequency_penalty": -3.0}, "evaluation.frequency_penalty=-3.0 must be in"),
        (
            {
                "rollout.in_flight": "keep", "rollout.max_staleness": 2,
                "rollout.frequency_penalty": 0.5, "algorithms.importance.level_ahead": "none",
            },
            "frequency_penalty=0.5: responses are sampled in parts, and each part would miss",
        ),
    ],
)  # fmt: skip
def test_penalties_that_cannot_be(fields, message):
    config = quickstart.get_config()
    config.update_from_flattened_dict(fields)
    refused(message, validate, config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rewards.mode", "independent", "rewards.mode='independent' .* set it to 'mix'"),
        ("rewards.failure_score", -1.0, "failure_score=-1 gives rewards below 0.* to 0 or more"),
        ("algorithms.batch_rules.overlong_tokens", 4, "overlong_tokens=4 gives .* set it to 0"),
        ("shaping.target", "both", "shaping.target='both' gives .* set it to 'advantage'"),
    ],
)
def test_rewards_below_0_are_refused_where_they_mean_nothing(field, value, message):
    config = quickstart.get_config()
    config.algorithms.name, config.rewards.mode = "max_likelihood", "mix"
    validate(config)
    for function in ("math", ""):
        config.rewards.function = function
        config.update_from_flattened_dict({field: value})
        refused(message, validate, config)
    config.algorithms.name = "grpo"
    validate(config)


def test_rules_about_the_number_of_steps_hold_with_epochs(config, tmp_path):
    config.update_from_flattened_dict(
        {"training.num_epochs": 1, "data.num_prompts": 4, "rollout.max_staleness": 2}
    )
    # The default of num_steps, which epochs replace, refuses nothing.
    config.training.num_steps = 2
    config.profile.steps = "3:4"
    config.algorithms.name, config.critic.warmup_steps = "ppo", 2
    validate(config)
    config.profile.steps, config.algorithms.name = "", "grpo"
    refused(
        "max_staleness=2 must be below training.num_steps=1", train, config, str(tmp_path / "a")
    )
    assert not (tmp_path / "a").exists()


def test_a_moved_field_is_named_with_its_new_place(monkeypatch, tmp_path):
    monkeypatch.setitem(moved.MOVED, "training.rate", "training.learning_rate")
    config = quickstart.get_config()
    validate(config)
    config.training.rate = 0.5
    refused(r"training\.rate is now training\.learning_rate", validate, config)
    record = tmp_path / "config.json"  # of a run of an earlier release
    record.write_text(json.dumps({"config": {"training": {"rate": 0.5}}}))
    assert recorded.get_config(str(record)).training.learning_rate == 0.5


def test_rows_of_fine_tuning_follow_the_longest_conversation():
    config = quickstart.get_config()
    config.sft.max_tokens = 4096
    assert config.sft.micro_batch_tokens == 4096
    config.sft.micro_batch_tokens = 8192
    assert config.sft.max_tokens == 4096
    validate(config)


MEASURED_THERE = {"metrics.placement": "rollout", "shaping.target": "none"}
TWO_LAYERS = {"metrics.layers": (-1, 0)}
IN_PARTS = {"rollout.in_flight": "keep", "rollout.max_staleness": 3}
GIVEN = {"rollout.given_responses": 1}
HINTS = {"rollout.hint_rounds": 3}
BRANCHES = {"rollout.branching": "cure"}
CHILDREN = {"rollout.jax_processes": 1, "rollout.max_staleness": 1}
SOURCES = {"model.references": ("a=x", "b=y")}
CONTRADICTIONS = [
    (SOURCES, "model.references", ("a=x", "a=y"), "'a' has two references; keep one"),
    (SOURCES, "model.references", ("=x",), "'=x' must be SOURCE=PATH"),
    (SOURCES, "model.reference_addresses", ("a=h",), "'h' must be host:port"),
    (SOURCES, "model.reference_addresses", ("h:1",), "that it serves, .*set model.reference_path"),
    (SOURCES, "model.reference_addresses", ("c=h:1",), "set c=PATH in model.references"),
    (SOURCES, "model.reference_addresses", ("a=h:1", "a=h:1"), "has 'a=h:1' more than once"),
    (SOURCES, "model.reference_addresses", ("a=h:1", "b=h:1"), "'h:1' serves both 'x' and 'y'"),
    (
        SOURCES | {"model.reference_addresses": ("b=127.0.0.1:1",)},
        "rollout.addresses",
        ("127.0.0.1:1",),
        "both name '127.0.0.1:1'; a replica has one model",
    ),
    (
        {"model.reference_path": "x", "model.reference_addresses": ("h:1",)},
        "training.offload",
        ("reference",),
        "replicas have it; remove 'reference'",
    ),
    (MEASURED_THERE, "hidden_states.source", "policy", "='policy'; set it to 'rollout'"),
    (MEASURED_THERE, "hidden_states.source", "none", "='none'; set it to 'rollout'"),
    (MEASURED_THERE, "metrics.device_batch", 4, "=4 is for the trainer's accelerator"),
    (TWO_LAYERS, "hidden_states.source", "policy", "has 0, but hidden_states.source='policy' has"),
    (TWO_LAYERS, "metrics.placement", "rollout", "has 0, but metrics.placement='rollout' has the"),
    ({"hidden_states.compare_every": 2}, "rollout.max_staleness", 1, "states of the same weights"),
    ({"rollout.top_p": 0.9}, "rollout.max_staleness", 1, "level_ahead='token' compares .* or leve"),
    ({"rollout.top_k": 3}, "rollout.max_staleness", 1, "level_ahead='token' compares .* or leve"),
    (IN_PARTS, "rollout.max_staleness", 1, "with 1 the next weights come after the batch"),
    (IN_PARTS, "rollout.max_staleness", 0, "with 0 the next weights come after the batch"),
    (IN_PARTS, "rollout.max_response_tokens", 2, "3 parts, which must be at most rollout.max_res"),
    (IN_PARTS, "algorithms.batch_rules.max_sampling_rounds", 2, "before earlier batches are"),
    (IN_PARTS, "metrics.placement", "rollout", "each would be measured alone; set it to 'trainer'"),
    (IN_PARTS, "data.curriculum", "window", "'window': responses are sampled in parts, before"),
    (GIVEN, "rollout.given_responses", 8, "=8 and rollout.group_size=8: a group must have a sam"),
    (GIVEN, "data.given_field", "solution", "name the field of data.files that has them; arith"),
    (GIVEN, "rewards.majority", True, "given responses would vote; leave one of them out"),
    (GIVEN, "data.curriculum", "window", "it would count given responses as solved; leave one"),
    (GIVEN, "algorithms.name", "distillation", "choose an algorithm that compares the responses"),
    (GIVEN, "algorithms.loss.given_surrogate", "x", "surrogate='x' must be one of luffy, rl_plus"),
    (
        GIVEN | {"algorithms.loss.given_surrogate": "sft"},
        "algorithms.name",
        "opo",
        "'sft' needs an algorithm that compares rewards with the mean of their group",
    ),
    (
        GIVEN | {"algorithms.loss.given_surrogate": "sft", "algorithms.loss.kl_coefficient": 0.0},
        "algorithms.advantage.kl_reward_coefficient",
        0.1,
        "the KL of given responses would count in the mean of their group",
    ),
    (
        GIVEN | {"algorithms.loss.given_surrogate": "sft"},
        "algorithms.advantage.credit",
        "turn",
        "later turns of given responses would count in the mean of their group",
    ),
    (
        {"rewards.probability_after": "A:"},
        "rewards.functions",
        ("math:name=a", "math_text:name=b"),
        "'A:' gives the rewards alone; remove it, or .* all but one of rewards.functions",
    ),
    (
        {"algorithms.name": "single_stream"},
        "algorithms.advantage.credit",
        "turn",
        "credit='turn' must be 'episode'",
    ),
    *(
        (
            {"algorithms.name": name},
            "shaping.target",
            target,
            f"'{name}' would take wrong responses with a bonus for correct ones",
        )
        for name, target in (
            ("noisy_rewards", "reward"),
            ("pacs", "both"),
            ("sample_reinforcement", "reward"),
        )
    ),
    ({}, "algorithms.name", "capo", "needs rewards of steps, and the verifier 'math' judges none"),
    (
        {"rewards.shuffle": True},
        "algorithms.name",
        "capo",
        "steps have rewards of their own, which",
    ),
    (HINTS, "rollout.given_responses", 1, "both help groups that fail; leave one of them out"),
    (HINTS, "data.curriculum", "window", "it would count prompts with hints as solved; leave one"),
    (HINTS, "rewards.majority", True, "no reference says which groups fail; leave one of them"),
    (HINTS, "data.hint_input", "{input}", "must have {input} and {hint}"),
    (HINTS, "data.given_field", "solution", "name the field of data.files that has solutions"),
    (HINTS, "algorithms.name", "single_stream", "it knows prompts without hints; leave one of"),
    (HINTS, "model.references", ("a=x",), "it knows prompts without hints; leave one of"),
    (HINTS, "rewards.model.tokenizer", "own", "it knows prompts without hints; leave one of"),
    (BRANCHES, "algorithms.advantage.credit", "turn", "differ; set 'episode', or trains_prefix=1"),
    (
        HINTS | {"rollout.max_staleness": 2},
        "rollout.in_flight",
        "keep",
        "in_flight='keep': set it to 'wait'",
    ),
    (BRANCHES, "rollout.group_size", 10, "=10: a response and its branches are 4; choose a mul"),
    (BRANCHES, "rollout.min_tokens", 3, "min_tokens=3: the tokens of a prefix would not count"),
    (BRANCHES, "rollout.presence_penalty", 0.5, "presence_penalty=0.5: the tokens of a prefix"),
    (BRANCHES, "rollout.frequency_penalty", 0.5, "frequency_penalty=0.5: the tokens of a prefix"),
    (BRANCHES, "metrics.placement", "rollout", "set it to 'trainer': a replica sees a part alone"),
    (
        BRANCHES | {"rollout.max_staleness": 2},
        "rollout.in_flight",
        "keep",
        "in_flight='keep': set it to 'wait'",
    ),
    (CHILDREN, "rollout.engine", "vllm", "and rollout.engine='vllm' both name replicas"),
    (
        {"rollout.router_replay": True},
        "rollout.engine",
        "vllm",
        "'vllm' does not send; set engine='jax'",
    ),
    (CHILDREN, "rollout.addresses", ("127.0.0.1:1",), "and rollout.addresses both name replicas"),
]


@pytest.mark.parametrize(("given", "field", "value", "message"), CONTRADICTIONS)
def test_what_contradicts_other_settings_is_named(given, field, value, message):
    config = quickstart.get_config()
    config.update_from_flattened_dict(given)
    validate(config)
    config.update_from_flattened_dict({field: value})
    refused(message, validate, config)


@pytest.mark.parametrize(
    ("rewards", "named"),
    [
        ({"function": "math"}, "math"),
        ({"functions": ("math_text", "model")}, "math_text"),
        ({"functions": ("model",)}, "math"),  # which tells what is correct
        ({"function": "reasoning_gym"}, None),
        ({"function": "math", "functions": ("reasoning_gym:weight=0.5",)}, None),
        ({"function": "my_module:grade"}, None),
    ],
)
def test_a_verifier_that_compares_is_named_with_procedural_problems(rewards, named):
    config = smollm2.get_config()
    config.rewards.update({"function": "", "model": {"path": "a/model"}} | rewards)
    found = remarks(config)
    assert len(found) == (named is not None)
    for line in found:
        assert f"{named!r} compares" in line and "rewards.function='reasoning_gym'" in line
    config.data.update(task="files", reasoning_gym=())
    assert not remarks(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment.name": ""}, "set both, or neither"),
        ({"data.task": "arithmetic"}, "set both, or neither"),
        ({"environment.name": "calculater"}, "a built-in environment: agent, calculator"),
        ({"environment.name": "calculator:terms=3:terms=2"}, "terms is set twice; keep one"),
        ({"rollout.branching": "cure"}, "an episode has turns; leave one of them out"),
        ({"rollout.hint_rounds": 3}, "only rows of files and arithmetic have solutions"),
        ({"environment.max_turns": 0}, "environment.max_turns=0 must be above 0"),
        ({"model.path": ""}, "model.path='': name a model whose tokenizer has a chat template"),
        ({"data.template": "plain"}, "data.template='plain': leave it out: messages are"),
        ({"data.system_prompt": "S"}, "data.system_prompt='S': leave it out"),
        ({"rewards.function": "math"}, "rewards.function='math': leave it out"),
        ({"model.references": ("a=x",)}, "all tasks are of one data source"),
        ({"rewards.functions": ("math",)}, r"rewards.functions=\('math',\): leave it out"),
        ({"rollout.in_flight": "keep", "rollout.max_staleness": 2}, "in_flight='keep': set it to"),
        ({"metrics.placement": "rollout"}, "metrics.placement='rollout': set it to 'trainer'"),
        (
            {"evaluation.metrics": True, "evaluation.metric_options.placement": "rollout"},
            "evaluation.metric_options.placement='rollout': set it to 'trainer'",
        ),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(config, changes, message):
    config.model.path = "a/model"
    config.data.task = "environment"
    config.environment.name = "calculator"
    validate(config)
    config.update_from_flattened_dict(changes)
    refused(message, validate, config)


def test_remarks_are_printed_once_also_if_quiet(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("semrl_jax.runs.setup.remarks", lambda config: ["warning: a remark"])
    config.data.update(task="files", files=("nowhere.jsonl",))  # ends the run soon after
    config.model.path = str(tmp_path / "none")
    refused(r"nowhere\.jsonl", train, config, str(tmp_path / "run"), quiet=True)
    assert capsys.readouterr().out.count("warning: a remark") == 1


def test_the_first_line_and_a_warning_tell_of_the_teacher():
    config = smollm2.get_config()
    config.rewards.majority, config.data.curriculum = True, "window"
    config.algorithms.name = "distillation"
    (warning,) = remarks(config)
    assert "nothing to learn" in warning
    config.model.reference_path = "a/teacher"
    assert not remarks(config)
    config.model.references = ("math=b",)
    added = "entropy bonus 0.001, reference a/teacher, reference math=b, curriculum window"
    assert (
        method_line(config)
        == f"method: distillation, VERL shaping of advantage, {added}, majority rewards"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("rewards.probability_after", "<answer>"), ("data.teacher_input", "{answer} {input}")],
)
def test_a_missing_reference_answer_is_named_where_it_is_read(
    config, monkeypatch, tmp_path, field, value
):
    """A procedural problem may have none."""
    made = setup.training_prompts

    def without_one(*arguments, **options):
        prompts = made(*arguments, **options)
        *others, last = prompts.examples
        return dataclasses.replace(
            prompts, examples=[*others, dataclasses.replace(last, answer="")]
        )

    monkeypatch.setattr(setup, "training_prompts", without_one)
    config.update_from_flattened_dict({field: value})
    message = f"^{field} needs a reference answer of each prompt, and one has none"
    refused(message, train, config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
