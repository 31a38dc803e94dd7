"""Verifiers as users might write them, for the pool's tests; imported by name in the workers."""

import os
import sys
import time


def obey(response, reference):
    """Does what the response says; otherwise compares it with the reference."""
    match response:
        case "hang":
            time.sleep(3600)
        case "spawn and hang":
            import subprocess

            child = subprocess.Popen(["sleep", "3600"])
            with open(reference, "w") as file:
                file.write(str(child.pid))
            time.sleep(3600)
        case "exit":
            os._exit(3)
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
        case "huge":
            return 10**39  # float32 has no such number
        case "fork":
            os.fork()
            return 0.0
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "none":
            return None
        case "key":
            return {"score": 1.0, "colour": "red"}
        case "flag":
            return {"score": 1.0, "correct": "yes"}
        case "record":
            return {"score": 2, "correct": False, "boxed": True, "extracted": "é"}
        case "pid":
            return float(os.getpid())
    return response == reference


def one_argument(response):
    return 1.0


not_callable = 3
