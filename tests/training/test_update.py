"""The compiled passes and the update: the layout of a batch changes nothing, nor does a broken one.

The oracle computes one sequence at a time, without padding, rows or micro-batches.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from semrl_jax import models
from semrl_jax.algorithms import grpo, importance_weights, token_weights
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models.attention import BRANCHES
from semrl_jax.support import programs
from semrl_jax.training import policy_update
from semrl_jax.training.micro_batches import split_rows
from semrl_jax.training.optimizer import Optimizer
from semrl_jax.training.packing import RowPlan, lay_out, take_values
from semrl_jax.training.policy_update import PolicyLoss, SlotValues, batch_logprobs, row_logprobs
from semrl_jax.training.train_state import Trained
from semrl_jax.training.trainee import Frozen, MiniBatch, Trainee, update_rows
from tests.cases import slow_after
from tests.training.test_mesh import OPTIMIZER
from tests.training.test_packing import batch_of, mesh_of
from tests.training.updates import update_policy

DESCENT = Optimizer(*optax.sgd(1.0))  # its step is the gradient
OPTIONS = grpo.Options(entropy_coefficient=0.01, kl_coefficient=0.1)
VOCAB = 23
LIMITS = (4, 10)  # longest prompt and response
LENGTHS = ((4, 10), (1, 1), (3, 2), (2, 9), (4, 5))  # 5: no size but 1 divides it
BUDGET = sum(LIMITS)
PLANS = {
    "all rows at once": {"micro_batch_size": 8},
    "one row": {"micro_batch_size": 1},
    "two rows": {"micro_batch_size": 2},
    "three rows": {"micro_batch_size": 3},
    "in order": {"micro_batch_size": 3, "balance_lengths": False},
    "budget": {"micro_batch_tokens": 3 * BUDGET + 1},
    "packed": {"micro_batch_tokens": 2 * BUDGET + 3, "pack_sequences": True},
    "packed, in order": {
        "micro_batch_tokens": BUDGET, "pack_sequences": True, "balance_lengths": False,
    },
    "packed, one row": {"micro_batch_tokens": 100, "pack_sequences": True},
}  # fmt: skip


def make_policy(window=None, remat="none", num_layers=2, hidden_size=32):
    config = models.DecoderConfig(
        vocab_size=VOCAB, hidden_size=hidden_size, intermediate_size=32, num_layers=num_layers,
        num_heads=2, num_kv_heads=1, head_dim=16, sliding_window=window,
        full_attention_layers=(1,) if window else (),
    )  # fmt: skip
    return models.Policy(config, remat=remat)


@functools.cache
def setup(window=4):
    policy = make_policy(window)
    return policy, policy.init(jax.random.key(0))


def plan_of(options, num_shards=1):
    return RowPlan(mesh_of(num_shards), **options)


def make_batch(lengths=LENGTHS, seed=0, context=False, groups=()):
    """Rows of the same width for all lengths; padding holds garbage.

    With `context` about half of the response tokens are not the policy's. `groups` are slices of
    sequences that have the prompt of the first.
    """
    batch = batch_of([*lengths, LIMITS])
    batch = jax.tree.map(lambda leaf: leaf[:-1], batch)
    random = np.random.default_rng(seed)
    if context:
        mask = batch.response_mask & (random.random(batch.response_mask.shape) < 0.5)
        mask[np.arange(len(mask)), random.integers(batch.response_mask.sum(axis=1))] = True
        batch = batch._replace(response_mask=mask)
    token_ids = random.integers(0, VOCAB, batch.token_ids.shape, np.int32)
    for group in groups:
        token_ids[group, : LIMITS[0]] = token_ids[group, : LIMITS[0]][0]
    return batch._replace(token_ids=token_ids)


def make_values(batch, seed=1):
    """Old and reference log-probabilities near a random policy's, advantages; NaN padding."""
    random = np.random.default_rng(seed)
    shape = batch.response_mask.shape
    old, ref = random.normal(-np.log(VOCAB), 0.3, (2, *shape)).astype(np.float32)
    advantages = random.normal(size=shape).astype(np.float32)
    return [np.where(batch.response_mask, x, np.nan) for x in (old, ref, advantages)]


def make_case():
    """A policy, parameters, a batch and its values."""
    batch = make_batch()
    return *setup(), batch, make_values(batch)


def update(*arguments, **options):
    """New parameters, optimiser state and scalars."""
    return update_and_logprobs(*arguments, **options)[:3]


def update_and_logprobs(
    policy, params, batch, values, plan, aggregation="token_mean", optimizer=DESCENT,
    reference=None, importance=(), **options,
):  # fmt: skip
    """And the log-probabilities before the step."""
    params = jax.tree.map(jnp.copy, params)  # donated
    algorithm = Algorithm(grpo, dataclasses.replace(OPTIONS, aggregation=aggregation, **options))
    return update_policy(
        params, optimizer.init(params), batch, *values, reference, policy=policy,
        optimizer=optimizer, temperature=0.8, plan=plan, importance=importance, algorithm=algorithm,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="policy")
@functools.partial(jax.value_and_grad, has_aux=True)
def of_sequence(params, ids, old, ref, advantages, weights, *, policy):
    """The loss of one sequence, and log-probabilities, entropies and states of its response.

    Tokens of the context have the weight 0, so that programs depend on lengths alone.
    """
    num_tokens = weights.shape[1]
    states = policy.final_states(params, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    states = states[:, -num_tokens - 1 : -1]
    tokens = policy.token_logprobs(params, states, ids[:, -num_tokens:], temperature=0.8)
    loss, _ = grpo.loss(
        *tokens, old_logprobs=old, ref_logprobs=ref, advantages=advantages, weights=weights,
        options=OPTIONS,
    )  # fmt: skip
    return loss, (*tokens, states)


def oracle(policy, params, batch, values):
    """Log-probabilities, entropies and states of every response; loss and gradient by aggregation.

    Computed from whole sequences without padding, and summed over them.
    """
    mask = batch.response_mask
    prompts = batch.token_ids.shape[1] - mask.shape[1]
    found, tokens = {}, []
    for aggregation in ("token_mean", "response_mean"):
        weights = np.asarray(token_weights(jnp.asarray(mask), aggregation=aggregation))
        found[aggregation], tokens = (0.0, jax.tree.map(np.zeros_like, params)), []
        for row, own in enumerate(mask):
            ids = batch.token_ids[row][batch.segment_ids[row] == 1]
            response = slice(int(batch.segment_ids[row, prompts:].sum()))
            chosen = own[response]
            (loss, of_tokens), gradient = jax.device_get(
                of_sequence(
                    params, ids[None], *[np.where(own, v, 0)[row, response][None] for v in values],
                    weights[row, response][None], policy=policy,
                )
            )  # fmt: skip
            found[aggregation] = jax.tree.map(np.add, found[aggregation], (loss, gradient))
            tokens.append([array[:, chosen] for array in of_tokens])
    return tokens, found


def whole_kl(params, reference, batch, policy, other):
    """The mean of KL(policy || other) over the response tokens, from whole logits."""

    def log_softmax(model, params):
        inputs = map(jnp.asarray, (batch.token_ids, batch.positions, batch.segment_ids))
        states = model.final_states(params, *inputs)[:, LIMITS[0] - 1 : -1]
        logits = model.logits(params, states.reshape(-1, states.shape[2]))
        logits = logits[:, : policy.config.vocab_size]
        return jax.nn.log_softmax(logits / 0.8)

    log_p, log_q = log_softmax(policy, params), log_softmax(other, reference)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1)
    mask = batch.response_mask.reshape(-1)
    return jnp.sum(jnp.where(mask, kl, 0.0)) / mask.sum()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["packed", "rows"])
def test_the_exact_kl_from_a_model_of_another_size(plan):
    """Its value and gradient, on a mesh too: of another width and a larger vocabulary."""
    # Two key heads and an even vocabulary, for a tensor axis: its parts of the two vocabularies
    # begin with other tokens.
    even = {"num_kv_heads": 2, "vocab_size": VOCAB + 1}
    policy = models.Policy(dataclasses.replace(make_policy(4).config, **even))
    params = policy.init(jax.random.key(0))
    larger = make_policy(num_layers=1, hidden_size=48).config
    larger = dataclasses.replace(larger, **even | {"vocab_size": VOCAB + 9}, tie_embeddings=True)
    other, batch = models.Policy(larger), make_batch(context=True)
    reference = other.init(jax.random.key(5))
    algorithm = Algorithm(
        grpo, grpo.Options(kl_estimator="exact", kl_coefficient=1.0, entropy_coefficient=0.0)
    )
    assert algorithm.needs.exact_kl
    advantages = np.zeros(batch.response_mask.shape, np.float32)
    compute = jax.value_and_grad(lambda own: whole_kl(own, reference, batch, policy, other))
    wanted = jax.jit(compute)(params)
    row_plan, settings = plan_of(PLANS["packed"]), {}
    if plan == "rows":
        mesh = models.make_mesh({"fsdp": 1, "tensor": 2, "sequence": 2}, jax.devices()[:4])
        policy, other = (dataclasses.replace(each, mesh=mesh) for each in (policy, other))
        row_plan = RowPlan(mesh, micro_batch_size=4)
    loss = PolicyLoss(policy, 0.8, algorithm, reference=other)
    trainee = Trainee("policy", DESCENT, loss, Frozen(None, reference), **settings)
    own = jax.tree.map(jnp.copy, params)
    trained, scalars, _ = trainee.update(
        Trained(own, DESCENT.init(own)), MiniBatch(batch, advantages=advantages), row_plan
    )
    np.testing.assert_allclose(scalars["policy/kl"], wanted[0], rtol=1e-5)
    gradient = jax.tree.map(lambda before, after: before - after, params, trained.params)
    assert_near(jax.device_get(gradient), jax.device_get(wanted[1]))


def assert_near(actual, expected, tolerance=2e-5):
    """float32 sums of the same terms in another order: to a share of the largest entry."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance * np.abs(b).max())


GROUPED = ((4, 2), (4, 10), (4, 5), (2, 9), (2, 3), (1, 6))  # prompts: three times, twice, once


@functools.cache
def expected(window, context):
    """Everything the oracle says of `make_batch`; `window` limits the first of two layers."""
    policy, params = setup(window)
    if context == "shared prompts":
        batch = make_batch(GROUPED, context=True, groups=(slice(0, 3), slice(3, 5)))
    else:
        batch = make_batch(context=context)
    values = make_values(batch)
    return policy, params, batch, values, *oracle(policy, params, batch, values)


MARKS = dict.fromkeys([(None, "packed"), (None, "one row")], pytest.mark.slow)
LAYOUTS = [
    pytest.param(window, name, False, marks=MARKS.get((window, name), pytest.mark.soak))
    for window in (None, 4)
    for name in PLANS
]
LAYOUTS += slow_after(0, [(4, name, True) for name in ("three rows", "packed")])
IN_BUNDLES = ("packed", "three rows", "one row", "budget")
LAYOUTS += slow_after(0, [(4, name, "shared prompts") for name in IN_BUNDLES])


@pytest.fixture(autouse=True)
def _shares_prompts(request, monkeypatch):
    """Prompts are shared wherever it saves a column, as if attention cost nothing."""
    if "shared prompts" in request.node.name or "shared_prompts_on" in request.node.name:
        monkeypatch.setattr(models.Policy, "attention_columns", 1e9)


@pytest.mark.parametrize(("window", "name", "context"), LAYOUTS)
def test_no_layout_changes_the_log_probabilities(window, name, context):
    policy, params, batch, _, tokens, _ = expected(window, context)
    found = batch_logprobs(
        params, batch, policy=policy, temperature=0.8, plan=plan_of(PLANS[name]),
        with_states=True, with_entropies=True,
    )  # fmt: skip
    for row, (logprobs, entropies, states) in enumerate(tokens):
        own = batch.response_mask[row]
        np.testing.assert_allclose(found.logprobs[row, own], logprobs[0], atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(found.entropies[row, own], entropies[0], atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(found.states[row], states[0], atol=2e-5, rtol=1e-4)
    assert not found.logprobs[~batch.response_mask].any()


@pytest.mark.parametrize(("window", "name", "context"), LAYOUTS)
def test_no_layout_changes_the_gradient(window, name, context):
    policy, params, batch, values, _, gradients = expected(window, context)
    for aggregation, (loss, gradient) in gradients.items():
        after, _, scalars = update(policy, params, batch, values, plan_of(PLANS[name]), aggregation)
        np.testing.assert_allclose(scalars["policy/loss"], loss, rtol=1e-4, atol=1e-6)
        assert scalars["policy/update_skipped"] == 0
        # Differences of parameters near 1 hold about 1e-7.
        assert_near(jax.tree.map(jnp.subtract, params, after), gradient, 1e-4)
        norm = optax.tree.norm(gradient)
        np.testing.assert_allclose(scalars["policy/grad_norm"], norm, rtol=1e-4)


SHARED = make_batch(GROUPED, groups=(slice(0, 3), slice(3, 5)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "sequence": 2},
        pytest.param({"replica": 2, "sequence": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_shared_prompts_on_a_mesh_change_nothing_but_rounding(axes):
    policy, params = setup()
    values = make_values(SHARED)
    expected, _, _ = update(policy, params, SHARED, values, plan_of(PLANS["one row"]))
    shape = dict.fromkeys(models.AXES, 1) | axes
    mesh = models.make_mesh(shape, jax.devices()[:4])
    plan = RowPlan(mesh, micro_batch_tokens=24, pack_sequences=True)
    assert lay_out(SHARED, plan, 1e9).rows.segment_ids.max() > BRANCHES
    on_mesh = dataclasses.replace(policy, mesh=mesh)
    placed = jax.device_put(params, models.parameter_shardings(params, mesh))
    actual, _, _ = update(on_mesh, placed, SHARED, values, plan)
    assert_near(actual, expected, 1e-4)


def test_no_prompt_is_shared_if_the_reference_has_a_fused_kernel(monkeypatch):
    """The reference of an update reads the policy's rows."""
    of = {32: 1e9, 48: 0.0}  # 0: a fused kernel
    by_size = property(lambda self: of[self.config.hidden_size])
    monkeypatch.setattr(models.Policy, "attention_columns", by_size)
    fused, plan = make_policy(hidden_size=48), plan_of(PLANS["packed"])
    batch = MiniBatch(SHARED, advantages=np.zeros(SHARED.response_mask.shape, np.float32))
    shares = []
    for reference in (None, make_policy(num_layers=1), fused):
        loss = PolicyLoss(make_policy(), 1.0, Algorithm(grpo, OPTIONS), reference=reference)
        rows, _ = loss.inputs(batch, plan).arrays
        shares.append(rows.segment_ids.max() > BRANCHES)
    assert shares == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "surrogate",
    ["gspo", *(pytest.param(name, marks=pytest.mark.soak) for name in ("opmd", "real"))],
)
def test_no_layout_changes_a_loss_of_whole_responses(surrogate, monkeypatch):
    """Rows, packed rows and shared prompts give the same step, and it is not that of tokens."""
    policy, params = setup()
    values, options = make_values(SHARED), {"surrogate": surrogate, "clip_epsilon": 1e-3}
    steps = []
    for name, columns in (("three rows", 0.0), ("packed", 0.0), ("three rows", 1e9)):
        monkeypatch.setattr(models.Policy, "attention_columns", columns)
        plan = plan_of(PLANS[name])
        is_shared = lay_out(SHARED, plan, columns).rows.segment_ids.max() > BRANCHES
        assert is_shared == (columns > 0)
        steps.append(update(policy, params, SHARED, values, plan, "response_mean", **options))
    (expected, _, scalars), *others = steps
    for found, _, same in others:
        assert_near(found, expected)
        for name in ("policy/loss", "policy/grad_norm", "policy/clip_fraction"):
            np.testing.assert_allclose(same[name], scalars[name], rtol=1e-4, atol=1e-6)
    of_tokens, _, _ = update(policy, params, SHARED, values, plan, "response_mean")
    differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), expected, of_tokens)
    assert max(jax.tree.leaves(differences)) > 1e-4


@pytest.mark.slow
def test_masked_responses_of_a_bundle_do_not_count():
    """Seven of eight responses are masked: the row has fewer slots than sequences."""
    policy, params = setup()
    batch = make_batch(((4, 10),) * 7 + ((4, 2),), groups=(slice(0, 8),))
    mask = batch.response_mask & (np.arange(8) == 7)[:, None]
    batch = batch._replace(response_mask=mask)
    values = make_values(batch)
    options = {"surrogate": "gspo", "aggregation": "response_mean"}
    alone, _, _ = update(policy, params, batch, values, plan_of(PLANS["two rows"]), **options)
    rows = lay_out(batch, plan_of(PLANS["all rows at once"]), 1e9).rows
    assert rows.segment_ids.max() > BRANCHES and rows.sequence_ids.max() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.Policy, "attention_columns", 1e9)
        plan = plan_of(PLANS["all rows at once"])
        shared, _, _ = update(policy, params, batch, values, plan, **options)
        nothing = batch._replace(response_mask=np.zeros_like(mask))
        found = batch_logprobs(params, nothing, policy=policy, temperature=0.8, plan=plan)
    assert_near(shared, alone)
    assert not found.logprobs.any()


def mixture_of(num_layers):
    return models.random_config(
        "qwen3_moe", vocab_size=VOCAB + 1, hidden_size=32, intermediate_size=32,
        num_layers=num_layers, num_heads=2, num_kv_heads=1, head_dim=16,
    )  # fmt: skip


def test_a_pass_leaves_few_states_on_the_devices(monkeypatch):
    """States for 512 responses of 32,768 tokens and width 3584 would have 120 GB."""
    policy, params, batch, _ = make_case()
    options = {"policy": policy, "temperature": 0.8, "plan": plan_of(PLANS["two rows"])}
    options |= {"with_states": True, "with_entropies": True}
    sizes, program = [], policy_update.row_logprobs

    def seen(*arguments, **settings):
        found = program(*arguments, **settings)
        sizes.append(len(found.states))
        return found

    monkeypatch.setattr(policy_update, "row_logprobs", seen)
    monkeypatch.setattr(programs, "num_side_by_side", lambda mesh: 1)
    whole = batch_logprobs(params, batch, **options)
    (num_micro,) = sizes
    sizes.clear()
    layout = lay_out(batch, options["plan"], policy.attention_columns)
    of_micro = 4 * layout.rows.sources[0].size * whole.states[0].shape[1]
    monkeypatch.setattr(policy_update, "MAX_STATE_BYTES", 2 * of_micro)
    found = batch_logprobs(params, batch, **options)
    assert num_micro == 5 and sizes == [2, 2, 2]
    assert_near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-6)
    jax.tree.map(assert_near, whole, found)


# 3 and 2 micro-batches for 2 cores.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["two rows", "packed"])
def test_programs_side_by_side_change_nothing_but_rounding(name, monkeypatch):
    policy, params, batch, values = make_case()
    plan = plan_of(PLANS[name])

    def found():
        results = update_and_logprobs(policy, params, batch, values, plan)
        passed = batch_logprobs(
            params, batch, policy=policy, temperature=0.8, plan=plan, with_states=True,
            with_entropies=True,
        )  # fmt: skip
        return jax.device_get((results, passed))

    monkeypatch.setattr(programs, "num_side_by_side", lambda mesh: 1)
    alone = found()
    monkeypatch.setattr(programs, "num_side_by_side", lambda mesh: 2)
    first, second = found(), found()
    # Sums in another order: a few float32 roundings of values up to 3.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-6), alone, first)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_large_model_and_a_single_micro_batch_have_one_program(monkeypatch):
    params = {"kernel": np.zeros(2**16, np.float32)}  # 256 KiB
    layout = lay_out(make_batch(), plan := plan_of(PLANS["one row"]))
    monkeypatch.setattr(programs, "num_side_by_side", lambda mesh: 4)

    def parts_of(num_micro, most_bytes):
        monkeypatch.setattr(programs, "MAX_PART_BYTES", most_bytes)
        return programs.parts_of(num_micro, params, plan.mesh)

    assert [part.first for part in parts_of(layout.num_micro, 2**28)] == [0, 1, 2, 3]
    assert [part.stride for part in parts_of(layout.num_micro, 3 * 2**18)] == [3, 3, 3]
    assert parts_of(layout.num_micro, 2 * 2**18 - 1) == [None]
    whole = lay_out(make_batch(), plan_of(PLANS["all rows at once"]))
    assert parts_of(whole.num_micro, 2**28) == [None]


def test_a_nonfinite_update_is_skipped():
    policy, params, batch, values = make_case()
    values[2][0, 0] = np.inf
    plan = plan_of(PLANS["two rows"])
    after, opt_state, scalars = update(policy, params, batch, values, plan, optimizer=OPTIMIZER)
    assert scalars["policy/update_skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after, params)
    jax.tree.map(np.testing.assert_array_equal, opt_state, OPTIMIZER.init(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_counts", "num_programs"), [("two rows", 1, 1), ("packed", 4, 3)]
)
def test_batches_of_other_lengths_compile_little(name, num_counts, num_programs):
    """Rows have few lengths, and 12, 13, 14 or 16 packed ones lie in 12, 14 or 16 places."""
    policy, params = setup()
    plan = plan_of(PLANS[name] | ({"micro_batch_tokens": 17} if name == "packed" else {}))
    row_logprobs.clear_cache()
    counts = set()
    for seed in range(8):
        random = np.random.default_rng(seed)
        lengths = [(int(random.integers(1, 5)), int(random.integers(1, 11))) for _ in range(23)]
        batch = make_batch([*lengths, LIMITS], seed)
        counts.add(lay_out(batch, plan).num_micro)
        batch_logprobs(params, batch, policy=policy, temperature=0.8, plan=plan)
    assert len(counts) == num_counts and row_logprobs._cache_size() == num_programs


def test_the_update_computes_its_own_old_and_reference_log_probabilities():
    """Given or not, the old ones give the same step to the bit."""
    policy, params, batch, (*_, advantages) = make_case()
    plan, other = plan_of(PLANS["two rows"]), policy.init(jax.random.key(5))
    step = functools.partial(
        update_and_logprobs, policy, params, batch, plan=plan, kl_coefficient=0.1
    )
    own = step((None, None, advantages), reference=other)
    passes = [
        batch_logprobs(of, batch, policy=policy, temperature=0.8, plan=plan).logprobs
        for of in (params, other)
    ]
    logprobs = np.asarray(own[3])
    # Two programs for the same sums of float32; log-probabilities are about 3 nats.
    np.testing.assert_allclose(logprobs, passes[0], atol=3e-6)
    assert np.all(logprobs[~batch.response_mask] == 0)
    given = step((logprobs, None, advantages), reference=other)
    jax.tree.map(np.testing.assert_array_equal, own[0], given[0])
    assert own[2]["policy/approx_kl"] == 0 and own[2]["policy/clip_fraction"] == 0
    before = step((*passes, advantages))
    assert before[2]["policy/kl"] > 0.01
    np.testing.assert_allclose(own[2]["policy/kl"], before[2]["policy/kl"], rtol=1e-4)
    # One step of gradient descent: its gradient is a sum of about 1e-2.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, own[0], before[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "importance",
    slow_after(
        1,
        [
            {"level": "token", "outside": "truncate", "floor": 0.0, "cap": 1.05},
            {"level": "token", "outside": "mask", "floor": 0.9, "cap": 1.1},
            {"level": "total_variation", "outside": "mask", "floor": 0.0, "cap": 0.005},
        ],
    ),
)
def test_the_update_corrects_for_the_engine_as_weighted_advantages_do(importance):
    policy, params, batch, (*_, advantages) = make_case()
    plan = plan_of(PLANS["two rows"])
    update = functools.partial(update_and_logprobs, policy, params, plan=plan, kl_coefficient=0.0)
    plain = update(batch, (None, None, advantages))
    logprobs = np.asarray(plain[3])
    noise = 0.1 * np.random.default_rng(0).normal(size=logprobs.shape).astype(np.float32)
    batch = batch._replace(rollout_logprobs=np.where(batch.response_mask, logprobs + noise, 0))
    weights, outside = importance_weights(
        *map(jnp.asarray, (logprobs, batch.rollout_logprobs, batch.response_mask)), **importance
    )
    assert 0.1 < outside < 0.9
    own = update(batch, (None, None, advantages), importance=tuple(importance.items()))
    given = update(batch, (None, None, np.asarray(advantages * weights)))
    # The same arithmetic, in one program or two: the exponential may be rounded differently.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    jax.tree.map(close, own[0], given[0])
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), own[0], plain[0])
    assert max(jax.tree.leaves(changes)) > 1e-4


def compiled_update(policy, response_tokens=10):
    """The update of a mini-batch, compiled for shapes alone; bytes of parameters and state."""
    plan = plan_of(PLANS["all rows at once"])
    batch = batch_of([(4, response_tokens)] * 8)
    layout = lay_out(batch, plan)
    values = SlotValues(*[np.asarray(take_values(batch.rollout_logprobs, layout.tokens()))] * 5)
    params = policy.shapes()
    opt_state = jax.eval_shape(OPTIMIZER.init, params)
    compiled = update_rows.lower(
        params, opt_state, plan.put((layout.rows, values)), np.int32(layout.num_micro),
        loss=PolicyLoss(policy, 1.0, Algorithm(grpo, OPTIONS)), optimizer=OPTIMIZER,
        prefix="policy",
    ).compile()  # fmt: skip
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, opt_state)))
    return compiled.memory_analysis(), donated


@pytest.mark.slow
def test_parameters_and_optimiser_state_are_updated_in_place():
    memory, donated = compiled_update(make_policy(hidden_size=128, num_layers=1))
    # Buffers are padded to 64 bytes; a single kernel is 8 KiB and more.
    assert memory.alias_size_in_bytes == pytest.approx(donated, rel=0.01)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096


@pytest.mark.slow
def test_remat_trades_memory_as_its_names_say():
    """Bytes that a micro-batch needs in addition to the parameters, with 8 layers."""
    temporary = {}
    for remat in models.REMAT_POLICIES:
        memory, _ = compiled_update(make_policy(remat=remat, num_layers=8), response_tokens=60)
        temporary[remat] = memory.temp_size_in_bytes
    assert temporary["full"] < 0.7 * temporary["dots"]
    assert temporary["dots"] < 0.7 * temporary["none"]


def test_rows_split_without_moving_between_shards():
    split = split_rows(jnp.arange(12), 4)
    np.testing.assert_array_equal(split[0], [0, 3, 6, 9])
    assert sorted(itertools.chain(*split.tolist())) == list(range(12))
