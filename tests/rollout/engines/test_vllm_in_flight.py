"""New weights while responses are running: the responses are aborted, or kept and continued."""

import concurrent.futures
import time

import numpy as np
import pytest

from semrl_jax.types import SamplingParams
from tests.rollout.engines.test_vllm import (
    BOTH,
    Model,
    assert_prompt_right,
    random_prompts,
    requests_of,
)
from tests.rollout.engines.vllm_replica import serving

LONG = SamplingParams(max_tokens=440, temperature=0.8)


@pytest.mark.parametrize(
    "in_flight",
    [
        pytest.param("keep", marks=pytest.mark.soak),
        pytest.param("abort", marks=pytest.mark.soak),
    ],
)
def test_running_responses_meet_new_weights(tmp_path, in_flight):
    """Every state agrees with a forward pass under the weights that its token names."""
    models = [Model(tmp_path, tied=True, seed=seed) for seed in (0, 1)]
    flags = (
        f"--config.rollout.in_flight={in_flight}", "--config.rollout.vllm_max_num_seqs=8",
        "--config.rollout.vllm_kv_cache_gib=0.1",
        "--config.rollout.max_prompt_tokens=64", "--config.rollout.max_response_tokens=440",
    )  # fmt: skip
    prompts = random_prompts(models[0], [1, 5, 17, 33, 48, 64])
    with serving(models[0].path, *flags) as client, client.replica.caller() as caller:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:

            def generate(version, sampling, group_size=1):
                requests = requests_of(prompts, group_size)
                return list(caller.generate(requests, sampling, BOTH, version=version))

            # The time for 440 tokens depends on the machine; so update once responses are running.
            for attempt, delay_s in enumerate((0.5, 0.25, 0.1, 0.05)):
                old = models[0].sync(client, 2 * attempt)
                call = pool.submit(generate, old, LONG)
                time.sleep(delay_s)
                new = models[1].sync(client, 2 * attempt + 1)
                rollouts = call.result(timeout=60)
                if any(len(r.versions) == 2 or r.finish_reason == "aborted" for r in rollouts):
                    break
            # 60 responses run, eight at a time; some are kept over an update and then aborted.
            call = pool.submit(generate, new, LONG, 10)
            time.sleep(0.5)
            again = models[0].sync(client, 100)
            time.sleep(0.1)
            caller.abort()
            aborted = [r for r in call.result(timeout=60) if r.finish_reason == "aborted"]
    begun = [rollout for rollout in aborted if len(rollout.response_ids)]
    assert begun
    for rollout in begun:
        versions = [span.version for span in rollout.versions]
        assert versions in ([[new, again], [again]] if in_flight == "keep" else [[new]])
        assert rollout.versions[-1].end == len(rollout.response_ids) < 440
    assert in_flight == "abort" or any(len(rollout.versions) == 2 for rollout in rollouts)
    of_version = {old: models[0], new: models[1]}
    assert len(rollouts) == len(prompts)
    for rollout in rollouts:
        length = len(rollout.response_ids)
        versions = [span.version for span in rollout.versions]
        if in_flight == "keep":
            # On a fast machine a response may end before the new weights come.
            assert versions in ([old, new], [old]) and rollout.finish_reason == "length"
        else:
            assert versions == [old] and rollout.finish_reason in ("aborted", "length")
        ends = [span.end for span in rollout.versions]
        assert [span.start for span in rollout.versions] == [0, *ends[:-1]] and ends[-1] == length
        assert 0 < ends[0] <= 440
        assert_prompt_right(rollout, of_version[versions[0]])
        for span in rollout.versions:
            states, _ = of_version[span.version].states_and_logits(rollout)
            own = slice(span.start, span.end)
            found = rollout.hidden_states[own, 0].astype(np.float32)
            error = np.linalg.norm(found - states[own], axis=1)
            assert (error / np.linalg.norm(states[own], axis=1)).max() < 1e-5
