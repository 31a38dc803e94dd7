"""semrl_jax: RLVR for language models in JAX, with the semantic-space shaping of VERL.

Importing the package loads no accelerator library; each room imports what it needs.
"""

__version__ = "0.1.0"
