"""Every field of transformers' classes is read, refused, or has no effect on logits."""

import dataclasses
import json

import pytest
import transformers

from semrl_jax import models
from semrl_jax.support.errors import UserError
from tests.models.conftest import FAMILIES
from tests.models.test_config import SIZES

# With another value, the architecture is another one, or the config is refused. None: the opposite.
OTHER = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_act": "relu",
    "hidden_activation": "relu", "max_position_embeddings": 77, "rms_norm_eps": 0.5,
    "tie_word_embeddings": None, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"},
    "attention_bias": True, "mlp_bias": True, "sliding_window": 5, "use_sliding_window": None,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24,
    "decoder_sparse_step": 3, "norm_topk_prob": None, "mlp_only_layers": [1],
    "query_pre_attn_scalar": 3, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 3.0,
    "use_bidirectional_attention": True, "is_encoder_decoder": True,
}  # fmt: skip
# The same for what transformers takes from the keywords, in every family.
KEYWORDS = {
    "partial_rotary_factor": 0.5, "per_layer_config": {"0": {"head_dim": 8}}, "is_causal": False,
    "add_cross_attention": True, "quantization_config": {"bits": 4},
}  # fmt: skip
OUR_NAMES = {"hidden_activation": "hidden_act"}
UNUSED = [("qwen3-moe", "sliding_window")]  # read if use_sliding_window is true, which is refused
# Without effect on the logits: names, generation, initial values, losses and dropout of a training
# by transformers, speed.
WITHOUT_EFFECT = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "initializer_range",
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp",
    "attention_dropout", "output_router_logits", "router_aux_loss_coef", "output_attentions",
    "_name_or_path", "model_type", "router_jitter_noise", "_sliding_window_pattern",
    "embd_pdrop", "resid_pdrop",
    "original_max_position_embeddings",  # of longrope, which is refused
    "max_window_layers",  # layer_types, which every file of transformers has, comes first
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2-window", "qwen3-window", "qwen3-moe", "gemma3", "gemma", "gemma2",
     "phi3", "mixtral"],
)  # fmt: skip
def test_every_field_of_transformers_is_read_or_refused(family):
    config_class, options = FAMILIES[family]
    theirs = config_class(**(SIZES | options))
    written = json.loads(theirs.to_json_string(use_diff=False))
    names = {field.name for field in dataclasses.fields(config_class)} | written.keys()
    assert names <= OTHER.keys() | WITHOUT_EFFECT
    config = models.config_from_hf(written)
    length = written.pop("max_position_embeddings")  # SIZES has no other than the default
    assert models.config_from_hf(written).max_position_embeddings == length
    changes = {name: value for name, value in OTHER.items() if name in names} | KEYWORDS
    for name, value in changes.items():
        other = value if value is not None else not written[name]
        try:
            changed = models.config_from_hf(written | {name: other})
        except UserError as error:
            assert OUR_NAMES.get(name, name) in str(error)
        else:
            assert changed != config or (family, name) in UNUSED, name
    for name in names & WITHOUT_EFFECT - {"model_type"}:
        assert models.config_from_hf(written | {name: "other"}) == config, name


def test_the_classes_are_those_of_the_families():
    found = {config_class.model_type for config_class, _ in FAMILIES.values()}
    assert found == {*models.families.model_types()}
    assert all(issubclass(c, transformers.PreTrainedConfig) for c, _ in FAMILIES.values())
