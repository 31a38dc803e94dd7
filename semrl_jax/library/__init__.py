"""The library: what `import semrl_jax` gives, for scripts and notebooks."""

import warnings

import jax

# tqdm, which transformers imports, tells a notebook to install ipywidgets. Nothing here needs them.
warnings.filterwarnings("ignore", "IProgress not found")
# launch/__init__.py does this before JAX is imported; here, a user may have imported it already.
_platforms = jax.config.jax_platforms
if _platforms and "cpu" not in _platforms.split(","):
    jax.config.update("jax_platforms", f"{_platforms},cpu")
