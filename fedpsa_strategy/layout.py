"""The edge between Flower's records and flat vectors.

Inside, a model is one float vector (trainable parameters first, float buffers behind) and a small
dict of integer buffers. Outside it is an `ArrayRecord` in the shape of a state dict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.rules.base import Vector
from fedpsa_strategy.update_dtype import decode, wire_dtype

Integers = Mapping[str, NDArray[Any]]

# An .npy header is some 128 bytes; more than this much beyond the data is no honest array.
_MAX_HEADER = 4096

_NUMPY = Array(np.empty(0)).stype  # Flower's name for NumPy's format


@dataclass(frozen=True)
class _Entry:
    key: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    span: slice | None  # where it lies in the vector; None for integers


class Layout:
    """How the arrays of a model lie in a flat vector.

    Parameters
    ----------
    arrays : ArrayRecord
        Any version of the model.
    trainable : Iterable[str] (default: None)
        Keys of the trainable parameters; None takes every float array for one.

    Attributes
    ----------
    size : int
        Length of the vector.
    num_trainable : int
        d: how many of its entries, the first ones, are trainable parameters.
    """

    def __init__(self, arrays: ArrayRecord, trainable: Iterable[str] | None = None) -> None:
        if not arrays:
            raise ValueError("initial_arrays is empty: there is no model to train")
        dtypes = {key: np.dtype(array.dtype) for key, array in arrays.items()}
        for key, dtype in dtypes.items():
            if dtype.kind not in "fiub":
                raise ValueError(
                    f"initial_arrays[{key!r}] has dtype {dtype}: need float or integer"
                )
        floats = [key for key, dtype in dtypes.items() if dtype.kind == "f"]
        first = floats if trainable is None else list(trainable)
        if unknown := sorted(set(first) - set(floats)):
            raise ValueError(f"trainable keys {unknown} are no float arrays of initial_arrays")
        if not first:
            raise ValueError("there are no trainable float arrays in initial_arrays")
        self.dtype = np.result_type(np.float32, *(dtypes[key] for key in floats))

        spans: dict[str, slice] = {}
        end = 0
        for key in [*first, *(key for key in floats if key not in set(first))]:
            start, end = end, end + int(np.prod(arrays[key].shape, dtype=np.int64))
            spans[key] = slice(start, end)
            if key == first[-1]:
                self.num_trainable = end
        self.size = end
        self._entries = {
            key: _Entry(key, dtypes[key], tuple(array.shape), spans.get(key))
            for key, array in arrays.items()
        }

    def span(self, keys: Sequence[str]) -> slice:
        """Return where these float arrays lie; they have to lie next to each other."""
        if missing := [key for key in keys if key not in self._entries]:
            raise ValueError(f"{missing} are not among the model's arrays {list(self._entries)}")
        spans = sorted((self._span(key) for key in keys), key=lambda span: span.start)
        for before, after in pairwise(spans):
            if before.stop != after.start:
                raise ValueError(f"the arrays {list(keys)} do not follow each other in the model")
        if not spans:
            raise ValueError("no arrays are named")
        return slice(spans[0].start, spans[-1].stop)

    def view(self, vector: Vector, key: str) -> Vector:
        """Return the part of a vector that is the float array `key`, in its shape."""
        return vector[self._span(key)].reshape(self._entries[key].shape)

    def _span(self, key: str) -> slice:
        span = self._entries[key].span
        if span is None:
            raise ValueError(f"array {key!r} is not a float array")
        return span

    def read(
        self, arrays: Mapping[str, Array], update_dtype: str = "float32"
    ) -> tuple[Vector, Integers]:
        """Return the flat vector and the integer buffers of `arrays`.

        Parameters
        ----------
        arrays : Mapping[str, Array]
            A model, or an update of one.
        update_dtype : str (default: "float32")
            In which format its floats travelled; "float32" means in the model's own dtypes.

        Raises
        ------
        InvalidReplyError
            When keys, shapes or dtypes differ from the model's, or the bytes are no such array.
        """
        if arrays.keys() != self._entries.keys():
            missing = sorted(self._entries.keys() - arrays.keys())
            extra = sorted(arrays.keys() - self._entries.keys())
            raise InvalidReplyError(f"arrays have wrong keys: missing {missing}, unknown {extra}")
        vector = np.empty(self.size, dtype=self.dtype)
        integers: dict[str, NDArray[Any]] = {}
        for key, entry in self._entries.items():
            is_float = entry.span is not None
            dtype = wire_dtype(update_dtype, entry.dtype) if is_float else entry.dtype
            values = read_array(arrays[key], f"arrays[{key!r}]", dtype, entry.shape)
            if entry.span is None:
                integers[key] = values.copy()
            else:
                decode(values.reshape(-1), update_dtype, vector[entry.span])
        return vector, integers

    def write(self, vector: Vector, integers: Integers) -> ArrayRecord:
        """Return the record of a model, in the order, shapes and dtypes of the initial arrays."""
        record = ArrayRecord()
        for key, entry in self._entries.items():
            if entry.span is None:
                record[key] = write_array(np.asarray(integers[key], dtype=entry.dtype))
            else:
                values = vector[entry.span].reshape(entry.shape)
                record[key] = write_array(values.astype(entry.dtype, copy=False))
        return record


def write_array(values: NDArray[Any]) -> Array:
    """Return an array as Flower's, as `Array(values)` does but with a single copy of the data."""
    form = _form(values.dtype, values.shape)
    data = b"".join((form.header, np.ascontiguousarray(values).data))
    return Array(dtype=form.dtype_name, shape=values.shape, stype=_NUMPY, data=data)


class _Form(NamedTuple):
    """What all arrays of one dtype and shape have in common on their way."""

    dtype_name: str
    num_bytes: int  # without the header
    header: bytes  # how NumPy's format begins for an array in C order


@lru_cache(maxsize=4096)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Form:
    stream = BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(stream, description)
    return _Form(str(dtype), math.prod(shape) * dtype.itemsize, stream.getvalue())


def read_array(
    array: Array, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return a read-only view of an array's bytes, checked against what it must be.

    Raises
    ------
    InvalidReplyError
        When it is something else; `name` is what the text calls it.
    """
    if tuple(array.shape) != shape:
        raise InvalidReplyError(f"{name} has shape {tuple(array.shape)}, not {shape}")
    dtype_name, num_bytes, usual = _form(dtype, shape)
    if array.dtype != dtype_name:
        raise InvalidReplyError(f"{name} has dtype {array.dtype}, not {dtype}")
    # Sizes first: a forged header must not make us allocate what it claims.
    if not num_bytes < len(array.data) <= num_bytes + _MAX_HEADER:
        raise InvalidReplyError(f"{name} has {len(array.data)} bytes for {num_bytes} bytes of data")
    # Nearly always it begins as NumPy would begin it here, and there is nothing to parse.
    if len(array.data) == len(usual) + num_bytes and array.data.startswith(usual):
        return np.frombuffer(array.data, dtype=dtype, offset=len(usual)).reshape(shape)
    try:
        stream = BytesIO(array.data[: len(array.data) - num_bytes])
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(stream)](stream)
    except (ValueError, KeyError) as error:
        raise InvalidReplyError(f"{name} is not in NumPy's format: {error}") from None
    found_shape, fortran_order, found_dtype = header
    if found_shape != shape or found_dtype != dtype:
        raise InvalidReplyError(f"{name} holds {found_dtype}{found_shape}, not {dtype}{shape}")
    values = np.frombuffer(array.data, dtype=dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if fortran_order else "C")
