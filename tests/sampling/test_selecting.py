"""Dynamic sampling: which groups a step keeps, and where the next step begins to read."""

import concurrent.futures
import dataclasses
import functools
import itertools
import re
import weakref

import numpy as np
import pytest

from semrl_jax.cluster.agreement import is_agreed
from semrl_jax.data import PromptDataset, PromptExample
from semrl_jax.data.prompts import Position, prompt_order
from semrl_jax.runs import train, validate
from semrl_jax.sampling.batch_rewards import group_rewards, unshuffled_rewards
from semrl_jax.sampling.requests import TRAINING, stream_seed
from semrl_jax.sampling.scoring import Scored, score_and_measure
from semrl_jax.sampling.selecting import Selecting, TooFewGroups, sample_until_kept
from semrl_jax.sampling.source import Now, Rounds
from semrl_jax.sampling.weights import Weights
from semrl_jax.support.clock import Clock
from tests.cases import refused
from tests.fixtures import make_scored, read_rows, stable
from tests.sampling.parts import sampler_of

SIZE = 4  # responses per group


def rounds_of(scores):
    """A function that returns the scores [R, P, G] as responses, and a list of its calls."""
    calls = []

    def sample_round(number, num_kept):
        calls.append((number, num_kept))
        flat = np.ravel(scores[number])
        first = len(flat) * number
        return Scored([make_scored(first + i, score=float(s)) for i, s in enumerate(flat)])

    return sample_round, calls


def rewards_of(scored):
    return np.array([item.verdict.score for item in scored], np.float32).reshape(-1, SIZE)


@pytest.mark.parametrize(("failure_score", "keep_by", "kept"), [
    (-0.5, "reward", True), (-0.5, "correctness", False), (0.0, "reward", False),
])  # fmt: skip
def test_a_failed_episode_counts_in_its_group_with_its_score(failure_score, keep_by, kept):
    """Three episodes without a reward and a failed one, whose earlier rewards do not count."""
    rollouts = [
        dataclasses.replace(
            make_scored(index).rollout,
            turn_rewards=np.array([3.0 if index == 2 else 0.0, 0.0], np.float32),
            environment_error="timeout: 2 s" * (index == 2),
        )
        for index in range(SIZE)
    ]
    scored = score_and_measure(
        rollouts, decode=lambda rollout: "", references={0: ""}, verifier=None, measurer=None,
        failure_score=failure_score,
    )  # fmt: skip
    options = {"num_groups": 1, "max_rounds": 1, "keep_by": keep_by}
    if kept:
        found = sample_until_kept(lambda *_: scored, rewards_of, **options)
        assert [item.verdict.score for item in found.scored] == [0, 0, failure_score, 0]
    else:
        with pytest.raises(TooFewGroups):
            sample_until_kept(lambda *_: scored, rewards_of, **options)


def kept_by_hand(scores, num_groups):
    """Loops over the groups: the kept ones, the prompts read, and counts by kind."""
    kept, dropped = [], {"all_correct": 0, "all_incorrect": 0, "other": 0}
    for number, group in enumerate(itertools.chain(*scores)):
        if len(set(group)) > 1:
            kept.append(number)
        elif group[0] > 0:  # a positive score is a correct response, see make_scored
            dropped["all_correct"] += 1
        else:
            dropped["all_incorrect"] += 1
        if len(kept) == num_groups:
            return kept, number + 1, dropped
    raise AssertionError("too few groups")


@pytest.mark.parametrize("seed", range(8))
def test_the_first_groups_with_unequal_rewards_are_kept_in_order(seed):
    random = np.random.default_rng(seed)
    scores = (random.random((9, 3, SIZE)) < random.random((9, 3, 1))).astype(np.float32)
    scores[1:, 0] = 1.0  # at least two rounds
    sample_round, calls = rounds_of(scores.tolist())
    kept = sample_until_kept(sample_round, rewards_of, num_groups=3, max_rounds=9, keep_by="reward")
    groups, num_prompts, dropped = kept_by_hand(scores.tolist(), 3)
    ids = [(item.rollout.group_id, item.rollout.sample_index) for item in kept.scored]
    assert ids == list(itertools.product(groups, range(SIZE)))
    assert kept.num_prompts == num_prompts
    num_rounds = -(-num_prompts // 3)
    before = [sum(group < 3 * number for group in groups) for number in range(num_rounds)]
    assert calls == list(zip(range(num_rounds), before))
    sampled = scores[:num_rounds]
    assert kept.scalars == {
        "rollout/sampling_rounds": num_rounds,
        "rollout/groups_sampled": 3 * num_rounds,
        "rollout/groups_dropped": num_prompts - 3,
        "rollout/groups_dropped/all_correct": dropped["all_correct"],
        "rollout/groups_dropped/all_incorrect": dropped["all_incorrect"],
        "rollout/groups_unused": 3 * num_rounds - num_prompts,
        "rollout/num_sampled_tokens": 2 * sampled.size,  # each of two tokens
        "reward/mean_sampled": pytest.approx(sampled.mean(dtype=np.float64), rel=1e-6),
        "reward/correct_sampled": (sampled > 0).mean(),
    }


@pytest.mark.parametrize(("keep_by", "first"), [("reward", 0), ("correctness", 1)])
def test_scores_of_incorrect_responses_may_differ(keep_by, first):
    """Such as those of boxed and unboxed answers; the paper's rule looks at correctness alone."""
    sample_round, _ = rounds_of([[[-1, 0, 0, -1], [1, 0, 0, 0]]])
    kept = sample_until_kept(sample_round, rewards_of, num_groups=1, max_rounds=1, keep_by=keep_by)
    assert {item.rollout.group_id for item in kept.scored} == {first}


def test_the_penalty_of_long_responses_decides_and_the_shuffle_does_not(config):
    config.rollout.max_response_tokens, config.algorithms.batch_rules.overlong_tokens = 8, 4
    config.rewards.shuffle = True
    lengths = [2, 2, 2, 2, 2, 8, 2, 2, 2, 2, 2, 2]
    items = [
        make_scored(i, score=1.0 + i // 8, response_ids=np.ones(length, np.int32))
        for i, length in enumerate(lengths)
    ]
    scored = Scored(items)
    assert len(np.unique(group_rewards(scored, config, 0)[0])) > 1  # rewards of other groups
    kept = sample_until_kept(
        lambda *_: scored,
        functools.partial(unshuffled_rewards, config=config),
        num_groups=1,
        max_rounds=1,
        keep_by="reward",
    )
    assert {item.rollout.group_id for item in kept.scored} == {1}


def test_responses_that_are_not_kept_are_released_before_the_next_round():
    sample_round, seen = rounds_of([[[0] * 4, [1, 0, 1, 1]], [[0, 1, 0, 1], [1, 0, 0, 0]]])[0], []

    def watched(number, num_kept):
        assert [ref() is not None for ref in seen] == [False] * 4 * number + [True] * 4 * number
        scored = sample_round(number, num_kept)
        seen.extend(weakref.ref(item.rollout.response_ids) for item in scored)
        return scored

    sample_until_kept(watched, rewards_of, num_groups=2, max_rounds=2, keep_by="reward")
    assert [ref() is not None for ref in seen] == [False] * 16


def test_too_few_groups_end_the_run_with_counts():
    sample_round, calls = rounds_of([[[1] * 4, [0] * 4, [0] * 4], [[0] * 4, [0, 1, 0, 1], [1] * 4]])
    message = (
        "max_sampling_rounds=2 gave 1 of the data.prompts_per_step=3 groups that a step must "
        "keep; of the 6 groups sampled, 2 were all correct and 3 all wrong. Raise "
        "max_sampling_rounds to continue, or set it to 0 to train on all groups; or begin a run "
        "with an easier set of prompts"
    )
    with pytest.raises(TooFewGroups, match=re.escape(message)) as error:
        sample_until_kept(sample_round, rewards_of, num_groups=3, max_rounds=2, keep_by="reward")
    assert len(calls) == 2 and is_agreed(error.value) and "\n" not in str(error.value)


def test_a_group_of_one_cannot_be_kept(config):
    config.algorithms.name = "reinforce_plus_plus"
    config.rollout.group_size = 1
    validate(config)
    config.algorithms.batch_rules.max_sampling_rounds = 2
    refused("max_sampling_rounds=2 keeps groups with unequal rewards", validate, config)


PROMPTS = PromptDataset(
    tuple(
        PromptExample(str(i), np.array([3, 4 + i], np.int32), str(i), "numbers", i)
        for i in range(7)
    )
)


def make_source(config, seen=None, **parts):
    """A source whose responses are right or wrong by their seed; odd prompts are always wrong."""

    def sample_here(draw, *, arrived, clock, measuring, states, **_):
        scored = []
        for request in draw.requests:
            prompt = int(draw.references[request.group_id])
            assert request.prompt_ids[1] == 4 + prompt
            ids = np.array([request.seed % 1000, 1], np.int32)
            score = float(request.seed % 2) if prompt % 2 == 0 else 0.0
            item = make_scored(0, score=score, response_ids=ids)
            rollout = dataclasses.replace(item.rollout, **request.rollout_fields)
            scored.append(dataclasses.replace(item, rollout=rollout, reference=str(prompt)))
            arrived(rollout)
        if seen is not None:
            seen.extend(draw.requests)
        return Scored(scored)

    sampler = sampler_of(config, weights=Weights(0, lambda: iter(()), False), **parts)
    sampler.sample_here = sample_here
    rounds = Rounds(config, PROMPTS, sampler, None)
    if not config.algorithms.batch_rules.max_sampling_rounds:
        return Now(sampler, rounds)
    rewards_of = functools.partial(unshuffled_rewards, config=config)
    return Now(sampler, Selecting(config, rounds, rewards_of))


def steps_of(source, num_steps, said=None):
    """(step, sample) of successive steps, each from the position of the one before."""
    position = Position(0, 0)
    for step in range(num_steps):
        clock = Clock(said.append if said is not None else lambda phase: None)
        sample = source.next(step, position, clock)
        position = sample.position
        yield step, sample


def test_without_the_rule_prompts_seeds_and_ids_are_those_of_the_step(config):
    seen = []
    source = make_source(config, seen=seen)
    for _, sample in steps_of(source, 2):
        assert len(sample.scored) == 16 and not sample.scalars
    assert sample.position == Position(1, 1)
    for number, request in enumerate(seen):
        step, draw, index = number // 16, number % 16 // 4, number % 4
        assert request.sample_id == f"train/{step}/{draw}/{index}"
        assert request.group_id == 4 * step + draw and request.sample_index == index
        assert request.seed == stream_seed(config.seed, TRAINING, step, draw, index)


def test_prompts_are_read_once_and_those_of_unused_groups_come_again(config):
    config.data.prompts_per_step = 3
    config.algorithms.batch_rules.max_sampling_rounds = 20
    seen, said, read = [], [], []
    source = make_source(config, seen=seen)
    position, num_unused = (0, 0), 0
    for step, sample in steps_of(source, 6, said):
        own = [request for request in seen if request.sample_id.startswith(f"train/{step}/")]
        draws = [int(request.sample_id.split("/")[2]) for request in own[::SIZE]]
        assert draws == list(range(len(draws))) and len(draws) % 3 == 0
        for draw, request in zip(np.repeat(draws, SIZE), own):
            index = request.sample_index
            assert request.seed == stream_seed(config.seed, TRAINING, step, int(draw), index)
        scores = np.reshape([item.verdict.score for item in sample.scored], (3, SIZE))
        assert (scores.min(axis=1) < scores.max(axis=1)).all()
        used = sample.scored[-1].rollout.group_id - own[0].group_id + 1
        assert sample.scalars["rollout/groups_dropped"] == used - 3
        num_unused += len(draws) - used
        read += [int(request.prompt_ids[1]) - 4 for request in own[::SIZE]][:used]
        total = 7 * sample.position[0] + sample.position[1]
        assert total - (7 * position[0] + position[1]) == used
        position = sample.position
    assert num_unused > 0  # otherwise the test shows nothing
    order = [prompt for epoch in range(20) for prompt in prompt_order(7, config.seed, epoch)]
    assert read == order[: len(read)]
    for name in ("group_id", "sample_id", "seed"):
        count = len({getattr(request, name) for request in seen})
        assert count == len(seen) // (SIZE if name == "group_id" else 1), name
    assert said[:2] == ["sample", "sample round 1, 0/3 groups kept, 1/12"]
    assert re.fullmatch(r"sample round 2, [012]/3 groups kept, 13/24", said[13])


def test_all_processes_keep_the_same_groups(config, pair):
    """Each process samples half of a round. They exchange responses as they do during an update."""
    config.algorithms.batch_rules.max_sampling_rounds = 20

    def ids(source):
        return [
            ([item.rollout.sample_id for item in sample.scored], sample.position, sample.scalars)
            for _, sample in steps_of(source, 2)
        ]

    sources = [make_source(config, peers=peers.channel("test"), sampling=(0, 1)) for peers in pair]
    alone = ids(make_source(config))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ids, sources)) == [alone, alone]


@pytest.mark.soak
def test_a_run_with_dynamic_sampling_resumes_with_the_same_rows(config, tmp_path, capsys):
    """The last attempt ends with too few groups: it saves the last step, and others continue."""
    config.rollout.group_size = 2
    config.rewards.function = "tests.verifiers:by_parity"
    config.algorithms.batch_rules.max_sampling_rounds = 9
    config.checkpoints.every_steps = 10
    for num_steps, name in ((3, "straight"), (1, "resumed"), (3, "resumed")):
        config.training.num_steps = num_steps
        assert train(config, str(tmp_path / name)) == 0
    straight, resumed = (stable(read_rows(tmp_path / name)) for name in ("straight", "resumed"))
    for row in straight[:3]:
        assert row["reward/zero_variance_group_fraction"] == 0
        assert row["rollout/responses"] >= 8 * row["rollout/sampling_rounds"]
    assert sum(row["rollout/sampling_rounds"] for row in straight[:3]) > 3
    for row, expected in zip(resumed[:3], straight[:3], strict=True):
        assert {key: row[key] for key in expected} == expected
    for step in range(3):
        name = f"rollouts/step_{step:06d}.parquet"
        expected = (tmp_path / "straight" / name).read_bytes()
        assert (tmp_path / "resumed" / name).read_bytes() == expected

    config.algorithms.batch_rules.max_sampling_rounds = 1
    config.training.num_steps = 40
    with pytest.raises(TooFewGroups):
        train(config, str(tmp_path / "straight"))
    rows = read_rows(tmp_path / "straight")
    kept = sorted(int(path.name) for path in (tmp_path / "straight" / "checkpoints").iterdir())
    assert kept[-1] == len(rows) == rows[-1]["step"] + 1
    config.algorithms.batch_rules.max_sampling_rounds = 9
    config.training.num_steps = len(rows) + 1
    assert train(config, str(tmp_path / "straight")) == 0
    assert f"resumed {tmp_path / 'straight'} at step {len(rows)}" in capsys.readouterr().out
