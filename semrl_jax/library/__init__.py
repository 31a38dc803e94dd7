"""The library: what `import semrl_jax` gives, for scripts and notebooks."""
