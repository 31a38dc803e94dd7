"""GSM8K from a JSON Lines file: the path from real problems to a reward, with any model.

The rows are as published: {"question": ..., "answer": "... #### 18"}. The small random model below
learns nothing in 10 steps, because no response is right. The run only shows that files, template,
verifier, sampling, update, checkpoints and evaluation work together. For a real model, set its
path, the lengths and the number of steps.

    python -m launch.prepare_data --dataset=gsm8k --output=data/gsm8k.jsonl
    python -m launch.random_model --text=data/gsm8k.jsonl --output=runs/models/gsm8k_tiny
    python -m launch.train --config=configs/gsm8k.py --workdir=runs/gsm8k

Hardware: 2 CPU cores, about 1 GiB. Expected: 10 steps in about a minute,
`eval/gsm8k/greedy_accuracy` near 0.
"""

from configs import default


def get_config():
    """The default with GSM8K as data and sizes for a small model."""
    config = default.get_config()
    config.model.path = "runs/models/gsm8k_tiny"
    config.data.task = "files"
    config.data.files = ("data/gsm8k.jsonl",)
    config.data.answer_after = "####"
    config.data.template = "qwen-boxed"
    config.data.prompts_per_step = 8
    config.evaluation.files = ("data/gsm8k.jsonl",)  # for a test only; evaluate on the test split
    config.evaluation.num_problems = 32
    config.evaluation.every_steps = 5
    config.rollout.group_size = 4
    config.rollout.max_prompt_tokens = 512
    config.rollout.max_response_tokens = 128
    config.metrics.stride = 16
    config.training.num_steps = 10
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 8
    )
    config.training.micro_batch_size = 8
    config.checkpoints.every_steps = 5
    return config
