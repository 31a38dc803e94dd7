"""Speed and errors of the grader, compared with math-verify.

    python -m benchmarks.grading
    python -m benchmarks.grading --data_dir=DIR

Speed: answer pairs go through a `VerifierPool` with two workers, as in training. `numbers` are
plain numbers, as in GSM8K. `mix` has the pairs of the grader's tests: fractions, radicals,
intervals, matrices, equations and others, each once. `repeated` has them many times, as the samples
of an evaluation with n > 1 repeat answers; workers remember the pairs that they have compared.
math-verify does the same work. Figures are medians over the turns, in which the two alternate.
Starting the workers does not count.

Errors: the verdicts of both on the cases of public bug reports and of the grader's tests, and what
math-verify would add as a second opinion on answers that the grader calls wrong.

With `--data_dir`, every row of the JSONL files of known benchmarks is graded twice: its reference
answer in a box must be right, and a wrong answer of the same kind must be wrong.
"""

import argparse
import collections
import concurrent.futures
import decimal
import importlib.metadata
import json
import logging
import pathlib
import random
import re
import statistics
import time
from collections.abc import Iterator

from benchmarks import machine
from semrl_jax.evaluation import catalogue
from semrl_jax.evaluation.benchmark_spec import Benchmark, BenchmarkReader
from semrl_jax.rewards import VerifierPool, VerifierSettings
from semrl_jax.rewards.extraction import find_answer
from semrl_jax.rewards.verifiers import math
from tests.rewards.grading.pairs import PAIRS
from tests.rewards.grading.test_pairs import REPORTED

TIMEOUT_S = 3.0  # of the evaluation protocol
VERIFIERS = ("math", "benchmarks.grading:by_math_verify")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
Pair = tuple[str, str, str]  # response, reference, row as JSON


def numbers(count: int) -> list[Pair]:
    """Responses with different numbers; half of them are right."""
    draw = random.Random(0)
    found = []
    for index in range(count):
        reference = draw.randrange(100_000) if index % 4 else draw.randrange(10_000) / 100
        answer = reference if index % 2 else reference + 1
        text = f"{answer:,}" if index % 3 else f"{answer}"
        found.append((rf"We add them. The answer is \boxed{{{text}}}.", str(reference), ""))
    return found


def mix() -> list[Pair]:
    """The pairs of the grader's tests, in boxes."""
    return [(rf"So we get \boxed{{{pair.answer}}}.", pair.reference, "") for pair in PAIRS]


def rate(verifier: str, pairs: list[Pair]) -> tuple[float, int]:
    """Pairs per second once the workers are ready, and the number of timeouts."""
    with VerifierPool(num_workers=2, timeout_s=TIMEOUT_S, function=verifier) as pool:
        # Both workers take part of this, and one is not ready before it has answered.
        concurrent.futures.wait([pool.submit(r"\boxed{1}", "1") for _ in range(200)])
        started = time.perf_counter()
        concurrent.futures.wait([pool.submit(*pair) for pair in pairs])
        seconds = time.perf_counter() - started
        return len(pairs) / seconds, pool.counters["num_timeouts"]


def speed(count: int, turns: int) -> None:
    """Prints ratios and pairs per second."""
    print("ratio  pairs           grader     math-verify   (pairs per second, timeouts)")
    many = [pair for _ in range(count // len(PAIRS) + 1) for pair in mix()][:count]
    for name, pairs in (("numbers", numbers(count)), ("mix", mix()), ("repeated", many)):
        rates = collections.defaultdict(list)
        timeouts: collections.Counter[str] = collections.Counter()
        for _ in range(turns):
            for verifier in VERIFIERS:
                measured, num_timeouts = rate(verifier, pairs)
                rates[verifier].append(measured)
                timeouts[verifier] += num_timeouts
        ours, theirs = (statistics.median(rates[verifier]) for verifier in VERIFIERS)
        columns = (
            f"{ours:8.0f}/s, {timeouts[VERIFIERS[0]]}{theirs:8.0f}/s, {timeouts[VERIFIERS[1]]}"
        )
        print(f"{ours / theirs:4.1f}x  {name:10}{columns}", flush=True)


def by_math_verify(response: str, reference: str) -> bool:
    """The verdict of math-verify on a whole response; without its time limits, as in a worker."""
    import math_verify

    gold = math_verify.parse(rf"\boxed{{{reference}}}", parsing_timeout=None)
    found = math_verify.parse(response, parsing_timeout=None)
    return bool(math_verify.verify(gold, found, timeout_seconds=None))


def errors() -> None:
    """Prints how many verdicts of each are wrong, and what a second opinion would change."""
    cases = [json.loads(line) for line in REPORTED.read_text(encoding="utf-8").splitlines()]
    cases += [{"response": f"\\boxed{{{pair.answer}}}", **pair._asdict()} for pair in PAIRS]
    mistakes = collections.Counter()
    for case in cases:
        response, reference, right = case["response"], case["reference"], case["correct"]
        ours = math.verify(response, reference, VerifierSettings()).correct
        theirs = by_math_verify(response, reference)
        second = by_math_verify(f"\\boxed{{{find_answer(response) or ''}}}", reference)
        for name, verdict in (("grader", ours), ("math-verify", theirs), ("both", ours or second)):
            mistakes[name, "wrong called right"] += verdict and not right
            mistakes[name, "right called wrong"] += right and not verdict
    print(f"{len(cases)} cases; `both` asks math-verify where the grader says wrong")
    for (name, kind), count in mistakes.items():
        print(f"  {name:12}{kind:20}{count:4}  {100 * count / len(cases):.1f} %")


def wrong_answer(reference: str, row: dict) -> str:
    """A wrong answer of the same kind: another letter, the last number plus 1, or another word."""
    if row.get("kind") == "choice":
        letters = row["letters"]
        return letters[(letters.index(reference[0]) + 1) % len(letters)]
    found = list(re.finditer(r"\d*\.?\d+", re.sub(r"(?<=\})\^2", "", reference)))
    if not found:
        return r"\text{another}" if r"\text" in reference else f"{reference} + 1"
    last = found[-1]
    return f"{reference[: last.start()]}{decimal.Decimal(last[0]) + 1}{reference[last.end() :]}"


def rows(file: pathlib.Path, benchmark: Benchmark) -> Iterator[tuple[str, dict]]:
    """Reference answer and columns of every problem."""
    reader = BenchmarkReader(benchmark)
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            problem = reader.read(json.loads(line), file.stem)
            yield problem.answer, json.loads(problem.columns or "{}")


def agreement(data_dir: pathlib.Path) -> None:
    """Prints how many rows have both verdicts as expected, and the others."""
    with VerifierPool(num_workers=2, timeout_s=TIMEOUT_S, function="benchmark") as pool:
        for name in catalogue.names():
            file = data_dir / f"{name}.jsonl"
            if not file.exists():
                print(f"{name:16} no file")
                continue
            graded = []
            for reference, row in rows(file, catalogue.find(name)):
                for answer, is_right in ((reference, True), (wrong_answer(reference, row), False)):
                    future = pool.submit(rf"\boxed{{{answer}}}", reference, json.dumps(row))
                    graded.append((answer, reference, is_right, future))
            failed = [
                (answer, reference, is_right, future.result().error)
                for answer, reference, is_right, future in graded
                if future.result().correct is not is_right
            ]
            agreed = 1 - len(failed) / len(graded)
            print(
                f"{name:16}{len(graded) // 2:6} rows, {100 * agreed:.2f} % as expected", flush=True
            )
            for answer, reference, is_right, error in failed:
                expected = "right" if is_right else "wrong"
                print(f"    {answer!r} for {reference!r} should be {expected} {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=pathlib.Path, help="directory with NAME.jsonl")
    parser.add_argument("--pairs", type=int, default=4000, help="of numbers and repeated")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.data_dir:
        agreement(arguments.data_dir)
    else:
        speed(arguments.pairs, arguments.turns)
        errors()
    packages = ("math-verify", "latex2sympy2_extended", "sympy", "mpmath")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    print(f"{machine.description()}, {versions}")


if __name__ == "__main__":
    main()
