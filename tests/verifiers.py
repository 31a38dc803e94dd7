"""Verifiers as users might write them, named in `rewards.function` by the tests of the trainer."""

import os
import time

print("a verifier may print")


def by_length(response, reference):
    """A score that differs between responses of an untrained policy."""
    return {"score": float(len(response) % 7), "correct": len(response) % 2 == 0}


def by_parity(response, reference):
    """Correct for about half of the responses of an untrained policy, and of the references."""
    correct = (len(response) + int(reference)) % 2 == 0
    return {"score": float(correct), "correct": correct}


def nonsense(response, reference):
    return "right"


def sleeps(response, reference):
    time.sleep(3600)


def exits(response, reference):
    os._exit(3)


def raises(response, reference):
    raise KeyError(reference)


def raises_without_box(response, reference):
    """A score of the reference in its box, so that a run starts; fails on every other response."""
    return {"score": response.index("\\boxed"), "correct": True}


def by_row(response, reference, row):
    """A score from the row of the problem, and one that differs between responses."""
    return {"score": row["bonus"] + float(len(response) % 7), "correct": row["solvable"]}


def by_sign(response, reference):
    """A reward below 0 for about half of the responses of an untrained policy."""
    return {"score": 1.0 if len(response) % 2 else -1.0, "correct": bool(len(response) % 2)}


def of_steps(response, reference):
    """Steps of 5 characters, with a reward that depends on their text, and a score by parity."""
    ends = range(5, len(response) + 1, 5)
    steps = [(end, (ord(response[end - 1]) % 5 - 2) / 2) for end in ends]
    return {"score": float(len(response) % 2), "correct": True, "steps": steps}
