"""The library: what `import semrl_jax` gives, for scripts and notebooks."""

import warnings

# tqdm, which transformers imports, tells a notebook to install ipywidgets. Nothing here needs them.
warnings.filterwarnings("ignore", "IProgress not found")
