"""Verifiers as users might write them, for the pool's tests; imported by name in the workers."""

import contextlib
import json
import os
import sys
import threading
import time


class Unreadable(BaseException):
    def __str__(self):
        raise RuntimeError("no text")


def to_all_descriptors(fields, newline="\n"):
    """Writes a forged reply to every open descriptor above standard error."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2:
            with contextlib.suppress(OSError):
                os.write(int(entry), (json.dumps(fields) + newline).encode())


def start_daemon(pid_file):
    """Starts a grandchild in its own session with all inherited descriptors; writes its id."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)
    os.wait()
    while not (os.path.exists(pid_file) and os.path.getsize(pid_file)):
        time.sleep(0.01)


FORGED = {"score": 5.0, "correct": True, "boxed": True, "extracted": None, "error": ""}


def obey(response, reference):
    """Does what the response says; otherwise compares it with the reference."""
    match response:
        case "hang":
            time.sleep(3600)
        case "daemon and hang":
            start_daemon(reference)
            time.sleep(3600)
        case "daemon and exit":
            start_daemon(reference)
            os._exit(3)
        case "daemon":
            start_daemon(reference)
            return 1.0
        case "forge":
            to_all_descriptors(FORGED)
        case "forge later":
            threading.Timer(0.05, to_all_descriptors, (FORGED,)).start()
            return 1.0
        case "forge nested":
            to_all_descriptors([], newline="[" * 100_000 + "\n")
        case "flood":
            while True:
                to_all_descriptors("x" * 60_000, newline="")
        case "child answers":
            if os.fork() == 0:
                time.sleep(0.05)
                to_all_descriptors(FORGED)
                os._exit(0)
            return 1.0
        case "variables":
            return {"score": 1.0, "extracted": " ".join(sorted(os.environ))}
        case "exit":
            os._exit(3)
        case "unreadable":
            raise Unreadable
        case "sys.exit":
            sys.exit(3)
        case "raise":
            raise KeyError("two\nlines")
        case "print":
            print('{"score": 5}\n' * 10_000, flush=True)
            os.write(1, b'{"score": 5, "correct": true, "boxed": true, "extracted": null}\n')
            print("quiet", file=sys.stderr)
            return input() if reference == "read" else 1
        case "allocate":
            return float(len(bytearray(4 * 2**30)))
        case "fork":
            os.fork()
            return 0.0
        case "nan":
            return float("nan")
        case "key":
            return {"score": 1.0, "colour": "red"}
        case "flag":
            return {"score": 1.0, "correct": "yes"}
        case "record":
            return {"score": 2, "correct": False, "boxed": True, "extracted": "é"}
        case "pid":
            return float(os.getpid())
    return response == reference


def usable_cores(response, reference):
    cores = sorted(os.sched_getaffinity(0))
    return {"score": 1.0, "extracted": json.dumps(cores)}


def one_argument(response):
    return 1.0


not_callable = 3


def with_row(response, reference, row):
    """Scores the limit of the row; later calls see a row that this one did not change."""
    limit = row.pop("limit", -1.0)
    return {"score": limit, "extracted": json.dumps(row)}
