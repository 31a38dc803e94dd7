"""Environments as users might write them, imported by name in their processes."""

import contextlib
import itertools
import os
import random
import signal
import sys
import time

from semrl_jax.environments import Turn


class Vowels:
    """Rewards vowels; says how many there were, up to three times.

    The answers are drawn from the global generator, which `reset` must find seeded.
    """

    def __init__(self, turns=3):
        self.turns, self.left = turns, 0

    def tasks(self, number, most):  # arguments may have any names
        numbers = random.Random(number)
        return [{"word": f"w{numbers.randrange(10**6)}", "answer": 3} for _ in range(most)]

    def reset(self, task, seed):
        self.left = self.turns
        return f"Write about {task['word']}."

    def step(self, action):
        self.left -= 1
        vowels = sum(action.count(letter) for letter in "aeiou")
        reply = f"{vowels} of {random.randrange(100)}. More!"
        return Turn(reply, reward=vowels / 10, done=not self.left)


class BothSides(Vowels):
    is_self_play = True


class FewProcesses(Vowels):
    """The system refuses every second process of an episode."""

    def __init__(self):
        super().__init__()
        home, fork, count = os.getpid(), os.fork, itertools.count()

        def limited():
            if os.getpid() == home and next(count) % 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()

        os.fork = limited


class Hostile:
    """Does what the message says."""

    def __init__(self, path=""):
        self.path = path
        self.weights = {"right": 2.0, "short": 0.5}

    def tasks(self, seed, count):
        return [{"number": number} for number in range(count)]

    def reset(self, task, seed):
        if task["number"] == 99:
            return f"The time is {time.time()}."
        if task["number"] == 98:
            raise ValueError("no reset")
        return "Say something."

    def step(self, message):
        match message:
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(3)
            case "raise":
                raise KeyError("two\nlines")
            case "allocate":
                bytearray(8 * 2**30)
            case "print":
                print('{"value": [[], 5.0, true]}\n' * 1000)
                os.write(1, b"noise\n")
                return Turn("printed")
            case "read":
                return Turn(input())
            case "fork":
                os.fork()
                return Turn("forked")
            case "daemon":
                if os.fork() == 0:
                    os.setsid()
                    with open(self.path, "w") as file:
                        file.write(str(os.getpid()))
                    time.sleep(3600)
                while not (os.path.exists(self.path) and os.path.getsize(self.path)):
                    time.sleep(0.01)
                return Turn("started")
            case "close":
                os.closerange(0, 1 << 16)
            case "kill group":
                os.killpg(0, signal.SIGKILL)
            case "kill parent group":
                os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
                time.sleep(60)  # the kernel kills this process, but not at once
            case "stop home":
                with open(f"/proc/{os.getppid()}/stat") as file:
                    home = int(file.read().rpartition(")")[2].split()[1])
                os.kill(home, signal.SIGSTOP)
            case "stop parent":
                with open(self.path, "w") as file:
                    file.write(str(os.getpid()))
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(3600)
            case "as gymnasium":
                return "seen", 1.0, False, False
            case "many":
                return Turn([{"role": "user", "content": "a" * 100}] * 1_000_000)
            case "many empty":
                return Turn([{"role": "user", "content": ""}] * 1_000_000)
            case "forge":
                for entry in os.listdir("/proc/self/fd"):
                    if int(entry) > 2:
                        with contextlib.suppress(OSError):
                            os.write(int(entry), b'{"value": [[], 5.0, true]}\n')
                return Turn("forged")
            case "long":
                return Turn("a" * 100_000_000)
            case "surrogate":
                return Turn("a\ud800b")
            case "infinite":
                return Turn("infinite", reward=float("inf"))
            case "nan":
                return Turn("nan", reward=float("nan"))
            case "both":
                return Turn(reward=[-2.0, 1.0], done=True)
            case "opponent":
                return Turn("the other side", 1.0, is_own=False)
            case "many rewards":
                return Turn("graded", [1.0] * 100)
            case "huge":
                return Turn("graded", 10**400)
            case "odd owner":
                return Turn("graded", is_own="yes")
            case "odd conversation":
                return Turn("graded", conversation=-1)
            case "verdicts":
                return Turn("graded", {"right": 1.0, "short": 0.5})
            case "odd verdict":
                return Turn("graded", {"odd": 1.0})
            case "large verdict":
                return Turn("graded", {"right": 1e9})
            case "no number":
                return Turn("graded", {"right": "yes"})
            case "none":
                return None
            case "silent":
                return Turn()
            case "assistant":
                return Turn([{"role": "assistant", "content": "I did it."}])
            case "bytes":
                return Turn([{"role": "user", "content": b"\xff"}])
            case "mapping":
                return {"messages": "mapped", "reward": 2, "done": False}
        return Turn(message, 1.0, message == "end")


class Tooled(Hostile):
    """Its tool does what the call says."""

    def __init__(self, path="", tools="own"):
        super().__init__(path)
        self.tools = {
            "own": [self.obey], "method": [Tooled.obey], "text": "obey", "twice": [self.obey] * 2,
            "long": [self.long],
        }[tools]  # fmt: skip

    def obey(self, what: str) -> str:
        """Does something.

        Args:
          what: to do.
        """
        if what.startswith("say "):
            return what.removeprefix("say ")
        return Hostile.step(self, what).messages

    def long(self, what: str):
        """Does something.

        Args:
          what: X
        """

    long.__doc__ = long.__doc__.replace("X", "x" * 100_000)

    def step(self, message):
        return Turn(f"no call: {message}", 1.0, message == "end")


class TakenVerdict(Hostile):
    def __init__(self):
        self.weights = {"shaped": 1.0}


class OddVerdicts(Hostile):
    def __init__(self, weights):
        self.weights = {
            "huge": {"right": 10**5000}, "many": {f"verdict_{i}": 1.0 for i in range(5000)},
        }[weights]  # fmt: skip


class NoWeights(Vowels):
    @property
    def weights(self):
        raise ValueError("no weights")


class Undecided(Vowels):
    @property
    def is_self_play(self):
        raise ValueError("nobody knows")


class Once(Hostile):
    """Can be made a single time."""

    def __init__(self, path):
        super().__init__()
        with open(path, "x"):
            pass


class Late(Hostile):
    """Ends its process when it is made, except for the third time."""

    def __init__(self, path):
        super().__init__()
        with open(path, "a") as file:
            file.write("x")
            if file.tell() < 3:
                os._exit(3)


class Forks(Hostile):
    """Two processes return from making it."""

    def __init__(self, path):
        super().__init__()
        if pid := os.fork():
            with open(path, "w") as file:
                file.write(str(pid))


class Exits(Vowels):
    def __init__(self):
        os._exit(3)


class NoStep:
    def tasks(self, seed, count):
        return []

    def reset(self, task, seed):
        return ""


class Picky(Hostile):
    def __init__(self):
        raise OSError("no corpus")
