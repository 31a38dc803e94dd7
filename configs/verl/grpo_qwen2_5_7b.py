"""GRPO with VERL on Qwen2.5-7B and MATH levels 3 to 5, template qwen-boxed.

    for split in train test; do
      python -m launch.prepare_data --dataset=simplelr_qwen_level3to5 --split=$split \\
          --output=data/simplelr_qwen_level3to5_$split.parquet
    done
    python -m launch.train --config=configs/verl/grpo_qwen2_5_7b.py \\
        --workdir=runs/grpo_qwen2_5_7b --config.rollout.addresses=HOST:PORT

Hardware: 4 devices of 80 GB, as the launcher's, and others for sampling. With the
flags of configs/verl/grpo.py in place of the address, the same 4 sample too. Not run here yet.
Published (one run, mean Pass@1 of 15 sets): 53.6 before, 59.8 after.
"""

from configs.verl import grpo


def get_config():
    """The launcher's values with this model, its data and its response limit."""
    config = grpo.get_config()
    config.model.path = "Qwen/Qwen2.5-7B"
    config.data.files = ("data/simplelr_qwen_level3to5_train.parquet",)
    config.evaluation.files = ("data/simplelr_qwen_level3to5_test.parquet",)
    config.rollout.max_response_tokens = 1536  # data, limit: unpublished, as Mathstral
    # "<|im_end|>", "<|endoftext|>", "user", "assistant", "User", "Assistant", "<|im_start|>" and
    # "system": the release's values for Qwen2.5-7B (vllm_rollout.py of its rollout workers).
    config.rollout.stop_token_ids = (151645, 151643, 872, 77091, 1474, 71703, 151644, 8948)
    return config
