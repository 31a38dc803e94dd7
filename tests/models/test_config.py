"""What is read from and written to a Hugging Face `config.json`."""

import dataclasses
import json

import jax
import pytest
import transformers

from configs import default
from semrl_jax import models
from semrl_jax.models import attention_kernels
from semrl_jax.models.families import Family
from semrl_jax.models.of_config import build_policy, find_value_model
from semrl_jax.support.errors import UserError
from tests.cases import raised, refused
from tests.models.conftest import FAMILIES, LLAMA3_ROPE

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def hf_config(model_type, **fields):
    fields = {"model_type": model_type} | SIZES | fields
    return {key: value for key, value in fields.items() if value != "absent"}


def check_fields(config, theirs):
    """Our config has the values of transformers' config."""
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    kinds = enumerate(getattr(theirs, "layer_types", None) or ())
    full = tuple(layer for layer, kind in kinds if kind == "full_attention")
    assert config.full_attention_layers == (full if config.sliding_window else ())
    assert config.final_logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert config.attention_logit_softcap == getattr(theirs, "attn_logit_softcapping", None)
    rope = theirs.rope_parameters
    whole = rope.get("full_attention", rope)  # Gemma 3 has one for each kind of layer
    assert config.rope_theta == whole["rope_theta"]
    assert (config.rope_scaling is None) == (whole["rope_type"] == "default")
    if config.rope_scaling is not None:
        assert config.rope_scaling.factor == whole["factor"]
    assert config.local_rope_theta == rope.get("sliding_attention", {}).get("rope_theta")
    assert config.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_read_as_transformers_writes_it(family):
    config_class, options = FAMILIES[family]
    theirs = config_class(**(SIZES | options | {"rope_theta": 700.0, "rms_norm_eps": 1e-5}))
    config = models.config_from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    check_fields(config, theirs)
    assert config.num_kv_heads == 2
    assert models.config_from_hf(models.config_to_hf(config)) == config
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    "model_type",
    ["qwen2", "qwen3", "mistral", "llama", "gemma3_text", "gemma", "gemma2", "phi3", "mixtral"],
)
def test_absent_fields_have_the_defaults_of_transformers(model_type):
    fields = hf_config(model_type, use_sliding_window=True, max_window_layers=1)
    if model_type == "mixtral":
        fields |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    check_fields(models.config_from_hf(fields), transformers.AutoConfig.for_model(**fields))


def test_the_first_gemmas_name_of_its_activation_is_read():
    configs = [
        models.config_from_hf(hf_config("gemma", **fields))
        for fields in ({}, {"hidden_act": "gelu"}, {"hidden_act": None})
    ]
    assert configs[0] == configs[1] == configs[2]
    assert models.config_to_hf(configs[1])["hidden_act"] == "gelu_pytorch_tanh"


def test_gemmas_older_fields_mean_the_same():
    """The config of the 1B model on the hub has these older fields."""
    older = hf_config(
        "gemma3_text", num_hidden_layers=7, sliding_window_pattern=3, rope_theta=900.0,
        rope_local_base_freq=50.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=None, head_dim=32,
    )  # fmt: skip
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(older)))
    config = models.config_from_hf(older)
    assert config == models.config_from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    assert config.full_attention_layers == (2, 5)
    assert (config.rope_theta, config.local_rope_theta) == (900.0, 50.0)
    assert config.rope_scaling == models.RopeScaling("linear", 8.0)
    written = models.config_to_hf(config)
    again = transformers.AutoConfig.for_model(**written)
    assert again.rope_parameters == theirs.rope_parameters
    assert again.layer_types == theirs.layer_types


FLAT_ROPE = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
OLD_ROPE = {("type" if k == "rope_type" else k): v for k, v in FLAT_ROPE.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": FLAT_ROPE, "rope_theta": 500.0},
        {"rope_scaling": OLD_ROPE, "rope_theta": 500.0},
        {"rope_parameters": FLAT_ROPE, "rope_theta": 500.0},
        {"rope_scaling": LLAMA3_ROPE, "rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}},
    ],
)
def test_nested_and_flat_rope_fields_mean_the_same(fields):
    fields = hf_config("llama", **fields)
    config = models.config_from_hf(fields)
    assert config.rope_theta == 500.0
    assert dataclasses.asdict(config.rope_scaling) | {"rope_theta": 500.0} == LLAMA3_ROPE
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(fields)))
    assert theirs.rope_parameters["rope_theta"] == 500.0


def test_hashes_equal_those_of_earlier_versions():
    """Recorded with the version that knew Qwen2 alone; checkpoints and replicas compare them."""
    sizes = {"num_layers": 24, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64}
    config = models.DecoderConfig(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, rope_theta=1e6,
        tie_embeddings=True, **sizes,
    )  # fmt: skip
    assert config.hash == "a2fad12262e9f5a8fd16642806fcbf9ee30bec605576573f618f441436dda306"
    scaling = models.RopeScaling("linear", 2.0)
    others = [
        dataclasses.replace(config, **change)
        for change in (
            {"sliding_window": 8}, {"sliding_window": 9}, {"rope_scaling": scaling},
            {"sliding_window": 8, "full_attention_layers": (0,)}, {"model_type": "llama"},
            {"rope_scaling": dataclasses.replace(scaling, factor=3.0)},
        )
    ]  # fmt: skip
    assert len({config.hash, *(other.hash for other in others)}) == 7


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gpt2", {}, "model_type='gpt2' is not supported.*by model.family"),
        ("gemma3", {"text_config": {}}, "model_type='gemma3' is not supported.*save its text part"),
        ("qwen2", {"vocab_size": "absent"}, "field 'vocab_size' is missing"),
        ("mistral", {"num_key_value_heads": "absent"}, "field 'num_key_value_heads' is missing"),
        ("qwen2", {"vocab_size": 0}, "vocab_size=0 must be a whole number from 1 to 16777216"),
        ("qwen2", {"vocab_size": 2**64}, "vocab_size=18446744073709551616 must be a whole number"),
        ("qwen2", {"hidden_size": True}, "hidden_size=True must be a whole number"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must .* to 4096"),
        ("llama", {"hidden_size": 1, "head_dim": None}, "head_dim=0 must be a whole number"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be a number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be a finite number above 0"),
        ("llama", {"rope_theta": 10**400}, "rope_theta=10000.* must be a number"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        ("llama", {"mlp_bias": []}, r"mlp_bias=\[\] must be true or false"),
        ("qwen2", {"max_window_layers": "all"}, "max_window_layers='all' must be a number"),
        ("llama", {"rope_scaling": {"rope_type": []}}, r"rope_type=\[\] must be text"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' must be a numb"),
        ("llama", {"hidden_act": ["x" * 10_000]}, r"hidden_act=\['x{10,99} is not supported"),
        ("qwen2", {"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ("llama", {"head_dim": 7}, "head_dim=7 must be even"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "field 'factor' is missing"),
        (
            "llama",
            {"rope_scaling": FLAT_ROPE | {"low_freq_factor": 4.0}},
            "low_freq_factor=4.0 must lie between 0 and high_freq_factor=4.0",
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0.0 must be above 0"),
        ("llama", {"rope_scaling": "llama3"}, "rope_scaling='llama3' must be an object"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters of each kind of layer are not supported",
        ),
        ("llama", {"attention_bias": True}, "attention_bias=true is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "'gelu' .*, only 'gelu_pytorch_tanh'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not support"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window=null does not fit the layers"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": [1]}}, "sliding_attention=.* mu"),
        ("gemma3_text", {"sliding_window_pattern": "6"}, "sliding_window_pattern='6' must be"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type='linear' of sliding_attention is not supported",
        ),
        ("gemma3_text", {"final_logit_softcapping": -1.0}, "final_logit_softcap=-1.0 must be a"),
        ("gemma3_text", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar='x' must be"),
        ("gemma2", {"sliding_window": None}, "sliding_window=null does not fit the layers"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attention_logit_softcap=0.0 must be a"),
        ("gemma2", {"num_hidden_layers": "3"}, "num_hidden_layers='3' must be a whole number"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not .*4k"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75 is not supported"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be a whole number from 1"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, r"layer_types .*chunked_attention"),
        ("qwen2", {"layer_types": [[], {}, 3]}, r"layer_types has \[\]; each must be one of"),
        ("qwen2", {"layer_types": ["full_attention"]}, "a list of num_hidden_layers=3 kinds"),
        ("qwen2", {"layer_types": 3}, "layer_types=3 must be a list"),
        ("qwen3_moe", {"num_experts": "absent"}, "field 'num_experts' is missing"),
        ("qwen3_moe", {"num_experts_per_tok": "absent"}, "field 'num_experts_per_tok' is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "experts_per_token=9 must be at most num_exper"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be a whole num"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "experts: no layer has them"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a whole number"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
    ],
)
def test_unsupported_architectures_are_refused(model_type, change, message):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    fields = hf_config(model_type, **(experts if model_type == "qwen3_moe" else {}) | change)
    refused(r"^config\.json: .*" + message, models.config_from_hf, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama", "sliding_window": 8}, "'llama' has no sliding_window=8"),
        (
            {"model_type": "mistral", "sliding_window": 8, "full_attention_layers": (0,)},
            "that mixes layers, not 'mistral'",
        ),
        ({"full_attention_layers": (0,)}, "needs a sliding_window"),
        ({"final_logit_softcap": 30.0}, "'qwen2' has no final_logit_softcap=30.0"),
        ({"model_type": "gemma3_text", "local_rope_theta": 10.0}, "local_rope_theta=10.0 needs la"),
        ({"sliding_window": 8, "full_attention_layers": (3,)}, "must be below num_layers"),
    ],
)
def test_options_the_family_does_not_have_are_refused(fields, message):
    config = models.config_from_hf(hf_config("qwen2"))
    refused(message, dataclasses.replace, config, **fields)


OWN = "tests.models.own_family"


def test_a_family_of_another_package():
    config = models.config_from_hf(hf_config("qwen3", head_dim=32))
    hf = models.config_to_hf(dataclasses.replace(config, model_type="own", family=OWN))
    assert (hf["n_embd"], hf["n_layer"], hf["architectures"]) == (64, 3, ["OwnForCausalLM"])
    assert "hidden_size" not in hf
    del hf["head_dim"]
    own = models.config_from_hf(hf, OWN)
    assert dataclasses.replace(own, model_type="qwen3", family="") == config
    assert (
        own.declared.query_key_norm and not own.declared.attention_bias and own.hash != config.hash
    )
    assert models.tensor_specs(own, "float32") == models.tensor_specs(config, "float32")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "gpt2",
            r"model.family='gpt2' is unknown; choose one of \('gemma', 'gemma2', 'gemma3_text', ",
        ),
        ("tests.models.missing", "cannot be imported .ModuleNotFoundError: .*PYTHONPATH"),
        ("tests.models.conftest", "has no 'FAMILY'"),
        (OWN, r"model_type='llama' is not 'own', which model.family='tests.models.own_family'"),
    ],
)
def test_a_wrong_family_is_named(family, message):
    refused(message, models.config_from_hf, hf_config("llama"), family)


def test_a_family_is_chosen_for_a_random_model():
    settings = default.get_config()
    settings.model.family = OWN
    policy, _ = build_policy(settings)
    assert policy.config.declared.query_key_norm and policy.config.model_type == "own"
    settings.model.family = "llama"
    policy, _ = build_policy(settings)
    assert (policy.config.model_type, policy.config.family) == ("llama", "")


def test_a_critic_may_be_of_the_policys_family_or_of_another(tmp_path):
    settings = default.get_config()
    settings.model.hidden_size = 32
    for family in ("qwen2", OWN):
        settings.model.family = family
        policy, tokenizer = build_policy(settings)
        params = policy.init(jax.random.key(0))
        models.save_directory(tmp_path / family, params, policy.config, tokenizer)
    for family, own in (("qwen2", ""), (OWN, OWN)):
        path = str(tmp_path / family)
        found = find_value_model("critic.path", path, settings, policy, tokenizer, None)
        assert found.model.config.family == own


def test_a_critic_that_the_kernel_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(attention_kernels.PLATFORMS, "triton", ("cpu",))
    settings = default.get_config()
    settings.model.attention, settings.model.hidden_size = "triton", 32
    policy, tokenizer = build_policy(settings)
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    policy.check_attention(mesh)
    own = dataclasses.replace(policy.config, sliding_window=4)
    models.save_directory(tmp_path, policy.init(jax.random.key(0)), own, tokenizer)
    found = settings, policy, tokenizer, mesh
    line = r"critic\.path=.*: model\.attention='triton' has no windows, .* sliding_window=4"
    refused(line, find_value_model, "critic.path", str(tmp_path), *found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sliding_window": "often"}, "sliding_window='often' must be none, all or some"),
        ({"head_dim": 0}, "head_dim=0 must be a whole number above 0"),
        ({"activation": "relu"}, "activation='relu' must be one of"),
        (
            {"attention_bias": True, "fused": {"qkv": ("query", "key", "value")}},
            "fused='qkv' has the query, whose bias lies between the kernels",
        ),
    ],
)
def test_a_family_with_a_wrong_field_is_refused(wrong, message):
    raised(ValueError, message, Family, "mine", "MineForCausalLM", **wrong)


@pytest.mark.parametrize(("part", "name"), [("from_hf", "read"), ("to_hf", "write")])
def test_a_users_family_that_fails_is_refused_in_one_line(part, name, tmp_path, monkeypatch):
    (tmp_path / "users_families").mkdir()
    (tmp_path / "users_families" / f"{part}.py").write_text(
        "from semrl_jax.models.families import Family\n"
        f"def {name}(fields):\n    raise OSError('two\\nlines')\n"
        f"FAMILY = Family('mine', 'MineForCausalLM', {part}={name})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hf = hf_config("mine")
    with pytest.raises(UserError, match=f"model.family: {name} of .* failed .OSError") as caught:
        config = models.config_from_hf(hf, f"users_families.{part}")
        models.config_to_hf(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "family", ["gemma3_text", "gemma", "gemma2", "phi3", "qwen3_moe", "mixtral"]
)
def test_a_random_model_has_the_hash_of_its_directory(family):
    config = models.random_config(
        family, vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2,
        num_kv_heads=1, head_dim=16,
    )  # fmt: skip
    hf = json.loads(json.dumps(models.config_to_hf(config)))
    assert models.config_from_hf(hf).hash == config.hash


def test_experts_belong_to_a_family_that_has_them():
    config = models.config_from_hf(hf_config("qwen3"))
    with pytest.raises(UserError, match="model_type='qwen3' has no experts"):
        dataclasses.replace(config, experts=models.Experts(8, 2, 48, True))
    with pytest.raises(UserError, match="model_type='qwen3_moe' needs experts"):
        dataclasses.replace(config, model_type="qwen3_moe")
