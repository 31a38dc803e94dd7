"""An evaluation by launch.evaluate with vLLM, compared with a plain vLLM script.

    python -m benchmarks.evaluation --policy=MODEL --vllm_python=.venv-vllm/bin/python

MODEL is a Hugging Face directory with the quickstart's tokenizer, such as one that launch.convert
made of runs/quickstart. Both sides sample --n responses to the 512 held-out problems, with the same
settings of vLLM, and alternate in order. The plain script gives all prompts to `LLM.generate` and
compares the last number of each response with the answer. launch.evaluate streams the responses
over gRPC, grades, scores, and writes the samples and the page. Both take the log-probability of
each token, which launch.evaluate records. With --no_logprobs the plain script takes none: with a
tiny model, they are a third of vLLM's time.

Each side has two times: the whole command, and sampling and grading alone, as the side prints it.
The ratio is the time of the plain script divided by the time of launch.evaluate. Above 1,
launch.evaluate is faster. The median of the ratio comes first.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import machine
from semrl_jax.data import arithmetic

PLAIN = r"""
import json, re, sys, time
import vllm


def main():
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    model = vllm.LLM(model=settings["model"], dtype="float32", enforce_eager=True,
                     max_num_seqs=256, kv_cache_memory_bytes=2**29, seed=0)
    sampling = vllm.SamplingParams(
        n=settings["n"], temperature=0.6, top_p=0.95, max_tokens=56, seed=0,
        logprobs=settings["logprobs"], flat_logprobs=True,
    )
    began = time.monotonic()
    found = model.generate(settings["prompts"], sampling)
    correct = total = 0
    for output, answer in zip(found, settings["answers"]):
        for response in output.outputs:
            numbers = re.findall(r"-?\d+", response.text)
            correct += bool(numbers) and numbers[-1] == answer
            total += 1
    seconds = time.monotonic() - began
    print(f"SAMPLED {total} responses in {seconds:.1f} s, {correct / total:.4f} correct")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
"""


def timed(command: list[str], pattern: str) -> tuple[float, float, str]:
    """Seconds of the command, seconds that it printed, and the printed line."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.search(pattern, done.stdout)
    return seconds, float(found[1]), found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="Hugging Face directory")
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--no_logprobs", action="store_true", help="the plain script takes no log-probabilities"
    )
    options = parser.parse_args()
    problems = arithmetic.held_out_problems()
    settings = {
        "model": options.policy,
        "n": options.n,
        "logprobs": None if options.no_logprobs else 0,
        "prompts": [arithmetic.prompt_text(problem) for problem in problems],
        "answers": [arithmetic.reference_answer(problem) for problem in problems],
    }
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        (directory / "plain.py").write_text(PLAIN)
        (directory / "settings.json").write_text(json.dumps(settings))
        plain = [options.vllm_python, str(directory / "plain.py"), str(directory / "settings.json")]

        def ours(pair: int) -> list[str]:
            return [
                sys.executable, "-m", "launch.evaluate", f"--policy={options.policy}",
                "--config=configs/quickstart_vllm.py", f"--n={options.n}", "--verifier=math_text",
                f"--config.rollout.vllm_python={options.vllm_python}",
                f"--output={directory / f'results{pair}'}",
            ]  # fmt: skip

        rows = []
        for pair in range(options.pairs):
            sides = {
                "plain": lambda: timed(plain, r"SAMPLED \d+ responses in ([\d.]+) s.*"),
                "ours": lambda pair=pair: timed(ours(pair), r"\d+ responses in ([\d.]+) s.*"),
            }
            order = sides if pair % 2 else reversed(sides)
            row = {name: sides[name]() for name in list(order)}
            print(f"pair {pair}: plain {row['plain']}, launch.evaluate {row['ours']}", flush=True)
            rows.append(row)
    print(f"{'':<24}{'ratio':>8}{'plain vLLM':>14}{'launch.evaluate':>18}")
    for index, title in ((0, "whole command"), (1, "sampling and grading")):
        ratio = statistics.median(row["plain"][index] / row["ours"][index] for row in rows)
        times = [statistics.median(row[side][index] for row in rows) for side in ("plain", "ours")]
        print(f"{title:<24}{ratio:>8.2f}{times[0]:>12.1f} s{times[1]:>16.1f} s")
    print(f"medians of {len(rows)} pairs; {machine.description()}")


if __name__ == "__main__":
    main()
