r"""The task `formats`: sums of 2 to 8 numbers, and three ways to write the solution.

    python -m benchmarks.evidence.formats --output=runs/formats

It writes train.jsonl and test.jsonl, the problems, and demonstrations.jsonl. A demonstration of
12+39 is one of these, with equal chance, and a response of 2 to 8 numbers has 20 to 310 characters:

    digits:  ones 2+9=11;tens 1+1+3=5;\boxed{51}
    running: 12+39=51;\boxed{51}
    columns: 012+039:2+9+0=11,1+3+1=05,0+0+0=00;051;\boxed{51}

The teacher of the demonstrations forgets a carry with the chance `FORGET`, at each place where it
writes one. So no way is right at first, and reinforcement learning can mend each of them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Callable

import numpy as np

NUMBERS = range(2, 9)  # of a sum
FORGET = 0.4
NUM_TRAINING, NUM_TEST, NUM_DEMONSTRATIONS = 4096, 512, 16384


def digits(numbers: list[int], forgets) -> tuple[str, int]:
    """The ones are added first, then the tens with the carry."""
    ones = sum(number % 10 for number in numbers)
    carry = 0 if forgets() else ones // 10
    tens = carry + sum(number // 10 for number in numbers)
    worked = "+".join(str(number % 10) for number in numbers) + f"={ones};{carry}"
    worked += "".join(f"+{number // 10}" for number in numbers) + f"={tens};"
    return worked, 10 * tens + ones % 10


def running(numbers: list[int], forgets) -> tuple[str, int]:
    """One number after the other."""
    worked, total = "", numbers[0]
    for number in numbers[1:]:
        before, total = total, total + number
        if total % 10 < before % 10 and forgets():
            total -= 10
        worked += f"{before}+{number}={total};"
    return worked, total


def columns(numbers: list[int], forgets) -> tuple[str, int]:
    """One number after the other, by columns from the right; x+y+c=ds as in the quickstart."""
    worked, total = "", numbers[0]
    for number in numbers[1:]:
        parts, before, carry, result = [], total, 0, 0
        for place in (1, 10, 100):
            x, y = before // place % 10, number // place % 10
            written = 0 if carry and forgets() else carry
            carry, digit = divmod(x + y + written, 10)
            parts.append(f"{x}+{y}+{written}={carry}{digit}")
            result += digit * place
        total = result
        worked += f"{before:03}+{number:03}:{','.join(parts)};{total:03};"
    return worked, total


WAYS = (digits, running, columns)


def problem(rng: np.random.Generator) -> list[int]:
    return rng.integers(10, 100, rng.choice(NUMBERS)).tolist()


def question(numbers: list[int]) -> str:
    return "+".join(map(str, numbers))


def demonstration(numbers: list[int], rng: np.random.Generator) -> str:
    way = WAYS[rng.integers(len(WAYS))]
    worked, result = way(numbers, lambda: rng.random() < FORGET)
    return f"{worked}\\boxed{{{result}}}"


def write(output: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    test = {question(numbers): sum(numbers) for numbers in (problem(rng) for _ in range(NUM_TEST))}

    def others(count):
        found = (problem(rng) for _ in range(10 * count))
        return [numbers for numbers in found if question(numbers) not in test][:count]

    training = {question(numbers): sum(numbers) for numbers in others(NUM_TRAINING)}
    for name, rows in (("train", training), ("test", test)):
        lines = (json.dumps({"question": q, "answer": str(a)}) for q, a in rows.items())
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = (
        json.dumps(
            {"prompt": f"Q:{question(numbers)}\nA:", "completion": demonstration(numbers, rng)}
        )
        for numbers in others(NUM_DEMONSTRATIONS)
    )
    (output / "demonstrations.jsonl").write_text("\n".join(lines) + "\n")


def way_of(response: str) -> str:
    """The name of the way that a response begins."""
    if re.match(r"\d{3}\+\d{3}:", response):
        return "columns"
    # A two-digit number comes first, and with `digits` a one-digit number.
    return "running" if re.match(r"\d{2,}\+", response) else "digits"


def main(description: str, write: Callable[[pathlib.Path], None]) -> None:
    """Writes the files of a task."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory of the files")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    write(output)


if __name__ == "__main__":
    main(__doc__, write)
