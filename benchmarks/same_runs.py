"""Records small runs and compares two recordings bit for bit, for changes that must change nothing.

    python -m benchmarks.same_runs record /tmp/before
    python -m benchmarks.same_runs record /tmp/after
    python -m benchmarks.same_runs compare /tmp/before /tmp/after

A recording has one file per run: its rows of metrics without times and speeds, and SHA-256 of every
array of its last checkpoint. The rewards follow from the text of a response, so that the groups of
an untrained policy have unequal rewards. The runs together take about 2 minutes on 2 cores, and 4
if no program is compiled yet.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
VOLATILE = ("time/", "_per_s")  # parts of the names of what depends on the clock
SMALL = {
    "model.hidden_size": 32, "model.intermediate_size": 32, "model.num_layers": 2,
    "data.prompts_per_step": 4, "data.num_prompts": 8, "rollout.group_size": 4,
    "rollout.max_prompt_tokens": 16, "rollout.max_response_tokens": 56, "metrics.stride": 4,
    "metrics.dataset_stride": 4, "warm_start.num_steps": 0, "evaluation.num_problems": 8,
    "evaluation.every_steps": 2, "training.num_steps": 4, "training.learning_rate": 1e-3,
    "logging.plot_every_steps": 0, "rewards.function": "benchmarks.same_runs:by_text",
}  # fmt: skip
# Name: config file, and settings in addition to SMALL.
RUNS = {
    "default": ("default", {"training.prompts_per_minibatch": 2}),
    "quickstart": ("quickstart", {}),
    "quickstart_async": ("quickstart_async", {}),
    "quickstart_lora": ("quickstart_lora", {}),
    "quickstart_ppo": (
        "quickstart_ppo",
        {"data.prompts_per_step": 16, "data.num_prompts": 32, "rollout.group_size": 1},
    ),
    # A state of the algorithm, a reward per token, a critic that is first trained alone.
    "ppo": (
        "default",
        {
            "algorithms.name": "ppo", "algorithms.advantage.kl_reward_coefficient": 0.1,
            "algorithms.advantage.kl_target": 0.1, "algorithms.loss.kl_coefficient": 0.0,
            "critic.warmup_steps": 1, "training.prompts_per_minibatch": 2,
        },
    ),
    "lag": ("quickstart", {"rollout.max_staleness": 2, "rollout.in_flight": "keep"}),
    # All that is measured for the log, and all rules of batches.
    "lora": (
        "default",
        {
            "lora.rank": 4, "training.learning_rate": 1e-2, "hidden_states.source": "policy",
            "hidden_states.compare_every": 2, "metrics.drift_every": 2,
            "metrics.of_groups": ("elliptical_novelty", "log_determinant", "lidar"),
            "shaping.indicators": ("avg_log_probs", "elliptical_novelty", "effective_rank"),
            "shaping.guidance": "avg_logits_entropy", "shaping.target": "both",
            "algorithms.importance.level": "sequence", "algorithms.batch_rules.overlong_tokens": 8,
            "algorithms.batch_rules.mask_truncated": True,
        },
    ),
}  # fmt: skip


def by_text(response: str, reference: str) -> dict:
    """A verifier whose scores differ from response to response."""
    score = hashlib.sha256(response.encode()).digest()[0] / 255
    return {"score": score, "correct": score > 0.5}


def recorded(name: str, scratch: pathlib.Path) -> dict:
    """The rows and the hashes of a run of this name."""
    import jax
    import orbax.checkpoint as ocp

    file, settings = RUNS[name]
    flags = [
        f"--config.{field}={value}"
        for field, values in (SMALL | settings).items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    workdir = scratch / name
    command = [sys.executable, "-m", "launch.train", f"--config=configs/{file}.py", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, f"--workdir={workdir}", *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        timeout=600,
        check=True,
    )
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    last = max((workdir / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    state = ocp.StandardCheckpointer().restore(last / "state")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        "rows": [
            {key: value for key, value in row.items() if not any(part in key for part in VOLATILE)}
            for row in rows
        ],
        "state": {
            jax.tree_util.keystr(path): hashlib.sha256(
                f"{leaf.dtype}{leaf.shape}".encode() + jax.device_get(leaf).tobytes()
            ).hexdigest()
            for path, leaf in leaves
        },
    }


def record(directory: pathlib.Path, names: list[str]) -> None:
    """Writes `directory`/NAME.json of each run."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            began = time.monotonic()
            found = recorded(name, pathlib.Path(scratch))
            (directory / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def differences(before: dict, after: dict) -> list[str]:
    """The names of rows and arrays that differ or that only one run has."""
    found = []
    if len(before["rows"]) != len(after["rows"]):
        found.append(f"{len(before['rows'])} rows and {len(after['rows'])}")
    pairs = [
        (f"row {number} ", *rows) for number, rows in enumerate(zip(before["rows"], after["rows"]))
    ]
    for where, one, other in (*pairs, ("state", before["state"], after["state"])):
        for key in sorted(one.keys() | other.keys()):
            # Values are compared as text: a NaN equals itself, and 0.0 is not -0.0.
            values = [json.dumps(each.get(key, "none")) for each in (one, other)]
            if values[0] != values[1]:
                found.append(f"{where}{key}: {values[0][:24]} and {values[1][:24]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("directories", nargs="+", type=pathlib.Path)
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    arguments = parser.parse_args()
    if arguments.command == "record":
        for directory in arguments.directories:
            record(directory, arguments.runs)
        return 0
    status = 0
    for name in arguments.runs:
        pair = [json.loads((of / f"{name}.json").read_text()) for of in arguments.directories]
        found = differences(*pair)
        print(f"{name}: {'equal' if not found else f'{len(found)} differences'}")
        for line in found:
            print(f"  {line}")
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
