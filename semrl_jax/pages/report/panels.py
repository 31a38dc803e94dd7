"""Which quantities of the log are drawn together, and under which names."""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from semrl_jax.pages.html import shortened

MAX_LABEL = 28  # characters
STDERR = "_stderr"


class Panel(NamedTuple):
    """Quantities in one plot."""

    section: str  # heading on the page
    title: str  # of the plot
    unit: str  # of the vertical axis
    # Key of the log -> label. A key with * stands for all keys that match, and the text that
    # matches * is added to the label
    keys: Mapping[str, str]
    in_picture: bool = False  # whether `curves.png` has the plot. The page has every plot with data
    kind: str = "lines"  # "lines"; "stacked" for parts of a whole
    note: str = ""  # below the title on the page
    page: str = ""  # a file of the run that the plot links to, if it is there
    # (values of the first key, low, high) -> the limits of the vertical axis in the picture, from
    # those that follow the data.
    limits: Callable[[Sequence[float], float, float], tuple[float, float]] | None = None
    has_legend: bool = False  # in the picture, also with one line

    def present(self, keys: Collection[str]) -> Panel:
        """The panel with the keys that were logged, each by its own name."""
        found: dict[str, str] = {}
        for pattern, label in self.keys.items():
            head, _, tail = pattern.partition("*")
            for key in fnmatch.filter(sorted(keys), pattern):
                name = key.removeprefix(head).removesuffix(tail)
                found[key] = f"{label} {shortened(name, MAX_LABEL)}".strip()
        return self._replace(keys=found)


def _by_correctness(key: str) -> dict[str, str]:
    return {f"{key}/{kind}": kind for kind in ("correct", "incorrect")}


# The parts of time/step_s that exclude each other, in the order of a step. `OTHER` is the rest.
OTHER = "time/other_s"
OF_SAMPLING = ("time/environment_wait_s", "time/verify_s")  # parts of time/sample_s in the log
STAGES = {
    "time/sync_weights_s": "sync weights",
    "time/evaluate_s": "evaluate",
    "time/sample_s": "sample",
    "time/environment_wait_s": "wait for environments",
    "time/verify_s": "wait for verifiers",
    "time/reward_model_s": "reward model",
    "time/old_logprobs_s": "log-probs",
    "time/ref_logprobs_s": "log-probs of the reference",
    "time/drift_s": "states of the reference",
    "time/values_s": "values",
    "time/metrics_s": "metrics",
    "time/advantages_s": "advantages",
    "time/update_s": "update",
    "time/write_rollouts_s": "write responses",
    OTHER: "other",
}
METRIC_TITLES = {
    "effective_rank": ("Effective rank (ER)", "rank"),
    "effective_rank_velocity": ("Velocity (ERV)", "rank"),
    "effective_rank_acceleration": ("Acceleration (ERA)", "rank per stride"),
}
PANELS = (
    Panel(
        "Learning", "Accuracy", "share",
        {
            "eval/*/greedy_accuracy": "greedy",
            "eval/*/pass@1": "pass@1",
            "reward/correct": "training",
            "reward/correct_sampled": "all sampled groups",
        },
        in_picture=True, limits=lambda values, low, high: (0, 1),
    ),
    Panel(
        "Learning", "Loss on conversations", "nats",
        {"sft/loss": "training", "eval/*/loss": "held-out"}, in_picture=True,
    ),
    Panel(
        "Learning", "Reward", "score",
        {
            "reward/mean": "mean",
            "reward/mean_sampled": "mean of all sampled groups",
            "reward/group_std": "spread within groups",
            "reward/*/mean": "mean of",
        },
        in_picture=True,
    ),
    Panel(
        "Learning", "Groups", "share",
        {"reward/zero_variance_group_fraction": "groups of equal rewards"},
        note="Nothing is learned from a group with equal rewards: its advantages are 0.",
    ),
    *(
        Panel(
            "Correct against incorrect", title, unit, _by_correctness(f"metrics/{name}"),
            in_picture=True,
        )
        for name, (title, unit) in METRIC_TITLES.items()
    ),
    Panel(
        "Correct against incorrect", "Length by verdict", "tokens",
        _by_correctness("response/length"),
    ),
    Panel(
        "Correct against incorrect", "Truncated responses by verdict", "share",
        _by_correctness("response/length_fraction"),
    ),
    Panel(
        "Correct against incorrect", "Correlation with ER", "correlation",
        {"metrics/correlation/effective_rank_*": ""},
    ),
    Panel(
        "Shaping", "Shaping", "bonus / |advantage|",
        {"shaping/bonus_to_advantage/mean": "mean bonus / mean |A|"},
        in_picture=True, has_legend=True,
    ),
    Panel("Shaping", "Bonus", "advantage", {"shaping/bonus/mean": "bonus per response token"}),
    Panel("Shaping", "Beta and scale", "factor",
          {"shaping/beta/mean": "beta", "shaping/scale": "scale"}),
    Panel("Shaping", "Deviation from the baseline", "relative", {"shaping/deviation/*/mean": ""}),
    Panel("Shaping", "Weights of the indicators", "weight", {"shaping/weight/*/mean": ""}),
    Panel(
        "Shaping", "Clipped and valid", "share",
        {
            "shaping/clipped_fraction/mean": "tokens with clipped bonus",
            "shaping/valid_fraction/mean": "valid responses",
        },
    ),
    Panel(
        "Responses", "Response length", "tokens",
        {"response/length/mean": "mean", "response/length/max": "max"},
        in_picture=True, limits=lambda values, low, high: (0, high),
    ),
    Panel(
        "Responses", "How responses end", "share",
        {
            **{f"response/{reason}_fraction": reason for reason in ("eos", "stop", "length")},
            "reward/boxed_fraction": "boxed",
        },
    ),
    Panel("Responses", "Rewards of steps", "reward", {"response/step_reward/mean": "mean"}),
    Panel(
        "Policy", "Entropy and KL", "nats",
        {"policy/entropy": "entropy", "policy/kl": "KL to the reference"}, in_picture=True,
    ),
    Panel("Policy", "Loss", "loss", {"policy/loss": "total", "policy/pg_loss": "policy gradient"}),
    Panel("Policy", "Gradient norm", "norm",
          {"policy/grad_norm": "policy", "critic/grad_norm": "critic"}),
    Panel("Policy", "Learning rate", "rate",
          {"policy/learning_rate": "policy", "critic/learning_rate": "critic"}),
    Panel(
        "Policy", "Change in the update", "nats, share",
        {"policy/approx_kl": "KL to the policy before (nats)", "policy/clip_fraction": "clipped"},
    ),
    Panel(
        "Policy", "Advantages", "advantage",
        {f"advantage/{kind}{name}": f"{kind.replace('/', ' ')}{name}"
         for kind in ("", "shaped/") for name in ("max", "mean", "min")},
    ),
    Panel(
        "Policy", "Critic", "share",
        {
            "critic/explained_variance": "explained variance of the returns",
            "critic/clip_fraction": "clipped values",
        },
        # A new critic can be much worse than a constant. Its first values would hide the rest.
        in_picture=True, limits=lambda values, low, high: (max(low, -1), max(high, 0)),
    ),
    Panel(
        "Policy", "Values of the critic", "reward",
        {"critic/value/mean": "mean value", "critic/return/mean": "mean return"}, in_picture=True,
    ),
    Panel("Policy", "State of the algorithm", "value", {"algorithm/*": ""}, in_picture=True,
          has_legend=True),
    Panel(
        "Sampling", "Mismatch of log-probabilities", "nats",
        {"rollout/logprob_mismatch/mean": "mean", "rollout/logprob_mismatch/max": "max"},
        note="Between the rollout engine and the policy; above rounding, the engine samples from "
        "another distribution. python -m launch.mismatch names the cause.",
        page="mismatch.html",
    ),
    Panel(
        "Sampling", "Mismatch of hidden states", "relative",
        {"rollout/hidden_state_mismatch/mean": "mean", "rollout/hidden_state_mismatch/max": "max"},
        page="mismatch.html",
    ),
    Panel(
        "Sampling", "Importance weights", "weight",
        {f"policy/importance_weight/{name}": name for name in ("max", "mean", "min")},
    ),
    Panel(
        "Sampling", "Staleness", "steps",
        {"rollout/staleness": "mean", "rollout/staleness/max": "max"},
    ),
    Panel(
        "Sampling", "Dynamic sampling", "groups",
        {
            "rollout/groups_sampled": "sampled",
            "rollout/groups_dropped/all_correct": "dropped, all correct",
            "rollout/groups_dropped/all_incorrect": "dropped, all incorrect",
            "rollout/groups_unused": "unused",
        },
    ),
    Panel(
        "Sampling", "Branches and hints", "share",
        {
            "rollout/branches/fraction": "branches",
            "rollout/branches/correct": "correct branches",
            "rollout/branches/parents_correct": "correct responses that they leave",
            "rollout/hints/fraction": "responses with a hint",
            "rollout/hints/correct": "correct ones of these",
        },
    ),
    Panel(
        "Sampling", "Failures of the verifier", "responses",
        {f"reward/num_{name}": name.replace("_", " ")
         for name in ("timeouts", "crashes", "exceptions", "invalid", "too_long")},
    ),
    Panel(
        "Time", "Stages of a step", "s", STAGES, kind="stacked",
        note="A first step compiles and may leave the plot; double-click shows all of it.",
    ),
    Panel(
        "Time", "Time of a step", "s",
        {
            "time/step_s": "step",
            "time/generate_s": "generate",
            "time/update_s": "update",
            "time/old_logprobs_s": "log-probs",
        },
        # The first step compiles and is slow. Its value would make all others look like zero.
        in_picture=True, limits=lambda values, low, high: (0, 2.5 * statistics.median(values)),
    ),
    Panel(
        "Time", "Sampling ahead", "s",
        {
            "time/sample_ahead_s": "sample beside the trainer",
            "time/replicas_idle_s": "wait of the replicas",
            "time/queued_s": "wait of the batch",
        },
    ),
    Panel(
        "Time", "Speed", "tokens / s",
        {
            "rollout/tokens_per_s": "sampled",
            "policy/tokens_per_s": "trained",
            "sft/tokens_per_s": "fine-tuned",
        },
    ),
    Panel(
        "Time", "Speed of the replicas", "tokens / s",
        {"rollout/replica/*/tokens_per_s": "replica"}, in_picture=True,
    ),
    Panel("Time", "Time with a call", "share", {"time/replica/*/busy_fraction": "replica"},
          in_picture=True),
)  # fmt: skip
# Figures of a benchmark whose plots come first, with title and unit.
FIGURES = {
    "greedy_accuracy": ("Greedy accuracy", "share"),
    "mean_score": ("Mean score", "score"),
    "mean_length": ("Mean length", "tokens"),
    "mean_length_correct": ("Mean length of correct responses", "tokens"),
    "mean_length_incorrect": ("Mean length of incorrect responses", "tokens"),
    "mean_length_wrong": ("Mean length of wrong responses", "tokens"),
    "mean_length_finished": ("Mean length of responses that end", "tokens"),
    "finished_fraction": ("Responses that end", "share"),
    "truncated_fraction": ("Truncated responses", "share"),
    "boxed_fraction": ("Boxed responses", "share"),
    "empty_fraction": ("Responses without an answer", "share"),
    "repeated_ngrams": ("Repeated 4-grams", "share"),
    "loop_fraction": ("Responses that end in a loop", "share"),
    "reflection_fraction": ("Responses with words of reflection", "share"),
    "reflection_words": ("Words of reflection", "per response"),
    "mean_turns": ("Turns of an episode", "turns"),
    "answer_entropy": ("Entropy of the answers to a problem", "nats"),
    "distinct_answers": ("Different answers to a problem", "answers"),
    "loss": ("Held-out loss", "nats"),
}
UNPLOTTED = {"num_problems"}
# Benchmark and figure of a key; the names of some figures have a slash.
_EVALUATED = re.compile(
    r"eval/(.+?)/(?:responses/)?((?:accuracy|best@\d+|lowest@\d+)/.+|[^/]+)", re.DOTALL
)


def panels_of(keys: Iterable[str]) -> list[Panel]:
    """The plots of the page for these keys of the log, in its order; none is empty."""
    present = set(keys)
    known = [panel.present(present) for panel in PANELS]
    drawn = {key for panel in known for key in panel.keys}
    benchmarks: dict[str, dict[str, str]] = {}
    metrics: dict[str, dict[str, str]] = {}
    for key in sorted(present):
        if "/metrics/" not in key and (parts := _EVALUATED.fullmatch(key)):
            benchmark, figure = parts.groups()
            if not key.endswith(STDERR) and figure not in UNPLOTTED:
                benchmarks.setdefault(figure, {})[key] = shortened(benchmark, MAX_LABEL)
        metric, _, kind = key.removeprefix("metrics/").rpartition("/")
        if key.startswith("metrics/") and kind in ("correct", "incorrect") and key not in drawn:
            metrics.setdefault(metric, {})[key] = kind
    places = {name: place for place, name in enumerate(FIGURES)}
    of_benchmarks = [
        Panel("Benchmarks", *FIGURES.get(figure, (figure, "value")), benchmarks[figure])
        for figure in sorted(benchmarks, key=lambda name: (places.get(name, len(places)), name))
    ]
    of_metrics = [
        Panel("Correct against incorrect", metric, "value", metrics[metric]) for metric in metrics
    ]
    sections = list(dict.fromkeys(panel.section for panel in PANELS))
    sections.insert(sections.index("Shaping") + 1, "Benchmarks")
    found = [panel for panel in (*known, *of_benchmarks, *of_metrics) if panel.keys]
    return sorted(found, key=lambda panel: sections.index(panel.section))
