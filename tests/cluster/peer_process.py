"""One process of test_peers.py: python -m tests.cluster.peer_process INDEX COUNT PORT DEED.

Process 0 prints its port. Every process gathers three times and prints the gathered values. A
process with a DEED does it before the second time.
"""

import os
import signal
import sys
import time

from semrl_jax.cluster.agreement import Retry, on_first, run_phase
from semrl_jax.cluster.links import Listener
from semrl_jax.cluster.peers import Peers
from semrl_jax.support.errors import Preempted, UserError

KEY = b"secret of the test"


def mistaken():
    raise UserError("seed=-1 is wrong.")


def preempted():
    raise Preempted("SIGTERM")


def broken():
    raise KeyError("boom")


def again():
    raise Retry("replica gone")


WORK = {"mistake": mistaken, "preempted": preempted, "error": broken, "retry": again}


def main() -> None:
    index, count, port, deed = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if deed == "linger":  # process 0 reports a loss, and still runs when the others exit
        exit_at_once = os._exit
        os._exit = lambda code: (time.sleep(index == 0), exit_at_once(code))
    listener = None
    if index == 0:
        listener = Listener("127.0.0.1", KEY, port)
        print(listener.address[1], flush=True)
    peers = Peers(
        index, count, listener=listener, address=("127.0.0.1", port), key=KEY,
        connect_timeout_s=60.0, heartbeat_timeout_s=3.0, phase_timeout_s=4.0, progress_every_s=1.0,
        progress=lambda line: print("progress:", line, flush=True),
    )  # fmt: skip
    print(peers.gather("first", {"process": index}), flush=True)
    with peers.phase("deed"):
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif deed == "slow":
            time.sleep(2.5)
        elif deed == "hang":
            time.sleep(1000)
        elif deed == "busy":
            while True:
                with peers.phase("deed"):
                    time.sleep(0.5)
        elif deed == "fail":
            peers.fail("disk on fire", 2)
            sys.exit(2)
    if deed == "die later":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "hang later":
        time.sleep(1000)
    try:
        run_phase(peers, "second", WORK.get(deed, lambda: None))
    except BaseException as error:
        print("raised", type(error).__name__, error, flush=True)
    if deed == "other phase":
        peers.gather("elsewhere", 0)
    print(on_first(peers, "third", lambda: os.getpid()), flush=True)
    peers.close()
    if deed == "early":
        sys.exit(0)
    time.sleep(0.5)


if __name__ == "__main__":
    main()
