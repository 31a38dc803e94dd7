"""semrl_jax: RLVR for language models in JAX, with the semantic-space shaping of VERL.

    trainer = semrl_jax.Trainer("runs/first", model=..., prompts=..., reward=...)
    model = semrl_jax.LanguageModel("runs/first")

Importing the package loads no accelerator library; each room imports what it needs.
"""

from semrl_jax.support.lazy import lazy_names

__getattr__ = lazy_names(
    __name__, {"LanguageModel": "library.language_model", "Trainer": "library.trainer"}
)

__version__ = "0.1.0"
