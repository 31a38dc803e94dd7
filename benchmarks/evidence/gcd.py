r"""The task `gcd`: greatest common divisors of two numbers, and three ways to write the solution.

    python -m benchmarks.evidence.gcd --output=runs/gcd

It writes demonstrations.jsonl, from which a real model learns the ways before the runs. A
demonstration of 48 and 18 is one of these, with equal chance:

    divisors:   48:1,2,3,4,6,8,12,16,24,48;18:1,2,3,6,9,18;\boxed{6}
    primes:     48=2*2*2*2*3;18=2*3*3;2*3=\boxed{6}
    remainders: 48%18=12;18%12=6;12%6=0;\boxed{6}
"""

from __future__ import annotations

import json
import pathlib
import re
from collections import Counter

import numpy as np

from benchmarks.evidence.formats import main
from semrl_jax.data import procedural

ENTRY = "gcd:min_numbers=2:max_numbers=2:min_value=2:max_value=60"  # data.reasoning_gym
NUM_TEST, NUM_DEMONSTRATIONS = 64, 640  # all of which the fine-tuning sees once
SEED = 1000  # of the demonstrations; the runs have others


def divisors(a: int, b: int) -> tuple[str, int]:
    """The divisors of both numbers; the last one that is in both lists."""
    of_a, of_b = ([d for d in range(1, n + 1) if n % d == 0] for n in (a, b))
    worked = "".join(f"{n}:{','.join(map(str, of_n))};" for n, of_n in ((a, of_a), (b, of_b)))
    return worked, max(set(of_a) & set(of_b))


def primes(a: int, b: int) -> tuple[str, int]:
    """The prime factors of both numbers; those that are in both."""
    of_a, of_b = (_prime_factors(n) for n in (a, b))
    common = sorted((Counter(of_a) & Counter(of_b)).elements())
    worked = "".join(f"{n}={'*'.join(map(str, of_n))};" for n, of_n in ((a, of_a), (b, of_b)))
    return f"{worked}{'*'.join(map(str, common or [1]))}=", int(np.prod(common))


def remainders(a: int, b: int) -> tuple[str, int]:
    """Euclid's algorithm, from the larger number."""
    worked, a, b = "", max(a, b), min(a, b)
    while b:
        worked += f"{a}%{b}={a % b};"
        a, b = b, a % b
    return worked, a


WAYS = (divisors, primes, remainders)


def _prime_factors(number: int) -> list[int]:
    found = []
    while number > 1:
        found.append(next(d for d in range(2, number + 1) if number % d == 0))
        number //= found[-1]
    return found


def way_of(response: str) -> str:
    """The name of the way that a response begins; `divisors` if it begins none."""
    sign = re.match(r"\s*\d+\s*([=%])", response)
    return {"=": "primes", "%": "remainders"}[sign[1]] if sign else "divisors"


def write(output: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    entries = procedural.sources([ENTRY])
    with (output / "demonstrations.jsonl").open("w") as file:
        for problem in procedural.training_problems(entries, SEED, NUM_DEMONSTRATIONS, NUM_TEST):
            a, b = map(int, re.findall(r"\d+", problem.question))
            worked, result = WAYS[rng.integers(len(WAYS))](a, b)
            row = {"prompt": problem.question, "completion": f"{worked}\\boxed{{{result}}}"}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(__doc__, write)
