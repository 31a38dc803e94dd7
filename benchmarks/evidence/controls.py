r"""Controls of the shaping: other indicators in place of ER, ERV and ERA.

    --config.metrics.probes=benchmarks.evidence.controls \
    --config.shaping.indicators=length --config.shaping.guidance=length ...

A bonus that is made of them differs from the paper's in nothing else:

- `length`: tokens of the response that the policy sampled;
- `shuffled_M` for each of ER, ERV, ERA: its values permuted over the responses of the step that
  have all three. A response gets all from one other, so their relation to each other stays;
- `drawn_M`: each value drawn with replacement from all of the step, and each metric on its own;
- `rows_M`: sample j of group i has the value of the batch's response i + j, as in the reference
  implementation, which reads hidden states there until the first response of the batch has ended;
- `bfloat16_M`: its values rounded to bfloat16, as the reference implementation stores them.

A response that lacks one of ER, ERV and ERA keeps what it has in the first two kinds; the paper's
shaping does not count it. Permutations and draws follow from the number of the step alone.
"""

import jax.numpy as jnp
import numpy as np

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.shaping.options import INDICATORS as OF_PAPER
from semrl_jax.training.probes import Probe, Seen, Tools

KINDS = ("shuffled", "drawn", "rows", "bfloat16")
INDICATORS = ("length", *(f"{kind}_{name}" for kind in KINDS for name in OF_PAPER))


class Controls(Probe):
    def __init__(self, group_size: int):
        self._group_size = group_size

    def before(self, seen: Seen) -> Seen:
        num_tokens = np.asarray(seen.batch.response_mask).sum(axis=1).astype(np.float32)
        controls = {MetricKey("length"): Measurement(num_tokens, num_tokens > 0)}
        measured = {name: seen.scored.metrics[MetricKey.parse(name)] for name in OF_PAPER}
        whole = np.flatnonzero(np.all([each.valid for each in measured.values()], axis=0))
        rng = np.random.default_rng(seen.step)
        order = rng.permutation(whole)
        rows = np.add(*np.divmod(np.arange(len(num_tokens)), self._group_size))
        for name, (values, valid) in measured.items():
            given = {"rows": Measurement(values[rows], valid[rows])}
            given["bfloat16"] = Measurement(
                np.asarray(values, jnp.bfloat16).astype(np.float32), valid
            )
            controls |= {MetricKey.parse(f"{kind}_{name}"): each for kind, each in given.items()}
            for kind, source in (("shuffled", order), ("drawn", rng.choice(whole, len(whole)))):
                others = np.array(values)
                others[whole] = others[source]
                controls[MetricKey.parse(f"{kind}_{name}")] = Measurement(others, valid)
        return seen.with_metrics(controls)


def probe(tools: Tools) -> Probe:
    return Controls(tools.config.rollout.group_size)
