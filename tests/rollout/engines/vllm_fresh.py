"""Greedy responses of a vLLM that has read its weights from disk; run with the replica's python.

    python -m tests.rollout.engines.vllm_fresh MODEL_DIRECTORY MAX_TOKENS < PROMPTS > RESPONSES

Prompts and responses are JSON lists of lists of token ids; the responses are the last line.
"""

import json
import sys

import vllm
from vllm.inputs import tokens_input

if __name__ == "__main__":
    directory, max_tokens = sys.argv[1:]
    engine = vllm.LLM(
        model=directory, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=512, kv_cache_memory_bytes=2**28,
    )  # fmt: skip
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=int(max_tokens), ignore_eos=True, detokenize=False
    )
    prompts = [tokens_input(ids) for ids in json.load(sys.stdin)]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
