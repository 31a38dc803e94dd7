"""The quickstart with LoRA: adapters upon a frozen base, which is also the reference.

    python -m launch.train --config=configs/quickstart_lora.py --workdir=runs/quickstart_lora

Hardware: 2 CPU cores, about 1.9 GiB. Expected: under 2 minutes,
`eval/arithmetic/greedy_accuracy` from about 0.28 to about 0.93.
"""

from configs import quickstart


def get_config():
    """The quickstart, whose policy has adapters of rank 8 in all linear modules."""
    config = quickstart.get_config()
    config.lora.rank = 8
    config.lora.alpha = 16.0
    config.training.learning_rate = 1e-3  # adapters take a larger rate than all parameters
    config.training.export = "float32"  # the merged model, and the adapter in PEFT's format
    return config
