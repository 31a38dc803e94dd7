"""Tiny random Qwen2 models, the same for recording and for the comparison."""

import os

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

VOCAB_SIZE, PAD, EOS = 48, 0, 1


def random_model(*, tied: bool) -> transformers.Qwen2ForCausalLM:
    """Float32 weights of seed 0; biases and norms off their neutral values."""
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        eos_token_id=EOS,
        rope_theta=100.0,  # at 10 000 a key bias hardly turns and has a gradient of almost 0
    )
    model = transformers.Qwen2ForCausalLM(config).eval().float()
    return fill(model, seed=0, mean_of_norms=0.6, std=0.2)


def fill(
    model: transformers.Qwen2ForCausalLM, *, seed: int, mean_of_norms: float, std: float
) -> transformers.Qwen2ForCausalLM:
    """Replaces all parameters by normal ones; norms and biases are shifted by their mean."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 0.0 if parameter.dim() > 1 else mean_of_norms
            parameter.normal_(mean=mean, std=std, generator=generator)
    return model


def disturbed(model: transformers.Qwen2ForCausalLM) -> transformers.Qwen2ForCausalLM:
    """A copy a few percent away: a reference whose KL from the policy is not 0."""
    copy = type(model)(model.config).eval().float()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return copy
