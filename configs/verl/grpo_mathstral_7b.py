"""GRPO with VERL on Mathstral-7B-v0.1 and MATH levels 3 to 5, template abel.

    for split in train test; do
      python -m launch.prepare_data --dataset=simplelr_abel_level3to5 --split=$split \\
          --output=data/simplelr_abel_level3to5_$split.parquet
    done
    python -m launch.train --config=configs/verl/grpo_mathstral_7b.py \\
        --workdir=runs/grpo_mathstral_7b --config.rollout.addresses=HOST:PORT

Hardware: 4 devices of 80 GB, as the launcher's, and others for sampling. With the
flags of configs/verl/grpo.py in place of the address, the same 4 sample too. Not run here yet.
Published (one run, mean Pass@1 of 15 sets): 44.2 before, 55.3 after.
"""

from configs.verl import grpo


def get_config():
    """The launcher's values with this model, its data and its response limit."""
    config = grpo.get_config()
    config.model.path = "mistralai/Mathstral-7B-v0.1"
    config.data.files = ("data/simplelr_abel_level3to5_train.parquet",)
    config.evaluation.files = ("data/simplelr_abel_level3to5_test.parquet",)
    config.rollout.max_response_tokens = 1536
    # " Question", "Question", " Answer", "Step", "Pro", "An". Departure: the release has their ids
    # in the vocabulary of Mistral-7B-v0.1, (22478, 24994, 26307, 9977, 933, 2820). Mathstral's has
    # 768 control tokens before them, so those ids would end a response at " chief" or " school".
    config.rollout.stop_token_ids = (23246, 25762, 27075, 10745, 1701, 3588)
    return config
