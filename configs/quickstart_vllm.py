"""The quickstart with vLLM as the rollout engine, in a replica that the trainer starts.

    third_party/vllm_patch/make_env.sh cpu
    python -m launch.train --config=configs/quickstart_vllm.py --workdir=runs/quickstart_vllm

Warm start, problems and updates are those of configs/quickstart.py. Only the sampling engine
differs. To use replicas that are already running, set --config.rollout.addresses.
"""

from configs import quickstart


def get_config():
    """The quickstart, sampled by vLLM."""
    config = quickstart.get_config()
    config.rollout.engine = "vllm"
    config.rollout.vllm_enforce_eager = True  # here compilation takes longer than it saves
    config.rollout.vllm_kv_cache_gib = 0.5
    config.hidden_states.compare_every = 10  # compares vLLM's states with the policy's own
    return config
