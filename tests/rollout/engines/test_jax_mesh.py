"""The JAX engine on several devices: the same responses as on one device, and how data is split."""

import asyncio
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs import quickstart
from semrl_jax import data, models
from semrl_jax.rollout.building import engine_mesh, jax_engine
from semrl_jax.rollout.engines import decoding
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.engines.sampling import block_size, split_sampling
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.runs import validate
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams, SamplingParams, WeightVersion
from tests.cases import refused
from tests.rollout.engines.responses import as_bytes, full_forward, make_requests

CONFIG = models.DecoderConfig(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, tie_embeddings=True,
)  # fmt: skip
POLICY = models.Policy(CONFIG)
EOS = 1
VERSION = WeightVersion("run", "attempt", 0, "digest")
STATES = HiddenStateParams((-1,), "float32")
SAMPLING = {
    "sampled": SamplingParams(40, temperature=0.8, eos_token_ids=(EOS,)),
    "greedy": SamplingParams(40, temperature=0.0, eos_token_ids=(EOS,)),
    "truncated": SamplingParams(40, top_k=9, top_p=0.9, eos_token_ids=(EOS,)),
    "penalised": SamplingParams(
        40, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=9, eos_token_ids=(EOS,)
    ),
}
# Copies of the weights, and devices that share a copy; 4 are more than there are kv heads.
MESHES = (1, 2), (1, 4), (2, 1), (2, 2)


def cases():
    """Every mesh with every way of sampling; both axes at once outside the soak suite."""
    for shape in MESHES:
        for kind in SAMPLING:
            marks = {
                ((2, 2), "sampled"): pytest.mark.slow,
                ((2, 2), "truncated"): pytest.mark.slow,
                ((1, 4), "truncated"): pytest.mark.slow,  # more devices than heads share the rows
            }
            yield pytest.param(shape, kind, marks=marks.get((shape, kind), pytest.mark.soak))


@pytest.fixture(scope="module")
def params():
    # Larger logits than a new model's make some tokens likely, so that lengths vary.
    return jax.tree.map(lambda leaf: leaf * 1.5, POLICY.init(jax.random.key(3)))


def mesh_of(copies, devices_of_copy):
    shape = {"replica": copies, "fsdp": 1, "sequence": 1, "tensor": devices_of_copy}
    return models.make_mesh(shape, jax.local_devices()[: copies * devices_of_copy])


def engine_with(params, mesh, **options):
    """An engine that holds `params`; 20 responses refill its slots and then halve their number."""
    engine = JaxEngine(POLICY, mesh=mesh, **({"max_batch": 16, "chunk": 7} | options))
    buffers = engine.begin_weight_update(models.tensor_specs(CONFIG, "float32"))
    for spec, array in models.iterate_hf_tensors(params, CONFIG, "float32"):
        buffers[spec.name][:] = array.reshape(-1).view(np.uint8)
    asyncio.run(engine.commit_weight_update(VERSION))
    return engine


def sample(engine, requests, sampling):
    async def collect():
        call = GenerateCall(tuple(requests), sampling, STATES, VERSION, entropies=True)
        return [rollout async for rollout in engine.generate(call)]

    return asyncio.run(collect())


def by_id(rollouts):
    return {rollout.sample_id: rollout for rollout in rollouts}


@pytest.fixture(scope="module")
def on_one_device(params):
    engine = engine_with(params, None)
    return functools.cache(lambda kind: sample(engine, make_requests(), SAMPLING[kind]))


@pytest.mark.parametrize(("shape", "kind"), cases())
def test_responses_are_those_of_one_device(params, on_one_device, shape, kind):
    sampling = SAMPLING[kind]
    rollouts = sample(engine_with(params, mesh_of(*shape)), make_requests(), sampling)
    actual, expected = by_id(rollouts), by_id(on_one_device(kind))
    assert actual.keys() == expected.keys()
    assert len({len(r.response_ids) for r in rollouts}) > (1 if kind == "greedy" else 5)
    # Tokens differ only if the two best logits differ by rounding, 1e-6: in at most one response.
    same = [
        name
        for name, rollout in actual.items()
        if np.array_equal(rollout.response_ids, expected[name].response_ids)
    ]
    assert len(same) >= 19
    for name in same:
        for field in ("rollout_logprobs", "rollout_raw_logprobs", "entropies", "hidden_states"):
            found, wanted = getattr(actual[name], field), getattr(expected[name], field)
            # float32 sums in another order; both are of size 1 to 10.
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=5e-5)
        assert actual[name].finish_reason == expected[name].finish_reason
    for rollout, states, raw in full_forward(POLICY, params, rollouts):
        np.testing.assert_allclose(rollout.rollout_raw_logprobs, raw, atol=5e-5)
        np.testing.assert_allclose(rollout.hidden_states[:, 0], states, rtol=1e-4, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 4), marks=pytest.mark.soak)])
def test_a_call_repeats_bit_for_bit_and_alone_gives_the_same_tokens(params, shape):
    sampling = SAMPLING["sampled"]
    engine = engine_with(params, mesh_of(*shape))
    first = sample(engine, make_requests(), sampling)
    sample(engine, make_requests(3, 2, seed=9), sampling)
    assert as_bytes(first) == as_bytes(sample(engine, make_requests(), sampling))
    other = engine_with(params, mesh_of(*shape))
    assert as_bytes(first) == as_bytes(sample(other, make_requests(), sampling))
    together = by_id(first)
    for request in make_requests()[::7]:
        (alone,) = sample(engine, [request], sampling)
        np.testing.assert_array_equal(alone.response_ids, together[request.sample_id].response_ids)
        np.testing.assert_allclose(
            alone.rollout_logprobs, together[request.sample_id].rollout_logprobs, atol=5e-5
        )


@pytest.mark.parametrize(
    ("shape", "kv_heads", "max_tokens"),
    [
        pytest.param((2, 2), 1, 40, marks=pytest.mark.slow),
        pytest.param((4, 2), 1, 150, marks=pytest.mark.soak),
        pytest.param((1, 4), 2, 150, marks=pytest.mark.soak),
    ],
)
def test_a_device_holds_its_share(params, shape, kv_heads, max_tokens):
    """Parameters are split over the devices of a copy, the cache over all, at every size."""
    copies, devices_of_copy = shape
    mesh = mesh_of(*shape)
    held = engine_with(params, mesh)._params
    for path, leaf in jax.tree_util.tree_leaves_with_path(held):
        share = 1 if "scale" in str(path[-1]) else devices_of_copy
        assert {s.data.size * share for s in leaf.addressable_shards} == {leaf.size}, path
        assert leaf.sharding.device_set == set(mesh.devices.flat)
    policy = dataclasses.replace(POLICY, mesh=mesh)
    sampling = dataclasses.replace(SAMPLING["sampled"], max_tokens=max_tokens)
    asked = GenerateCall(tuple(make_requests()), sampling, STATES, VERSION)
    call = decoding.DecodingCall(policy, held, asked, max_batch=16, chunk=3)
    seen = set()
    while not call.done:
        call.step()
        if call.done:  # then it has no slots any more
            break
        batch, columns = call._slots.cache.positions.shape
        seen.add((batch, columns))
        for cached in jax.tree.leaves(call._slots.cache[:2]):
            shape = (batch // copies, kv_heads, *cached.shape[2:])
            assert cached.size == batch * 2 * columns * 16
            assert {s.data.shape for s in cached.addressable_shards} == {shape}
        assert {s.data.shape[0] for s in call._slots.final_states.addressable_shards} == {
            batch // copies
        }
    batches, columns = (sorted({pair[axis] for pair in seen}) for axis in (0, 1))
    assert batches[-1] == 16 and len(batches) > 1  # the batch shrinks
    assert (len(columns) > 1) == (max_tokens > 64)


@pytest.mark.parametrize(
    ("num_groups", "rows", "group"),
    [
        pytest.param(1, 4, 4, marks=pytest.mark.slow),
        pytest.param(2, 8, 4, marks=pytest.mark.slow),
        pytest.param(3, 12, 4, marks=pytest.mark.slow),
    ],
)
def test_few_groups_are_divided_among_the_copies(params, num_groups, rows, group):
    """16 responses to each prompt on 4 copies: each decodes as many, and none has idle slots."""
    mesh = mesh_of(4, 1)
    held = engine_with(params, mesh)._params
    policy = dataclasses.replace(POLICY, mesh=mesh)
    requests = make_requests(num_groups, 16)
    asked = GenerateCall(tuple(requests), SAMPLING["sampled"], STATES, VERSION)
    call = decoding.DecodingCall(policy, held, asked, max_batch=64, chunk=7)
    assert call._arrangement == (rows, group)
    rollouts = []
    while not call.done:
        rollouts += call.step()
    assert sorted(r.sample_id for r in rollouts) == sorted(r.sample_id for r in requests)
    for rollout, states, _ in full_forward(POLICY, params, rollouts):
        np.testing.assert_allclose(rollout.hidden_states[:, 0], states, rtol=1e-4, atol=5e-5)


@pytest.mark.slow
def test_no_program_twice_in_a_bucket(params, monkeypatch):
    """Slots have the same layout, whichever program returned them."""
    monkeypatch.setattr(decoding, "MIN_BATCH", 8)  # one size, so the same programs
    held = engine_with(params, mesh_of(2, 2))._params
    policy = dataclasses.replace(POLICY, mesh=mesh_of(2, 2))

    def run(seed):
        requests = tuple(make_requests(2, 4, seed, shortest=9))
        sampling = SamplingParams(60, eos_token_ids=(EOS,))
        asked = GenerateCall(requests, sampling, STATES, VERSION)
        call = decoding.DecodingCall(policy, held, asked, max_batch=8, chunk=4)
        while not call.done:
            call.step()

    def num_programs():
        return decoding.decode_chunk._cache_size(), decoding.prefill_and_insert._cache_size()

    before = num_programs()
    run(0)
    assert num_programs() == (before[0] + 1, before[1] + 1)
    run(1)
    assert num_programs() == (before[0] + 1, before[1] + 1)


EMPTY = functools.partial(decoding.empty_slots, rows=8, group=2, num_prompt_columns=16, columns=64)


def collectives(compiled):
    """Kinds of collectives in a program, and the number of elements that each moves."""
    moved = re.findall(
        r"= (.*) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(",
        compiled.as_text(),
    )
    for shapes, kind in moved:
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            yield kind, int(np.prod([int(n) for n in dims.split(",") if n]))


def compiled_decode(params, mesh, sampling):
    policy = dataclasses.replace(POLICY, mesh=mesh)
    kind, values = split_sampling(sampling)
    return decoding.decode_chunk.lower(
        jax.device_put(params, models.parameter_shardings(params, mesh)),
        EMPTY(policy=policy), np.int32(0), np.int32(9), values,
        np.full(8, -1, np.int32), policy=policy, kind=kind, hidden_states=STATES,
        num_tokens=4,
    ).compile()  # fmt: skip


@pytest.mark.slow
def test_what_a_token_moves_between_devices(params):
    """The states of one token, and no logits; if rows are sorted, each row of logits once."""
    states, logits = 16 * 64, 16 * 32
    plain = list(collectives(compiled_decode(params, mesh_of(1, 2), SamplingParams(0))))
    assert {kind for kind, _ in plain} == {"all-reduce", "all-gather"}
    assert max(size for _, size in plain) == states
    assert logits not in {size for _, size in plain}
    num_blocks = 32 // block_size(32)  # their sums decide which block a token is from
    assert {size for kind, size in plain if kind == "all-gather"} == {16 * num_blocks}
    cut = list(collectives(compiled_decode(params, mesh_of(1, 2), SamplingParams(0, top_p=0.9))))
    assert sum(size for kind, size in cut if kind == "all-to-all") == logits // 2
    assert max(size for _, size in cut) == states
    # Tokens and their log-probabilities only: sorting must not change other layouts.
    assert {size for kind, size in cut if kind == "all-gather"} == {16}


@pytest.mark.slow
def test_slots_are_written_in_place_and_stay_where_they_are():
    mesh = mesh_of(2, 2)
    policy = dataclasses.replace(POLICY, mesh=mesh)
    params = jax.eval_shape(POLICY.init, jax.random.key(0))
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params, models.parameter_shardings(params, mesh),
    )  # fmt: skip
    slots = EMPTY(policy=policy)
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(slots))
    prefill = decoding.prefill_and_insert.lower(
        params, slots, np.ones((8, 16), np.int32), np.ones((8, 16), np.int32),
        np.zeros((16, 2), np.uint32), np.arange(8, dtype=np.int32), np.ones(16, bool),
        policy=policy, prompt_states=HiddenStateParams(),
    ).compile()  # fmt: skip
    assert prefill.memory_analysis().alias_size_in_bytes == own
    resize = decoding.resize_slots.lower(
        slots, np.zeros(8, np.int32), np.zeros(8, np.int32), np.int32(0), columns=64, mesh=mesh
    ).compile()
    assert not list(collectives(resize))
    specs = {sharding.spec for sharding in jax.tree.leaves(resize.output_shardings)}
    assert PartitionSpec() not in specs


@pytest.mark.slow
def test_the_mesh_has_devices_of_this_process_alone(monkeypatch, params):
    own = jax.devices()[4:7]
    monkeypatch.setattr(jax, "local_devices", lambda: own)
    assert list(engine_mesh(CONFIG, tensor=2, data=1).devices.flat) == own[:2]
    assert list(engine_mesh(CONFIG, tensor=1, data=2).devices.flat) == own[:2]
    assert dict(engine_mesh(CONFIG, tensor=1, data=1).shape)["tensor"] == 1
    assert engine_mesh(CONFIG, tensor=2, data=-1).shape["replica"] == 1
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[4:])
    assert engine_mesh(CONFIG, tensor=-1, data=1).shape["tensor"] == 4
    assert engine_mesh(CONFIG, tensor=-1, data=2).shape["tensor"] == 2
    assert engine_mesh(CONFIG, tensor=2, data=-1).shape["replica"] == 2
    engine = engine_with(params, None)
    rollouts = sample(engine, make_requests(1, 1), SamplingParams(3))
    assert len(rollouts[0].response_ids) == 3
    for leaf in jax.tree.leaves(engine._params):
        assert leaf.sharding.device_set == {jax.devices()[4]}


@pytest.mark.parametrize(
    ("tensor", "copies", "change", "message"),
    [
        (16, 1, {}, r"=16, .*=1: their product must be at most the 8 devices of this process; "),
        (4, 4, {}, r"=4, .*=4: their product must be at most the 8 devices"),
        (-1, 9, {}, r"=-1, .*=9: their product must be at most the 8 devices"),
        (1, 3, {}, r"which 3 copies of the weights do not divide; set .* power of two"),
        (-1, 1, {}, r"parallelism=-1, .* mesh\.tensor=8 must divide num_heads=4; 1, 2, 4 fit\."),
        (2, 1, {"vocab_size": 37}, r"mesh\.tensor=2 must divide vocab_size=37; 1 fit\."),
        (4, 2, {"num_kv_heads": 1, "head_dim": 6}, r"num_kv_heads \* head_dim=6; 1, 2 fit\."),
    ],
)
def test_a_split_that_does_not_fit_is_refused(tensor, copies, change, message):
    with pytest.raises(UserError, match=message) as raised:
        engine_mesh(dataclasses.replace(CONFIG, **change), tensor=tensor, data=copies)
    assert "rollout.jax_tensor_parallelism=" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tensor", "copies", "message"),
    [
        (0, 1, "rollout.jax_tensor_parallelism=0 must be at least 1, or -1"),
        (1, -2, "rollout.jax_data_parallelism=-2 must be at least 1, or -1"),
        (-1, -1, "one alone may be -1"),
    ],
)
def test_settings_that_contradict_are_refused(tensor, copies, message):
    config = quickstart.get_config()
    config.rollout.jax_tensor_parallelism = tensor
    config.rollout.jax_data_parallelism = copies
    refused(message, validate, config.lock())


def test_the_config_decides_the_engines_mesh():
    config = quickstart.get_config()
    config.rollout.jax_tensor_parallelism = 2
    config.rollout.jax_data_parallelism = 4
    engine = jax_engine(config, POLICY, data.character_tokenizer())
    assert engine._policy.mesh == mesh_of(4, 2)
    engine.close()
