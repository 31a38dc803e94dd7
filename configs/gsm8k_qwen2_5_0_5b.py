"""GSM8K with Qwen2.5-0.5B-Instruct on one GPU: GRPO with VERL. docs/train_your_model.md

    python -m launch.prepare_data --dataset=gsm8k --output=data/gsm8k.jsonl
    python -m launch.prepare_data --dataset=gsm8k --split=test --output=data/benchmarks/gsm8k.jsonl
    python -m launch.train --config=configs/gsm8k_qwen2_5_0_5b.py --workdir=runs/gsm8k_0_5b

Hardware: one GPU, estimated 17 GiB. The whole run has not been made yet.
"""

from configs import default


def get_config():
    """The default with GSM8K, Qwen2.5-0.5B-Instruct and sizes for one GPU."""
    config = default.get_config()
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.model.compute_dtype = "bfloat16"  # parameters and optimiser are float32
    config.model.reference_dtype = "bfloat16"

    config.data.task = "files"
    config.data.files = ("data/gsm8k.jsonl",)
    config.data.answer_after = "####"
    config.data.template = "qwen-boxed"
    config.data.prompts_per_step = 64
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 384
    config.rollout.max_response_tokens = 512
    config.rollout.jax_max_batch = 256
    config.metrics.stride = 20  # responses have 100 to 300 tokens; ERA needs 3 strides
    config.metrics.num_threads = 8
    config.rewards.num_workers = 8
    # The engine computes in bfloat16 too, but rounds differently than the update.
    config.algorithms.importance.level = "token"

    config.training.num_steps = 200
    # One update per step.
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 64
    )
    config.training.pack_sequences = True
    config.training.micro_batch_tokens = default.at_least(
        config.rollout.get_ref("max_prompt_tokens") + config.rollout.get_ref("max_response_tokens"),
        4096,
    )
    config.training.learning_rate = 1e-6
    config.training.learning_rate_warmup_steps = 10
    config.evaluation.benchmarks = ("gsm8k:num_problems=256",)
    config.evaluation.held_out = False  # the benchmark above is the test split
    config.evaluation.every_steps = 20
    config.checkpoints.every_steps = 20
    return config
