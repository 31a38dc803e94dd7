"""Supervised fine-tuning on GSM8K's worked solutions, with any model.

The rows have a question and a solution, so the row format is prompt_completion. For data of your
own, start from configs/default.py, as docs/data.md shows. The small random model learns only which
words are frequent. For a real model, set its path, the lengths and the learning rate. The later
reinforcement learning is that of configs/gsm8k.py, with the same template.

    python -m launch.prepare_data --dataset=gsm8k --output=data/gsm8k.jsonl
    python -m launch.random_model --text=data/gsm8k.jsonl --output=runs/models/gsm8k_tiny
    python -m launch.sft --config=configs/sft.py --workdir=runs/sft
    python -m launch.train --config=configs/sft.py --workdir=runs/gsm8k \
        --config.model.path=runs/sft/model

Hardware: 2 CPU cores, about 1 GiB. Expected: 40 steps in a few minutes, the loss from 7.5 to
about 4.3 nats per token.
"""

from configs import gsm8k


def get_config():
    """GSM8K as conversations and as prompts, with a rate for a small random model."""
    config = gsm8k.get_config()
    config.sft.files = ("data/gsm8k.jsonl",)
    config.sft.row_format = "prompt_completion"
    config.sft.prompt_fields = ("question",)
    config.sft.completion_field = "answer"
    config.sft.template = "qwen-boxed"
    config.sft.max_tokens = 1024
    config.sft.num_steps = 40
    config.sft.batch_size = 16
    config.sft.learning_rate = 3e-3  # 1e-5 for a trained model
    return config
