"""Valid and invalid files of hidden states."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from semrl_jax.analysis import read_states
from semrl_jax.support.errors import UserError
from tests.cases import refused

STATES = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
MASK = np.arange(7) < np.array([7, 3, 0])[:, None]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_states_come_back_as_they_were_saved(tmp_path, dtype):
    file = tmp_path / "states.safetensors"
    save_file({"hidden_states": STATES.astype(dtype), "response_mask": MASK}, file)
    states, mask = read_states(file)
    assert states.dtype == dtype
    np.testing.assert_array_equal(states, STATES.astype(dtype))
    np.testing.assert_array_equal(mask, MASK)
    if dtype is not ml_dtypes.bfloat16:
        np.savez(tmp_path / "states.npz", hidden_states=STATES.astype(dtype), response_mask=MASK)
        for from_npz, expected in zip(read_states(tmp_path / "states.npz"), (states, mask)):
            np.testing.assert_array_equal(from_npz, expected)


def test_one_response_becomes_a_batch_and_no_mask_counts_all(tmp_path):
    np.savez(tmp_path / "one.npz", hidden_states=STATES[0])
    states, mask = read_states(tmp_path / "one.npz")
    np.testing.assert_array_equal(states, STATES[:1])
    np.testing.assert_array_equal(mask, np.ones((1, 7), bool))


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"states": STATES}, "no array 'hidden_states'"),
        ({"hidden_states": STATES[0, 0]}, r"shape \(4,\); it must be \[B, T, D\]"),
        ({"hidden_states": STATES[None]}, "choose one layer"),
        ({"hidden_states": STATES[:, :0]}, "not empty"),
        ({"hidden_states": STATES.astype(int)}, "dtype int64"),
        ({"hidden_states": STATES.astype(complex)}, "dtype complex128"),
        ({"hidden_states": STATES.astype(ml_dtypes.bfloat16)}, "bfloat16 needs a .safetensors"),
        ({"hidden_states": STATES, "response_mask": MASK[:, :6]}, r"need \(3, 7\)"),
        ({"hidden_states": STATES, "response_mask": MASK.astype(int)}, "it must be bool"),
        ({"hidden_states": np.array([{}])}, "cannot be read"),  # would need pickle
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, message):
    file = tmp_path / "states.npz"
    np.savez(file, **arrays)
    assert str(file) in refused(message, read_states, file)


def test_wrong_files_are_named(tmp_path):
    refused("is no file", read_states, tmp_path / "nowhere.npz")
    refused(r"must end in .npz or .safetensors", read_states, tmp_path / "states.pt")
    for name in ("torn.npz", "torn.safetensors", "empty.npz", "empty.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 nothing" if "torn" in name else b"")
        refused(f"{name} cannot be read", read_states, tmp_path / name)


def test_damaged_files_are_named(tmp_path):
    file = tmp_path / "states.npz"
    with open(file, "wb") as stream:
        np.save(stream, STATES)  # one array without the archive
    refused("cannot be read", read_states, file)
    np.savez_compressed(file, hidden_states=STATES)
    sound, num_refused = file.read_bytes(), 0
    places = range(30, len(sound), 7)
    for place in places:
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 0xFF]) + sound[place + 1 :])
        try:
            states, _ = read_states(file)
        except UserError as error:
            assert str(file) in str(error)
            num_refused += 1
        else:  # a byte that does not belong to the array
            np.testing.assert_array_equal(states, STATES)
    assert num_refused > len(places) / 2


def test_a_dtype_that_numpy_lacks_is_named(tmp_path):
    file = tmp_path / "states.safetensors"
    header = b'{"hidden_states":{"dtype":"F8_E4M3","shape":[1,2,2],"data_offsets":[0,4]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(r"states.safetensors", read_states, file)
