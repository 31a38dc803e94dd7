"""A real language model on a laptop: SmolLM2-135M-Instruct learns to add two-digit numbers.

    pip install -e '.[reasoning_gym]'
    python -m launch.prepare_model --name=smollm2-135m --output=runs/models/smollm2
    python -m launch.train --config=configs/smollm2.py --workdir=runs/smollm2

Hardware: 2 CPU cores, about 4.5 GiB. Expected: 6 to 10 minutes, a step in 8 to 20 s;
`eval/sums/greedy_accuracy` of 64 held-out problems as in docs/data.md#procedural-problems.
"""

from configs import default


def get_config():
    """The default with sizes for a model of 135 M parameters on a CPU."""
    config = default.get_config()
    config.model.path = "runs/models/smollm2"
    config.data.task = "reasoning_gym"
    config.data.reasoning_gym = (
        "basic_arithmetic:min_terms=2:max_terms=2:min_digits=2:max_digits=2"
        ':operators=["+"]:allow_negation=false:allow_parentheses=false'
        ":format_style=natural:contains=What is:name=sums",
    )
    config.data.template = "chat:{input} Reply with the number only."
    config.data.prompts_per_step = 8
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_response_tokens = 24
    config.rollout.jax_chunk_tokens = 8
    config.metrics.stride = 4
    config.rewards.function = "reasoning_gym"
    config.training.num_steps = 30
    config.training.prompts_per_minibatch = default.part_of(
        config.data.get_ref("prompts_per_step"), 8
    )
    config.training.micro_batch_size = 8
    config.training.learning_rate = 1e-5
    config.training.weight_decay = 0.0
    config.algorithms.loss.kl_coefficient = 0.0
    config.evaluation.num_problems = 64
    config.evaluation.every_steps = 10
    config.checkpoints.every_steps = 15
    config.logging.plot_every_steps = 0
    return config
