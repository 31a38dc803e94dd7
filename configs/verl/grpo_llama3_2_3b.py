"""GRPO with VERL on Llama-3.2-3B-Instruct and MATH levels 1 to 4, template abel.

    for split in train test; do
      python -m launch.prepare_data --dataset=simplelr_abel_level1to4 --split=$split \\
          --output=data/simplelr_abel_level1to4_$split.parquet
    done
    python -m launch.train --config=configs/verl/grpo_llama3_2_3b.py \\
        --workdir=runs/grpo_llama3_2_3b --config.rollout.addresses=HOST:PORT

Hardware: 4 devices of 80 GB, as the launcher's, and others for sampling. With the
flags of configs/verl/grpo.py in place of the address, the same 4 sample too. Not run here yet.
Published (one run, mean Pass@1 of 15 sets): 31.0 before, 43.4 after.
"""

from configs.verl import grpo


def get_config():
    """The launcher's values with this model, its data and its response limit."""
    config = grpo.get_config()
    config.model.path = "meta-llama/Llama-3.2-3B-Instruct"
    config.data.files = ("data/simplelr_abel_level1to4_train.parquet",)
    config.evaluation.files = ("data/simplelr_abel_level1to4_test.parquet",)
    config.rollout.max_response_tokens = 1280
    # "Question", "Answer": the release's values for Llama (vllm_rollout.py of its rollout workers).
    config.rollout.stop_token_ids = (14924, 16533)
    return config
