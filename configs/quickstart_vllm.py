"""The quickstart with vLLM as the rollout engine: a replica of its own, a child of the trainer.

    third_party/vllm_patch/make_env.sh cpu
    python -m launch.train --config=configs/quickstart_vllm.py --workdir=runs/quickstart_vllm

Warm start, problems and updates are those of configs/quickstart.py; only what samples is another.
Replicas that are there already are named by --config.rollout.addresses.
"""

from configs import quickstart


def get_config():
    """The quickstart, sampled by vLLM."""
    config = quickstart.get_config()
    config.rollout.engine = "vllm"
    config.rollout.vllm_enforce_eager = True  # compiling takes longer than it saves here
    config.rollout.vllm_kv_cache_gib = 0.5
    config.hidden_states.compare_every = 10  # vLLM's states beside the policy's own
    return config
