"""Closed forms and times, worked by hand."""

import dataclasses

import pytest

from semrl_jax.models import DecoderConfig
from semrl_jax.models.products import products
from semrl_jax.planning import hlo, roofline
from semrl_jax.planning.architectures import PUBLISHED, find_architecture
from semrl_jax.runs.memory import num_parameters
from semrl_jax.support.chips import find_slice

CUBE = find_slice("v5p:4x4x4")
PLACES = [(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
GATHER = hlo.Collective("all-gather", (("bf16", (10**9,)),), tuple(range(64)), 1, "")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B", 0.494),  # the model cards: 0.49, 1.54, 7.61, 32.5 and 3.21
        ("Qwen/Qwen2.5-1.5B", 1.544),
        ("Qwen/Qwen2.5-7B", 7.616),
        ("Qwen/Qwen2.5-32B", 32.764),
        ("meta-llama/Llama-3.2-3B", 3.213),
    ],
)
def test_published_sizes(name, billions):
    assert num_parameters(find_architecture(name)) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert find_architecture(f"{name}-Instruct") == find_architecture(name)
    assert len(PUBLISHED) == 5


def test_products_of_a_model():
    model = DecoderConfig(
        vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2,
        num_kv_heads=1, head_dim=4,
    )  # fmt: skip
    found = products(model, num_tokens=20, num_columns=10, num_slots=6)
    per_layer = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16
    assert found.layers == 2 * 20 * 3 * per_layer
    assert found.head == 2 * 6 * 8 * 100
    # Scores and values of 10 x 10 / 2 pairs, 2 heads of 4, 2 sequences, 3 layers.
    assert found.attention == 3 * 2 * 2 * (2 * 8 * 10 * 10 / 2)
    assert found.training == 3 * found.forward


def test_a_gather_over_the_whole_cube_uses_all_six_links():
    assert roofline.collective_s(GATHER, CUBE, PLACES) == pytest.approx(2e9 * 63 / 64 / (6 * 9e10))


def test_a_line_has_half_the_links_of_a_ring():
    line = dataclasses.replace(GATHER, members=(0, 1, 2, 3))
    flat = find_slice("v5e:4x4")
    places = [(x, y) for x in range(4) for y in range(4)]
    assert roofline.collective_s(line, flat, places) == pytest.approx(2e9 * 3 / 4 / 4.5e10)
    assert roofline.collective_s(line, CUBE, PLACES) == pytest.approx(2e9 * 3 / 4 / (2 * 9e10))


def test_an_all_to_all_is_limited_by_the_middle_of_a_ring():
    # Half of the bytes of 4 chips cross the middle, a quarter of them in one direction over a link.
    exchange = dataclasses.replace(GATHER, kind="all-to-all", members=(0, 1, 2, 3))
    assert roofline.collective_s(exchange, CUBE, PLACES) == pytest.approx(2e9 * 4 / 8 / 9e10)


@pytest.mark.parametrize(
    ("flops", "moved", "is_async", "bound", "total"),
    [
        (459e12, 0, True, "compute", 1.0),
        (0, 2765e9, True, "HBM", 1.0),
        (459e12, 0, False, "compute", 1.0 + 2e9 * 63 / 64 / 5.4e11),
        (1, 0, True, "ICI", 2e9 * 63 / 64 / 5.4e11),
    ],
)
def test_what_bounds_a_program(flops, moved, is_async, bound, total):
    gather = dataclasses.replace(GATHER, is_async=is_async)
    program = hlo.Program((gather,), (hlo.Work(flops, moved, 1),))
    found = roofline.times(program, CUBE, PLACES)
    assert found.bound == bound and found.total == pytest.approx(total)
