"""Return values of a user's function, including objects whose methods fail or lie."""

import collections.abc
import json
import subprocess
import sys

import numpy as np
import pytest

from semrl_jax.rewards import Verdict
from semrl_jax.rewards.function import (
    MAX_EXTRACTED_CHARS,
    MAX_STEPS,
    NonsenseError,
    as_verdict,
    dump_functions,
    error_text,
    load_function,
)
from tests.cases import refused


class Float(float):
    def _true(self, *_):
        return True

    __le__ = __lt__ = __gt__ = __ge__ = __eq__ = _true
    __hash__ = float.__hash__

    def __abs__(self):
        return Float(1.0)

    def __repr__(self):
        raise ValueError("no text")


class Text(str):
    def __str__(self):
        raise ValueError("no text")

    encode = __iter__ = __len__ = __str__


class Record(collections.abc.Mapping):
    def __getitem__(self, key):
        raise ValueError("no item")

    def __iter__(self):
        return iter(["score"])

    def __len__(self):
        return 1


class Disguised:
    __class__ = float


class Unprintable:
    def __repr__(self):
        raise KeyError("no text")


class Cheat(Verdict):
    @property
    def score(self):
        return float("inf")


@pytest.mark.parametrize(
    "result",
    [
        Float("inf"), Float("nan"), Record(), Disguised(), Unprintable(), 10**400, 3e38, "1.0",
        {"score": 1.0, "correct": Unprintable()}, {"score": 1.0, "extracted": Unprintable()},
        None, {"score": 1.0, Unprintable(): 1}, object.__new__(Cheat),
        {"score": 1.0, "extracted": "x" * (MAX_EXTRACTED_CHARS + 1)},
        *({"score": 1.0, "steps": steps} for steps in (
            3, "12", [3], [(3,)], [(3, 0.5, 1)], [(0, 0.5)], [(5, 0.5)], [(1.0, 0.5)],
            [(2, 0.5), (2, 0.5)], [(3, 0.5), (1, 0.5)], [(1, float("nan"))], [(1, None)],
            [(1, 2e9)],
        )),
    ],
    ids=lambda result: type(result).__name__,
)  # fmt: skip
def test_unreadable_values_are_no_verdict(result):
    with pytest.raises(NonsenseError) as caught:
        as_verdict(result, "text")
    assert str(caught.value)


def test_a_verdict_holds_plain_values_only():
    verdict = as_verdict(
        {"score": Float(0.5), "correct": 1, "boxed": False, "extracted": Text("7\ud800é")}, ""
    )
    assert verdict == Verdict(0.5, True, False, "7?é")
    assert [type(value) for value in (verdict.score, verdict.extracted)] == [float, str]
    json.dumps(verdict.score), verdict.extracted.encode()
    assert as_verdict(Float(-1.0), "").correct is False


def test_steps_are_plain_pairs():
    steps = [[np.int64(1), Float(0.5)], (True + 3, np.float32(-1))]
    verdict = as_verdict({"score": 1, "steps": steps}, "text")
    assert verdict.steps == ((1, 0.5), (4, -1.0))
    assert [type(value) for step in verdict.steps for value in step] == [int, float] * 2
    assert as_verdict(verdict, "text") == verdict and as_verdict(1, "text").steps is None
    assert as_verdict({"score": 1, "steps": []}, "text").steps == ()
    many = [(end, 0.0) for end in range(1, MAX_STEPS + 2)]
    assert len(as_verdict({"score": 1, "steps": many[1:]}, "x" * len(many)).steps) == MAX_STEPS
    with pytest.raises(NonsenseError, match=f"at most {MAX_STEPS} pairs"):
        as_verdict({"score": 1, "steps": many}, "x" * len(many))


def test_an_error_without_text_has_a_text():
    class Error(Exception):
        def __str__(self):
            raise SystemExit

    assert error_text(Error()) == "an exception whose text cannot be read"
    assert error_text(KeyError("a")) == "KeyError: 'a'"


SEEN = []


def two(response, reference):
    SEEN.append(("two", response, reference))


def third(response, reference, problem, /):
    SEEN.append((response, reference, problem))


def named(response, reference, tolerance=1e-6, *, row):
    SEEN.append((response, reference, tolerance, row))


def optional(response, reference, row=None):
    SEEN.append((response, reference, row))


def options(response, reference, tolerance=1e-6, *more, **settings):
    SEEN.append((response, reference, tolerance, more, settings))


@pytest.mark.parametrize(
    ("name", "takes_row", "seen"),
    [
        ("two", False, ("two", "a", "b")),
        ("third", True, ("a", "b", {"c": 1})),
        ("named", True, ("a", "b", 1e-6, {"c": 1})),
        ("optional", True, ("a", "b", {"c": 1})),
        # A third parameter with a default was an option before rows were passed.
        ("options", False, ("a", "b", 1e-6, (), {})),
    ],
)
def test_the_signature_tells_whether_a_function_takes_the_row(name, takes_row, seen):
    function, found = load_function(f"{__name__}:{name}")
    assert found == takes_row
    function("a", "b", {"c": 1})
    assert SEEN.pop() == seen


def four(response, reference, row, other):
    pass


def test_a_function_of_four_arguments_is_refused():
    refused(r"or four\(response, reference, row\): .*'other'", load_function, f"{__name__}:four")


OF_A_PROGRAM = """
import functools, threading

@functools.cache
def made():
    return threading.Lock()

@functools.cache
def count(n):
    return n if n < 2 else count(n - 1) + 1

def reward(response, reference):
    return float(made() is made()) + count(5)
"""


def test_functions_of_a_program_with_a_cache_are_sent(tmp_path):
    names = {"__name__": "__main__"}
    exec(OF_A_PROGRAM, names)
    file = tmp_path / "rewards.pkl"
    file.write_bytes(dump_functions({"reward": names["reward"]}))
    code = (
        f"import cloudpickle; print(cloudpickle.load(open({str(file)!r}, 'rb'))['reward']('', ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "6.0\n", done.stderr


def test_functions_in_a_directory_with_a_colon(tmp_path):
    file = tmp_path / "10:46" / "rewards.pkl"
    file.parent.mkdir()
    file.write_bytes(dump_functions({"one": lambda response, reference: 1.0}))
    function, _ = load_function(f"{file}:one")
    assert function("", "", {}) == 1.0
