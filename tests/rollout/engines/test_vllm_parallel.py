"""A vLLM replica of two devices: each worker has half of every layer, rank 0 has all states."""

import pytest

from tests.rollout.engines.test_vllm import (
    BOTH,
    Model,
    assert_right,
    random_prompts,
    requests_of,
    sampled,
)
from tests.rollout.engines.vllm_replica import serving

FLAGS = (
    "--config.rollout.vllm_tensor_parallelism=2", "--config.rollout.max_prompt_tokens=200",
    "--config.rollout.max_response_tokens=64", "--config.rollout.vllm_max_num_seqs=16",
    "--config.rollout.vllm_max_num_batched_tokens=64", "--config.rollout.vllm_kv_cache_gib=0.05",
)  # fmt: skip
# Worker processes; on a CPU each gets its own cores.
WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.soak
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tensor_parallel_states_and_logprobs_are_those_of_a_forward_pass(tmp_path, tied):
    models = [Model(tmp_path, tied, seed=seed) for seed in (0, 1)]
    requests = requests_of(random_prompts(models[0], [1, 7, 64, 65, 130, 200]), 2)
    with serving(models[0].path, *FLAGS, variables=WORKERS) as client:
        for step, model in enumerate([*models, models[0]]):
            version = model.sync(client, step)
            assert_right(sampled(client, version, requests, states=BOTH).values(), model)
