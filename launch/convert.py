"""Converts between checkpoints and Hugging Face model directories.

    python -m launch.convert --source=runs/quickstart --target=exported

A run directory becomes a directory for transformers, vLLM or --config.model.path, from its newest
valid checkpoint or the one of --step. Adapters are merged with their base, or written in PEFT's
format with --adapter. A directory in PEFT's format becomes one of the merged model, and a GGUF file
one of its dequantised model. Another Hugging Face directory becomes a checkpoint of its parameters,
with config.json and tokenizer next to it. Converting back gives the same weights, bit for bit.
With --other the weights are (1 - SHARE) of the source and SHARE of another directory of the same
architecture: an average for a share between 0 and 1; below 0 they go on from the other model past
the source, as with --other=RUN/start. Nothing is overwritten. Exit codes: 0 done, 2 wrong flag or
directory (one line names it).
"""

from __future__ import annotations

import math
import pathlib
import shutil
from typing import TYPE_CHECKING, Any

from absl import flags

from launch import cli
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import check_plain, read_json_object

if TYPE_CHECKING:  # mistakes and --help need no JAX
    from semrl_jax import models

# Files copied with the parameters: configuration and tokenizer.
BESIDE = ("*.json", "tokenizer.model", "merges.txt", "*.jinja")

SOURCE = flags.DEFINE_string(
    "source", None, "run, checkpoint, Hugging Face directory or .gguf file"
)
TARGET = flags.DEFINE_string("target", None, "directory to make; must not exist, or be empty")
STEP = flags.DEFINE_integer("step", None, "step of the checkpoint; default: the newest valid one")
DTYPE = flags.DEFINE_enum("dtype", "float32", DTYPES, "dtype of Hugging Face weights")
MAX_SHARD_GB = flags.DEFINE_float("max_shard_gb", 5.0, "weights above this size are split")
ADAPTER = flags.DEFINE_bool("adapter", False, "write a run's adapters in PEFT's format, unmerged")
OTHER = flags.DEFINE_string(
    "other", None, "Hugging Face directory whose weights are mixed in, of the same architecture"
)
SHARE = flags.DEFINE_float("share", 0.5, "weight of --other; below 0: extrapolation")
FAMILY = flags.DEFINE_string("family", "", "as config.model.family; default: that of the run")


def main() -> int:
    known = STEP, DTYPE, MAX_SHARD_GB, FAMILY, ADAPTER, OTHER, SHARE
    options = {flag.name: flag.value for flag in known}
    convert(pathlib.Path(cli.required(SOURCE)), pathlib.Path(cli.required(TARGET)), **options)
    return 0


def convert(
    source: pathlib.Path,
    target: pathlib.Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    max_shard_gb: float = 5.0,
    family: str = "",
    adapter: bool = False,
    other: str | None = None,
    share: float = 0.5,
) -> None:
    """Makes `target` from `source`; see the flags. UserError if one of them cannot be used."""
    if not source.is_dir() and source.suffix != ".gguf":
        raise UserError(f"--source={source} is not a directory, and no .gguf file.")
    if not 0 < max_shard_gb < float("inf"):
        raise UserError(f"--max_shard_gb={max_shard_gb:g} must be a finite number above 0.")
    if not math.isfinite(share):
        raise UserError(f"--share={share:g} must be a finite number.")
    if not other and share != 0.5:
        raise UserError(f"--share={share:g} needs --other.")
    if other and adapter:
        raise UserError(f"--other={other} is mixed with whole models; leave out --adapter.")
    max_shard_bytes = round(max_shard_gb * 1e9)
    if source.suffix == ".gguf" or not (source / "config.json").exists():
        from semrl_jax.models import gguf  # here: mistakes and --help need no JAX

        if file := gguf.find_file(source):
            if step is not None or adapter or family or other:
                raise UserError(
                    f"--source={source} is a GGUF file: leave out --step, --adapter, --family and "
                    "--other."
                )
            with cli.new_directory("target", target) as target:
                print(f"reading {file}", flush=True)
                gguf.convert(file, target, dtype, max_shard_bytes=max_shard_bytes)
                print(f"done: {target} is a Hugging Face model directory", flush=True)
            return
    if (source / "adapter_config.json").is_file():
        if step is not None or adapter:
            raise UserError(f"--source={source} is an adapter: leave out --step and --adapter.")
        with cli.new_directory("target", target) as target:
            found = mixed(*merged_adapter(source, family), other, share, family)
            save_merged(target, *found, dtype, max_shard_bytes)
        return
    record = read_record(source)
    with cli.new_directory("target", target) as target:
        if (source / "checkpoints").is_dir():
            from semrl_jax.runs.policies import model_of  # here: mistakes and --help need no JAX

            model = model_of(source)
            folder = find_checkpoint(source / "checkpoints", step)
            if "run_id" in record:
                family = family or record["config"]["model"].get("family", "")
            if adapter:
                export_adapter(folder, target, model, family)
            else:
                found = mixed(*restored_policy(folder, model, family), other, share, family)
                save_merged(target, *found, dtype, max_shard_bytes)
        elif "run_id" in record:
            raise UserError(f"--source={source} is a run without a checkpoint.")
        elif step is not None or adapter or (dtype != "float32" and not other):
            raise UserError(
                f"--source={source} is a model directory: leave out --step, --adapter and, without "
                "--other, --dtype."
            )
        elif other:
            found = mixed(*read_directory(source, family), other, share, family)
            save_merged(target, *found, dtype, max_shard_bytes)
        else:
            import_parameters(source, target, family)


def read_record(source: pathlib.Path) -> dict[str, Any]:
    """Reads config.json of a run or of a model."""
    try:
        return read_json_object(source / "config.json")
    except (FileNotFoundError, UserError):
        raise UserError(
            f"--source={source} is neither a run nor a Hugging Face directory, by its config.json."
        ) from None


def restored_policy(
    folder: pathlib.Path, model: pathlib.Path, family: str
) -> tuple[models.Params, models.DecoderConfig, pathlib.Path]:
    """The parameters of a valid checkpoint, and what `save_merged` needs in addition to them."""
    from semrl_jax import models
    from semrl_jax.runs.adapters import restore_policy
    from semrl_jax.runs.policies import check_model

    config = models.load_config(model, family)
    policy = models.Policy(config)
    check_model(folder.parents[1], policy, model)
    print(f"reading {folder}", flush=True)
    return restore_policy(folder, policy, model), config, model


def read_directory(
    source: pathlib.Path, family: str
) -> tuple[models.Params, models.DecoderConfig, pathlib.Path]:
    """The parameters of a Hugging Face directory; see `restored_policy`."""
    from semrl_jax import models

    config = models.load_config(source, family)
    return models.load_params(source, config), config, source


def mixed(
    params: models.Params,
    config: models.DecoderConfig,
    model: pathlib.Path,
    other: str | None,
    share: float,
    family: str,
) -> tuple[models.Params, models.DecoderConfig, pathlib.Path]:
    """(1 - share) of the parameters and `share` of those of `other`, if it is given."""
    if not other:
        return params, config, model
    import jax
    import numpy as np

    from semrl_jax.models import lora

    if not (pathlib.Path(other) / "config.json").is_file():
        raise UserError(f"--other={other} is no Hugging Face directory; name one.")
    theirs, found, _ = read_directory(pathlib.Path(other), family)
    if found.hash != config.hash:
        raise UserError(f"--other={other} has another architecture than the source; name another.")
    weights = jax.tree.map(
        lambda a, b: (1 - share) * np.asarray(a, np.float32) + share * np.asarray(b, np.float32),
        lora.without_adapters(params),
        theirs,
    )
    for name in lora.modules_with_adapters(params["layers"]):  # of the source alone
        own = params["layers"][name]
        weights["layers"][name] |= {lora.A: own[lora.A], lora.B: (1 - share) * own[lora.B]}
    return weights, config, model


def export_adapter(
    folder: pathlib.Path, target: pathlib.Path, model: pathlib.Path, family: str
) -> None:
    """Writes the adapters of a valid checkpoint in PEFT's format."""
    from semrl_jax import models
    from semrl_jax.runs import adapters
    from semrl_jax.runs.checkpoint_files import restore_params

    config = models.load_config(model, family)
    record = adapters.adapter_record(folder)
    if record is None:
        raise UserError(
            f"--adapter: checkpoint {folder} has no adapters, since lora.rank was 0; leave it out."
        )
    adapters.check_base(folder, record, model)
    params = restore_params(folder, record.lora.shapes(models.Policy(config).shapes()))
    models.peft.save_adapter(target, params, record.lora, config, model, record.base)
    print(f"done: {target} is an adapter of {record.base}, in PEFT's format", flush=True)


def merged_adapter(
    source: pathlib.Path, family: str
) -> tuple[models.Params, models.DecoderConfig, pathlib.Path]:
    """An adapter in PEFT's format upon its base; see `restored_policy`."""
    from semrl_jax import models

    files = models.peft.find_adapter(source)
    model = files.base()
    config = models.load_config(model, family)
    params, lora = models.peft.load_adapter(files, config, model, files.base_name)
    return models.adapted(params, lora.base(models.load_params(model, config))), config, model


def save_merged(
    target: pathlib.Path,
    params: models.Params,
    config: models.DecoderConfig,
    model: pathlib.Path,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Writes parameters, merged with adapters if they have some, as a directory like `model`."""
    from semrl_jax import data
    from semrl_jax.cluster.peers import Peers
    from semrl_jax.runs.export import save_model

    try:
        tokenizer = data.load_tokenizer(model)
    except UserError as error:
        print(f"no tokenizer is written: {error}", flush=True)
        tokenizer = None
    print(f"writing {target}", flush=True)
    options = {"dtype": dtype, "max_shard_bytes": max_shard_bytes}
    save_model(target, params, config, tokenizer, model, Peers(), **options)
    print(f"done: {target} is a Hugging Face model directory", flush=True)


def find_checkpoint(directory: pathlib.Path, step: int | None) -> pathlib.Path:
    """The checkpoint of `step`, or the newest one that matches its manifest."""
    from semrl_jax.runs.checkpoint_files import checkpoint_problem, checkpoint_steps

    steps = checkpoint_steps(directory)
    if step is not None and step not in steps:
        raise UserError(f"--step={step} is not among the checkpoints of {directory}: {steps}.")
    problem = "there is none"
    for candidate in reversed(steps) if step is None else (step,):
        folder = directory / str(candidate)
        print(f"checking {folder}", flush=True)
        problem = checkpoint_problem(folder)
        if not problem:
            return folder
        if step is None:
            print(f"checkpoint {candidate} is not used: {problem}.", flush=True)
    raise UserError(f"{directory} has no valid checkpoint to convert ({problem}).")


def import_parameters(source: pathlib.Path, target: pathlib.Path, family: str) -> None:
    """Writes the parameters of a Hugging Face directory as one complete checkpoint."""
    from semrl_jax import models
    from semrl_jax.runs.checkpoint_files import save_params

    print(f"reading {source}", flush=True)
    check_plain(f"--target={target}", target)
    config = models.load_config(source, family)
    params = models.load_params(source, config)
    staging = target.with_name(target.name + ".writing")
    (staging / "checkpoints").mkdir(parents=True)
    print(f"writing {target}", flush=True)
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copy(file, staging)
    save_params((staging / "checkpoints" / "0").absolute(), params)
    staging.rename(target)  # replaces an empty directory
    print(f"done: {target / 'checkpoints' / '0'} holds the parameters", flush=True)


if __name__ == "__main__":
    cli.run(main, __doc__)
