"""One process for each system that benchmarks/step.py compares.

`trl_grpo.py`, `transformers_generate.py`, `tunix_grpo.py`, `protocol.py` and `reward.py` run in an
environment of make_env.sh, without this project. `ours.py` runs with it.
"""
