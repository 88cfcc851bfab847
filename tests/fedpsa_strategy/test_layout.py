"""Arrays at the edge: written and read as NumPy writes them, and in no other form."""

import numpy as np
import pytest
from flwr.app import Array

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.wire.layout import read_array, write_array

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "number": np.asarray(5),
    "empty": np.zeros(0, np.float32),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "half": np.ones((1, 2, 3), np.float16),
    "flags": np.array([True, False]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_written_as_flower_would(name):
    values = ARRAYS[name]
    ours, flowers = write_array(values), Array(values)
    assert (ours.dtype, tuple(ours.shape), ours.stype) == (
        flowers.dtype,
        tuple(flowers.shape),
        flowers.stype,
    )
    np.testing.assert_array_equal(ours.numpy(), values)
    assert ours.numpy().shape == values.shape
    if values.flags.c_contiguous:
        assert ours.data == flowers.data


@pytest.mark.parametrize("name", ARRAYS)
def test_what_an_honest_client_sends_is_read(name):
    """Also a transposed view, whose numbers NumPy writes in the order in which they lie."""
    values = ARRAYS[name]
    found = read_array(Array(values), "it", values.dtype, values.shape)
    np.testing.assert_array_equal(found, values)
    assert found.shape == values.shape


def header(text: str, *, magic: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    padded = text.encode() + b"\n"
    return magic + len(padded).to_bytes(2, "little") + padded


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
HONEST = Array(VALUES).data
FORGED = {
    "a byte too many": HONEST + b"\0",
    "a byte too few": HONEST[:-1],
    "nothing": b"",
    "an open bracket": header("{'descr': (") + VALUES.tobytes(),
    "keys that are numbers": header("{1: 2, 'a': 3}") + VALUES.tobytes(),
    "a deep expression": header("-" * 3900 + "1") + VALUES.tobytes(),
    "an odd dtype": header("{'descr': '<f4,,<', 'fortran_order': False, 'shape': (2, 3)}")
    + VALUES.tobytes(),
    "other padding": header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}")
    + VALUES.tobytes(),
    "another shape": Array(VALUES.T.copy()).data,
    "another dtype": Array(VALUES.astype(np.int32)).data,
    "another version": HONEST[:6] + b"\x02" + HONEST[7:],
}


@pytest.mark.parametrize("name", FORGED)
def test_no_parser_reads_a_header_that_a_stranger_wrote(name):
    forged = Array("float32", (2, 3), "numpy.ndarray", FORGED[name])
    text = rf"^it is not in NumPy's format: its {len(FORGED[name])} bytes must be"
    with pytest.raises(InvalidReplyError, match=text):
        read_array(forged, "it", VALUES.dtype, VALUES.shape)


def test_what_a_stranger_calls_a_dtype_is_shown_on_one_line_of_bounded_length():
    forged = Array("float32\x1b[2J\n" + "x" * 10**6, (2, 3), "numpy.ndarray", HONEST)
    with pytest.raises(InvalidReplyError, match="has dtype") as caught:
        read_array(forged, "it", VALUES.dtype, VALUES.shape)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
