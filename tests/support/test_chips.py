"""Slices by name, and mistakes in their names."""

import pytest

from semrl_jax.support.chips import CHIPS, find_slice, peak_flops, smallest_that_holds
from tests.cases import refused


def test_a_slice():
    found = find_slice("v5p:4x4x4")
    assert (found.num_chips, found.shape, found.hbm_bytes) == (64, (4, 4, 4), 64 * 95e9)


def test_links_of_a_chip():
    # "How to scale your model", table of TPU specifications: 4.5e10 for v5e, 9e10 for v5p and v6e.
    found = {name: chip.link_bandwidth for name, chip in CHIPS.items()}
    assert found == {"v5e": 4.5e10, "v5p": 9e10, "v6e": 9e10}


def test_rings_are_closed_where_the_pod_closes_them():
    cube, part, flat = find_slice("v5p:4x4x8"), find_slice("v5p:2x4x4"), find_slice("v5e:8x16")
    assert cube.has_ring(4) and cube.has_ring(8)
    assert not part.has_ring(4)  # less than a cube
    assert flat.has_ring(16) and not flat.has_ring(8)


@pytest.mark.parametrize(
    ("text", "name", "num_chips"),
    [  # docs.cloud.google.com/tpu/docs/v5p, v5e and v6e: tables of configurations
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-64", "v5p:2x4x4", 32),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-12288", "v5p:16x16x24", 6144),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5e-16", "v5e:4x4", 16),
        ("v6e-32", "v6e:4x8", 32),
    ],
)
def test_a_slice_by_its_accelerator_type(text, name, num_chips):
    found = find_slice(text)
    assert (found.name, found.num_chips) == (name, num_chips)
    assert found.accelerator_type == text.replace("v5e", "v5litepod")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", "one of v5e, v5p, v6e"),
        ("v5p", "v5p slices have the shapes 2x2x1"),
        ("v5p:4x4x5", "the shapes .*4x4x4"),
        ("v5e:../x", "v5e slices have the shapes"),
        ("v5p-60", "counts TensorCores, two per chip; next to it are v5p-32, v5p-64"),
        ("v5litepod-1000", "counts chips; next to it are v5litepod-256"),
        ("v6e-x", "next to it are v6e-1, v6e-4"),
        ("v5p-4", "next to it are v5p-8"),
        ("v4-64", "one of v5e, v5p, v6e"),
    ],
)
def test_an_unknown_slice_is_refused_with_the_known_ones(text, message):
    refused(message, find_slice, text)


def test_what_would_hold_a_model():
    assert smallest_that_holds(100e9) == ["v5e:2x4", "v5p:2x2x1", "v6e:2x2"]
    assert smallest_that_holds(1e15) == []


def test_the_peak_of_a_device_by_its_name():
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("cpu") is peak_flops("NVIDIA H100 PCIe") is None  # which has another peak
