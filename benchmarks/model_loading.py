"""Time and memory of loading a 0.5B model, compared with the lower bounds of both.

    python -m benchmarks.model_loading

Makes a random model with the sizes of Qwen2-0.5B (tied), as one file and as shards. Loads it in
separate processes: with `load_params` to the host and to devices, and with transformers if torch is
installed. Peaks are resident memory above the level after imports. The lower bound of time is one
pass over the files with `readinto`. The files were just written, so they come from the page cache.
`fill` only writes to as much new memory as the parameters need. The lower bound of memory is the
float32 parameters and one layer.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

WAYS = ("read", "fill", "host", "devices", "transformers")
SHARDS = 4


def sizes():
    from semrl_jax.models import DecoderConfig

    return DecoderConfig(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
        num_kv_heads=2, head_dim=64, rope_theta=1e6, tie_embeddings=True,
    )  # fmt: skip


def make_directories(root: pathlib.Path, dtype: str) -> None:
    """Makes `root/single` and `root/sharded` with the same random weights."""
    import numpy as np

    from semrl_jax import models

    config, random = sizes(), np.random.default_rng(0)
    specs = models.tensor_specs(config, "float32")
    params = models.params_from_hf(
        (
            models.Piece(spec.name, 0, random.standard_normal(spec.shape, np.float32) * 0.02)
            for spec in specs
        ),
        config,
    )
    num_bytes = sum(spec.num_bytes for spec in models.tensor_specs(config, dtype))
    for name, limit in (("single", num_bytes), ("sharded", num_bytes // SHARDS)):
        models.save_directory(root / name, params, config, None, dtype=dtype, max_shard_bytes=limit)


def memory_mib(field: str) -> float:
    """A field of this process's status in MiB: VmRSS is the current, VmHWM the peak memory."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def load(way: str, directory: pathlib.Path) -> dict[str, float]:
    """Seconds and MiB of one way to load, without imports and the start of devices."""
    if way == "read":
        buffer = bytearray(8 * 2**20)

        def run():
            for file in sorted(directory.glob("*.safetensors")):
                with open(file, "rb", buffering=0) as stream:
                    while stream.readinto(buffer):
                        pass

    elif way == "fill":
        import numpy as np

        from semrl_jax.models import tensor_specs

        num_bytes = sum(spec.num_bytes for spec in tensor_specs(sizes(), "float32"))

        def run():
            return np.full(num_bytes // 4, 1.0, np.float32)

    elif way == "transformers":
        import torch
        import transformers

        def run():
            return transformers.Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)

    else:
        import jax

        from semrl_jax import models

        config = models.load_config(directory)
        shardings = None
        jax.block_until_ready(jax.numpy.zeros(1))
        if way == "devices":
            mesh = models.make_mesh({"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1})
            shardings = models.parameter_shardings(models.Policy(config).shapes(), mesh)

        def run():
            return models.load_params(directory, config, shardings)

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = memory_mib("VmRSS")
    started = time.monotonic()
    loaded = run()
    seconds = time.monotonic() - started
    peak = memory_mib("VmHWM") - before
    del loaded  # only after the peak was read
    return {"seconds": seconds, "peak MiB": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", help="of the files; default: bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each kind; the median")
    parser.add_argument("--keep", help="directory for the models; default: a temporary one")
    parser.add_argument("--load", nargs=2, metavar=("WAY", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load(arguments.load[0], pathlib.Path(arguments.load[1]))))
        return
    ways = WAYS if importlib.util.find_spec("torch") else WAYS[:-1]
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(arguments.keep or temporary)
        print("making the models ...", file=sys.stderr, flush=True)
        make_directories(root, arguments.dtype)
        results = {}
        for kind in ("single", "sharded"):
            for way in ways:
                print(f"{kind} {way} ...", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", __spec__.name, "--load", way, str(root / kind)]
                runs = [
                    json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                    for _ in range(arguments.repeats)
                ]
                results[kind, way] = {
                    key: statistics.median(run[key] for run in runs) for key in runs[0]
                }
    report(results, arguments)


def report(results, arguments) -> None:
    from benchmarks import machine
    from semrl_jax.models import tensor_specs

    config = sizes()
    specs = tensor_specs(config, "float32")
    params = sum(spec.num_bytes for spec in specs) / 2**20
    layer = sum(s.num_bytes for s in specs if s.name.startswith("model.layers.0.")) / 2**20
    on_disk = sum(spec.num_bytes for spec in tensor_specs(config, arguments.dtype)) / 2**20
    header = ("files", "way", "time / read", "peak / least", "seconds", "peak MiB")
    print(f"{header[0]:<10}{header[1]:<14}" + "".join(f"{name:>14}" for name in header[2:]))
    for (kind, way), result in results.items():
        time_ratio = result["seconds"] / results[kind, "read"]["seconds"]
        peak_ratio = result["peak MiB"] / (params + layer)
        print(
            f"{kind:<10}{way:<14}{time_ratio:14.2f}{peak_ratio:14.3f}"
            f"{result['seconds']:14.2f}{result['peak MiB']:14.0f}"
        )
    print(
        f"least memory: parameters {params:.0f} MiB + one layer {layer:.0f} MiB; files of "
        f"{arguments.dtype}, {on_disk:.0f} MiB; medians of {arguments.repeats}"
    )
    print(machine.description())


if __name__ == "__main__":
    main()
