"""Models by devices: the memory and the limits of speed.

    python -m benchmarks.sizing

The settings are those of `configs/verl/grpo_qwen2_5_7b.py`, with one sequence per device and
micro-batch, and `model.remat=full` for 32B. Every row is `launch.plan --estimate`, so nothing is
compiled and nothing runs.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import results
from configs.verl import grpo_qwen2_5_7b
from semrl_jax.planning import estimate, plan
from semrl_jax.support.errors import UserError

GIB = 2**30
MODELS = ("0.5B", "1.5B", "7B", "32B")
TOPOLOGIES = (("h100:1x1", 0), ("h100:1x8", 0), ("h100:4x8", 2), ("v5p-8", 0), ("v5p-64", 0))
HEADER = (
    "Model", "Devices", "Who samples", "Trainer, GiB", "Sampling, GiB", "Fits", "Update, s",
    "Sampling, s",
)  # fmt: skip


def row(model: str, topology: str, replica_nodes: int) -> list[str]:
    """One line of the table."""
    config = grpo_qwen2_5_7b.get_config()
    config.model.path = f"Qwen/Qwen2.5-{model}"
    split = model == "32B"  # its weights, over the devices of a host
    config.model.remat = "full" if split else "dots"
    if replica_nodes:
        config.rollout.vllm_tensor_parallelism = 4 if split else 1
    elif split:
        config.rollout.jax_tensor_parallelism = -1
    else:
        config.rollout.jax_data_parallelism = -1
    try:
        where, architecture = plan.check(config, topology, compiles=False)
    except UserError as error:
        names = str(error).partition("; it fits into ")[2].partition(",")[0].split(" or ")
        least = " ".join(name for name in names if name.startswith(topology[:3]))
        return [model, topology, "", "", "", f"no, but {least}", "", ""]
    config.training.micro_batch_size = where.num_chips - replica_nodes * where.per_node
    found = estimate.make_estimate(config, where, architecture, replica_nodes)
    replica, parts = found["replica"], found["programs"]
    cards = f"{replica['copies']} x {replica['cards']}"
    sample = parts["sample" if replica_nodes else "decode"]
    return [
        model,
        topology,
        f"{cards}, {'nodes of their own' if replica_nodes else 'in turns'}",
        f"{found['peak_bytes'] / GIB:.1f} of {found['hbm_bytes'] / GIB:.1f}",
        f"{sample['bytes']['total'] / GIB:.1f}",
        "yes" if found["fits"] else "no",
        f"{parts['update']['times_s']['total']:.2f}",
        f"{sample['times_s']['total']:.1f}",
    ]


def main() -> None:
    rows = [row(model, *where) for model in MODELS for where in TOPOLOGIES]
    print(results.table(HEADER, rows))


if __name__ == "__main__":
    main()
