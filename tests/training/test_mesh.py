"""Three steps of training on every mesh against one device, and what the compiled passes hold.

A step is what the loop does with a recorded batch: `batch_logprobs` of the policy, with states and
entropies, and of a fixed reference, then an update of the policy.
"""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.planning import hlo
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.optimizer import make_optimizer
from semrl_jax.training.packing import RowPlan, lay_out, take_values
from semrl_jax.training.policy_update import PolicyLoss, SlotValues, batch_logprobs, row_logprobs
from semrl_jax.training.train_state import abstract_state, init_state
from semrl_jax.training.trainee import update_rows
from tests.training.test_packing import batch_of
from tests.training.updates import update_policy

VOCAB, WIDTH, LAYERS = 56, 32, 2
OPTIMIZER = make_optimizer(
    learning_rate=1e-2, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.99,
    weight_decay=0.01, max_grad_norm=1.0,
)  # fmt: skip
ALGORITHM = Algorithm(grpo, grpo.Options(entropy_coefficient=0.01, kl_coefficient=0.1))
TEMPERATURE = 0.9
SCALARS = (
    "policy/loss", "policy/pg_loss", "policy/kl", "policy/entropy", "policy/clip_fraction",
    "policy/approx_kl", "policy/grad_norm", "policy/update_skipped",
)  # fmt: skip

# (prompt, response) tokens of 11 responses. No number of data shards above 1 divides them, nor do 4
# or 8 devices divide their 66 columns, nor 8 their 60 slots: some devices hold padding.
LENGTHS = (
    (6, 60), (1, 1), (3, 27), (2, 45), (6, 21), (5, 54), (1, 36), (4, 12), (2, 15), (6, 48), (3, 2),
)  # fmt: skip
PLANS = {
    "whole": {"micro_batch_size": 11},  # one micro-batch without an empty row, on one device
    "rows": {"micro_batch_size": 8},
    "budget": {"micro_batch_tokens": 140},
    "packed": {"micro_batch_tokens": 140, "pack_sequences": True},
}


AXES = models.AXES[:4]  # of dense models; test_experts.py has the axis of experts


class Case(NamedTuple):
    """A mesh (replica, fsdp, sequence, tensor) and all that a pass over it is compiled for."""

    sizes: tuple[int, int, int, int] = (1, 1, 1, 1)
    plan: str = "rows"
    remat: str = "none"
    dtype: str = "float32"
    kv_heads: int = 4

    def mesh(self):
        devices = jax.devices()[: math.prod(self.sizes)]
        return models.make_mesh(dict(zip(AXES, self.sizes)), devices)

    def policy(self):
        config = models.DecoderConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_layers=LAYERS,
            num_heads=8, num_kv_heads=self.kv_heads, head_dim=8,
        )  # fmt: skip
        return models.Policy(config, self.dtype, self.remat, self.mesh())


@functools.cache
def recorded():
    """A batch with garbage where it is padded, advantages, and how far old log-probabilities are.

    The update leaves the trust region here and there.
    """
    random = np.random.default_rng(0)
    batch = batch_of(LENGTHS)
    shape = batch.response_mask.shape
    batch = batch._replace(token_ids=random.integers(0, VOCAB, batch.token_ids.shape, np.int32))
    shift = random.normal(0, 0.2, shape).astype(np.float32)
    return batch, random.normal(size=shape).astype(np.float32), shift


class Step(NamedTuple):
    """Everything that one step gives, on the host; float32."""

    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    entropies: np.ndarray
    states: list[np.ndarray]
    scalars: dict
    optimizer: tuple
    params: dict


@functools.cache
def three_steps(case):
    policy, mesh = case.policy(), case.mesh()
    batch, advantages, shift = recorded()
    plan = RowPlan(mesh, **PLANS[case.plan])
    params, other = (policy.init(jax.random.key(seed)) for seed in (0, 1))
    # Near the policy: the KL estimator stops at 10, where rounding would decide on a gradient.
    reference = jax.tree.map(lambda own, other: 0.9 * own + 0.1 * other, params, other)
    reference = jax.device_put(reference, models.parameter_shardings(reference, mesh))
    state = init_state(params, OPTIMIZER, init_shaping_state(), mesh)
    params, opt_state = state.params, state.optimizer
    settings = {"policy": policy, "temperature": TEMPERATURE, "plan": plan}

    def tokens(params):  # the reference's states are not read: its pass is the same program
        return batch_logprobs(params, batch, with_states=True, with_entropies=True, **settings)

    found = []
    for _ in range(3):
        old, ref = tokens(params), tokens(reference)
        params, opt_state, scalars, _ = update_policy(
            params, opt_state, batch, old.logprobs + shift, ref.logprobs, advantages,
            optimizer=OPTIMIZER, algorithm=ALGORITHM, **settings,
        )  # fmt: skip
        states = [np.asarray(old.states[row], np.float32) for row in range(len(LENGTHS))]
        passes = (old.logprobs, ref.logprobs, old.entropies, states)
        scalars = {name: scalars[name] for name in SCALARS}
        found.append(Step(*passes, *jax.device_get((scalars, opt_state, params))))
    return found


soak = functools.partial(pytest.param, marks=pytest.mark.soak)


def alone(axis, size):
    return tuple(size if other == axis else 1 for other in AXES)


def assert_near(actual, expected, atol, what=""):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 2, 2, 2)),
        *(soak(Case(alone(axis, 4))) for axis in AXES),
        Case((2, 1, 2, 2), "packed"),
        Case((2, 2, 2, 1), remat="full"),
        soak(Case((2, 2, 1, 2), "budget")),
        *(soak(Case(alone(axis, size))) for axis in AXES for size in (2, 8)),
        soak(Case(alone("tensor", 8), kv_heads=8)),  # none is shared
        *(
            soak(Case(sizes, plan, remat))
            for sizes, plan, remat in (
                ((2, 2, 1, 2), "rows", "none"),
                ((2, 1, 2, 2), "rows", "full"),
                ((2, 2, 2, 1), "packed", "dots"),
                ((1, 2, 4, 1), "packed", "full"),
                ((1, 1, 4, 2), "budget", "none"),
                ((1, 1, 2, 4), "packed", "none"),
                ((1, 2, 1, 4), "budget", "full"),
                ((4, 2, 1, 1), "packed", "none"),
            )
        ),
    ],
    ids=str,
)
def test_three_steps_are_those_of_one_device(case):
    expected = three_steps(Case(plan="whole", kv_heads=case.kv_heads))
    for index, (step, want) in enumerate(zip(three_steps(case), expected, strict=True)):
        # Float32 sums in another order: the largest differences seen are 4.4e-6 of numbers up to
        # 10, 2.5e-6 of the largest moment. After an update they are 6.6e-5 and 1.7e-5, by a
        # few entries whose first gradient is so small that Adam divides rounding by rounding: these
        # are off by up to 4.1e-5, of steps of 1e-2.
        for name in Step._fields[:5]:
            values, wanted = getattr(step, name), getattr(want, name)
            assert_near(values, wanted, 2e-4 if index else 2e-5, f"{name} of step {index}")
        for moment, wanted in zip(*map(jax.tree.leaves, (step.optimizer, want.optimizer))):
            assert_near(moment, wanted, (5e-5 if index else 1e-5) * np.abs(wanted).max())
        assert_near(step.params, want.params, 2e-4)
    # The first moments after the first step are a tenth of its gradient, of which 1e-4 is no
    # rounding.
    steady = jax.tree.map(lambda moment: np.abs(moment) > 1e-5, expected[0].optimizer[1][0].mu)
    params, wanted = (
        jax.tree.map(np.extract, steady, steps[0].params) for steps in (three_steps(case), expected)
    )
    assert_near(params, wanted, 1e-6)
    want = expected[2]
    assert want.scalars["policy/update_skipped"] == 0 < want.scalars["policy/clip_fraction"]
    moved = expected[0].params["embed"]["embedding"] - want.params["embed"]["embedding"]
    assert np.abs(moved).max() > 1e-3


@pytest.mark.slow
def test_bfloat16_on_a_mesh_is_as_near_float32_as_on_one_device():
    """Rounding to 8 bits depends on the order of sums: of two results only sizes of errors agree.

    Each axis alone at 4 has 0.79 to 1.02 times the error of one device, as this mesh has.
    """

    def errors(steps):
        """Root mean square distance from float32, by name and step."""
        found = {}
        for index, (step, want) in enumerate(zip(steps, exact, strict=True)):
            for name in ("logprobs", "ref_logprobs", "entropies", "states", "optimizer"):
                pair = zip(*map(jax.tree.leaves, (getattr(step, name), getattr(want, name))))
                squares = [np.square(np.asarray(a) - np.asarray(b)).ravel() for a, b in pair]
                found[name, index] = np.sqrt(np.concatenate(squares).mean())
        return found

    exact = three_steps(Case(plan="whole"))
    on_mesh = three_steps(Case((1, 2, 2, 2), dtype="bfloat16"))
    on_one = errors(three_steps(Case(plan="whole", dtype="bfloat16")))
    for name, error in errors(on_mesh).items():
        assert 0 < error < 1.25 * on_one[name], name
    for step, want in zip(on_mesh, exact, strict=True):
        for name, value in want.scalars.items():  # means over 321 tokens
            np.testing.assert_allclose(step.scalars[name], value, rtol=0.03, atol=0.01)


def plan_of(case):
    return RowPlan(case.mesh(), **PLANS[case.plan])


@functools.cache
def compiled(case, program):
    """`update_rows` or `row_logprobs` of a case, for shapes alone."""
    plan, batch = plan_of(case), recorded()[0]
    layout = lay_out(batch, plan)
    state = abstract_state(case.policy().shapes(), OPTIMIZER, init_shaping_state(), plan.mesh)
    rows, num_micro = plan.put(layout.rows), np.int32(layout.num_micro)
    if program == "row_logprobs":
        settings = {"policy": case.policy(), "temperature": TEMPERATURE}
        settings |= {"with_states": True, "with_entropies": True}
        return row_logprobs.lower(state.params, rows, num_micro, **settings).compile()
    values = plan.put(
        SlotValues(*[np.asarray(take_values(batch.rollout_logprobs, layout.tokens()))] * 5)
    )
    loss = PolicyLoss(case.policy(), TEMPERATURE, ALGORITHM)
    return update_rows.lower(
        state.params, state.optimizer, (rows, values), num_micro, loss=loss, optimizer=OPTIMIZER,
        prefix="policy",
    ).compile()  # fmt: skip


def moved(case, program):
    """The float32 arrays of [kind of collective, ...] of one micro-batch: (collective, shape)."""
    program = hlo.read(compiled(case, program).as_text(), passes=1)
    return [
        (found, shape)
        for found in program.collectives
        for dtype, shape in found.arrays
        if dtype == "f32"
    ]


def sizes_of(case):
    """Rows of a device, and its columns and slots with their padding, of a micro-batch."""
    replica, fsdp, sequence, _ = case.sizes
    rows = lay_out(recorded()[0], plan_of(case)).rows
    (_, num_rows, columns), slots = rows.token_ids.shape, rows.sources.shape[2]
    return num_rows // (replica * fsdp), -(-columns // sequence), -(-slots // sequence)


def layer_kernels(case):
    """Shapes of the matrices of one layer."""
    layers = case.policy().shapes()["layers"]
    return [leaf.shape[1:] for leaf in jax.tree.leaves(layers) if leaf.ndim == 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 2, 2, 2)),
        *(Case(alone(axis, 4)) for axis in AXES[1:]),
        Case((2, 2, 2, 1), remat="full"),
        soak(Case(alone("fsdp", 8))),
        soak(Case((2, 1, 2, 2), "packed")),
    ],
    ids=str,
)
def test_what_is_split_stays_split(case):
    _, fsdp, sequence, tensor = case.sizes
    rows, columns, slots = sizes_of(case)
    head = WIDTH * VOCAB // tensor
    kernels = [head, *(math.prod(shape) // tensor for shape in layer_kernels(case))]
    states = (rows, slots * sequence, WIDTH)
    passes = {"layers": 0, "head": 0, "states": 0, "gradients of states": 0}
    scattered = {"layers": 0, "head": 0}
    found_arrays = moved(case, "update_rows")
    for found, shape in found_arrays:
        place = f"{found.kind} of {shape} from {found.op_name}"
        size = math.prod(shape)
        if found.kind == "all-gather" and shape != states:  # one matrix of one layer
            assert size in kernels and found.group == fsdp, place
            passes["head" if size == head else "layers"] += found.times
        elif found.kind == "all-gather":
            assert found.group == sequence, place
            passes["gradients of states"] += found.times
        elif found.kind == "reduce-scatter" and shape == (rows, slots, WIDTH):
            assert found.group == sequence, place
            passes["states"] += found.times
        elif found.kind == "reduce-scatter":  # the gradient of a matrix
            assert size * fsdp in kernels and found.group == fsdp, place
            scattered["head" if size * fsdp == head else "layers"] += found.times
        else:
            # Sums over other axes are of a device's part of a gradient, or of states.
            assert size <= max(rows * columns * WIDTH, *(size // fsdp for size in kernels)), place
        # Only the output matrix, the embedding and their gradients have a vocabulary.
        if len(shape) > 1 and {VOCAB, VOCAB // tensor} & set(shape):
            assert {WIDTH, WIDTH // fsdp} & set(shape), place
    kinds = {found.kind for found, _ in found_arrays}
    assert ("collective-permute" in kinds) == (sequence > 1)
    # Each layer's matrices forward, and again backward; the states of responses over no axis but
    # `sequence`, once.
    assert passes == {
        "layers": 2 * 7 * LAYERS * (fsdp > 1),
        "head": int(fsdp > 1),
        "states": int(sequence > 1),
        "gradients of states": int(sequence > 1),
    }
    assert scattered == {"layers": 7 * LAYERS * (fsdp > 1), "head": int(fsdp > 1)}


@pytest.mark.slow
def test_the_forward_pass_moves_and_gives_states_once():
    """Apart from the ring's keys and values, only the states move between devices, once."""
    case = Case(alone("sequence", 4))
    (found,) = {f for f, _ in moved(case, "row_logprobs") if f.kind != "collective-permute"}
    rows, _, slots = sizes_of(case)
    assert (found.kind, found.times) == ("reduce-scatter", 1)
    assert found.num_bytes == rows * 4 * slots * WIDTH * 4
    whole, split = (
        compiled(c, "row_logprobs").memory_analysis() for c in (Case(plan="whole"), case)
    )
    assert split.output_size_in_bytes < 0.28 * whole.output_size_in_bytes  # 12 rows, for 11


@pytest.mark.slow
@pytest.mark.parametrize("program", ["update_rows", "row_logprobs"])
@pytest.mark.parametrize("axis", AXES)
def test_memory_of_a_device_shrinks_along_every_axis(axis, program):
    both = [
        compiled(case, program).memory_analysis()
        for case in (Case(plan="whole"), Case(alone(axis, 4)))
    ]
    whole, split = both
    if axis in ("fsdp", "tensor") and program == "update_rows":
        # Parameters and both moments, updated in place: a quarter, and the norms.
        assert split.alias_size_in_bytes < whole.alias_size_in_bytes * 0.27
    if axis in models.DATA_AXES and program == "update_rows":  # 16 rows over 4 devices, for 11
        rows = [memory.argument_size_in_bytes - memory.alias_size_in_bytes for memory in both]
        assert rows[1] < rows[0] * 0.37
    if axis != "tensor" and program == "row_logprobs":
        assert split.output_size_in_bytes < whole.output_size_in_bytes * 0.37
    assert split.temp_size_in_bytes < whole.temp_size_in_bytes * 0.6
