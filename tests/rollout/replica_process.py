"""A fake replica in a separate process, for tests that kill it; reads settings from stdin."""

import json
import sys

from semrl_jax.rollout.server import serve_until_signal
from tests.rollout.fake_engine import FakeEngine, FakeScript

if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    engine = FakeEngine(script=FakeScript(**settings.pop("script", {})))
    serve_until_signal(
        engine, announce=lambda line: print(line.split()[-1], flush=True), grace_s=0.1, **settings
    )
