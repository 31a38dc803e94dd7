"""A byte-level BPE tokenizer trained on a user's own text, for small models to experiment with."""

from __future__ import annotations

from collections.abc import Iterable

from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.errors import UserError

PAD_TOKEN, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_FIXED = 256 + 3  # every byte is a token, so that any text can be written; and the three above


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer like Qwen2's, with its padding and turn tokens and its chat template.

    The template writes `<|im_start|>role\\ntext<|im_end|>\\n` and ends a response at `<|im_end|>`.

    Args:
      texts: the merges are learned from them.
      vocab_size: tokens, at least 260; the result has fewer if the texts have fewer.

    Raises:
      UserError: if `vocab_size` is below 260.
    """
    if vocab_size <= NUM_FIXED:
        raise UserError(f"vocab_size={vocab_size} must be above {NUM_FIXED}: bytes have their own.")
    import transformers

    tokenizer = transformers.Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size, new_special_tokens=[TURN_START, TURN_END], show_progress=False
    )
    tokenizer.eos_token = TURN_END
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
