"""Arrays at the edge: written as Flower writes them, and read whatever way NumPy writes them."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.layout import read_array, write_array

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


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "empty"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_any_honest_header_is_read(name, version):
    values = ARRAYS[name]
    stream = BytesIO()
    np.lib.format.write_array(stream, values, version=version)
    array = Array(str(values.dtype), values.shape, "numpy.ndarray", stream.getvalue())
    found = read_array(array, "it", values.dtype, values.shape)
    np.testing.assert_array_equal(found, values)
    assert found.shape == values.shape


def test_a_header_that_says_something_else_is_refused():
    values = np.ones((2, 3), np.float32)
    forged = Array("float32", (3, 2), "numpy.ndarray", Array(values).data)
    with pytest.raises(InvalidReplyError, match="holds"):
        read_array(forged, "it", np.dtype(np.float32), (3, 2))
