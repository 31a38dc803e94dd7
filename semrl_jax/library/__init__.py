"""The library: what `import semrl_jax` gives, for scripts and notebooks."""

import warnings

import jax

# tqdm, which transformers imports, tells a notebook to install ipywidgets. Nothing here needs them.
warnings.filterwarnings("ignore", "IProgress not found")
# As launch/__init__.py, which runs before JAX is imported; a user may have imported it.
_platforms = jax.config.jax_platforms
if _platforms and "cpu" not in _platforms.split(","):
    jax.config.update("jax_platforms", f"{_platforms},cpu")
