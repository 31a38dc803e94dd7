import pytest

from semrl_jax.data import character_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The character tokenizer, made once."""
    return character_tokenizer()
