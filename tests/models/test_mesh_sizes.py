"""What a mesh that the devices do not fill is told."""

import jax
import pytest

from semrl_jax import models
from semrl_jax.support.errors import UserError


def test_remaining_axis_needs_at_least_one_device():
    shape = {"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 8}
    with pytest.raises(UserError, match="needs 8 devices, but 4 are there"):
        models.make_mesh(shape, jax.devices()[:4])
