"""A vLLM replica whose worker records preemptions, and whose weight loads fail on demand.

Files in $SEMRL_TEST_DIRECTORY: `preempted` and `cached` list the ids of requests that were
preempted, or that began with a cached prefix; `slept` lists sleeps, parts that woke, and loads.
Each line of `fail_loads`, a name from FAILURES, makes one load of weights fail.
"""

import os
import pathlib

from semrl_vllm.extension import RolloutExtension

from launch import cli, rollout

DIRECTORY = pathlib.Path(os.environ["SEMRL_TEST_DIRECTORY"])


class ObservedExtension(RolloutExtension):
    """The plugin's extension, with records of its requests."""

    def semrl_install(self, *given):
        answer = super().semrl_install(*given)
        runner = self.model_runner
        execute_model, reload_weights = runner.execute_model, runner.reload_weights
        sleep, wake_up = self.sleep, self.wake_up

        def observed_execute_model(scheduled, *args, **options):
            write("preempted", scheduled.preempted_req_ids or ())
            write(
                "cached", (r.req_id for r in scheduled.scheduled_new_reqs if r.num_computed_tokens)
            )
            return execute_model(scheduled, *args, **options)

        def observed_sleep(level):
            write("slept", [f"sleep_{level}"])
            sleep(level)

        def observed_wake_up(tags):
            write("slept", tags)
            wake_up(tags)

        def observed_reload_weights(weights_iterator):
            write("slept", ["load"])
            orders = DIRECTORY / "fail_loads"
            kinds = orders.read_text().splitlines() if orders.exists() else []
            if kinds:
                orders.write_text("\n".join(kinds[1:]))
                weights_iterator = FAILURES[kinds[0]](weights_iterator)
            return reload_weights(weights_iterator=weights_iterator)

        runner.execute_model = observed_execute_model
        runner.reload_weights = observed_reload_weights
        self.sleep, self.wake_up = observed_sleep, observed_wake_up
        return answer


def write(name, request_ids):
    with open(DIRECTORY / name, "a") as file:
        file.writelines(f"{request_id}\n" for request_id in request_ids)


SPOILED = "layers.1.self_attn.k_proj.weight"  # vLLM stores it in one tensor with q_proj and v_proj


def _broken_off(pieces):
    for name, tensor in pieces:
        if name.endswith(SPOILED):
            raise RuntimeError("a load that a test breaks")
        yield name, tensor


def _cut(pieces):
    """A tensor is too short: vLLM keeps it until its layer is complete, then raises."""
    for name, tensor in pieces:
        yield name, tensor[: len(tensor) // 2] if name.endswith(SPOILED) else tensor


def _lost(pieces):
    """A tensor is missing: vLLM alone would accept this and keep the old weights."""
    for name, tensor in pieces:
        if not name.endswith(SPOILED):
            yield name, tensor


FAILURES = {"broken off": _broken_off, "cut": _cut, "lost": _lost}


if __name__ == "__mp_main__":
    rollout.end_with_parent()
if __name__ == "__main__":
    from semrl_jax.rollout.engines import vllm

    vllm.EXTENSION = "tests.rollout.engines.vllm_observed.ObservedExtension"
    cli.run(rollout.main, __doc__)
