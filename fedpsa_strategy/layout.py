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
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.rules.base import Vector
from fedpsa_strategy.text import shown, shown_names
from fedpsa_strategy.update_dtype import decode, wire_dtype

Integers = Mapping[str, NDArray[Any]]

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
    largest_norm : float
        The largest norm of a model whose number formats hold all its values and their squares' sum.
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
        self.largest_norm = min(
            math.sqrt(np.finfo(self.dtype).max),
            *(float(np.finfo(dtypes[key]).max) for key in first),
        )

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

    def key_at(self, position: int) -> str:
        """Return which float array an entry of the vector belongs to."""
        for key, entry in self._entries.items():
            if entry.span is not None and entry.span.start <= position < entry.span.stop:
                return key
        raise IndexError(f"position {position} of a vector of {self.size}")

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
            missing = shown_names(self._entries.keys() - arrays.keys())
            extra = shown_names(arrays.keys() - self._entries.keys())
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
    fortran_header: bytes  # and for a transposed one, which NumPy writes in the order it lies in


@lru_cache(maxsize=4096)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Form:
    headers = []
    for fortran_order in (False, True):
        stream = BytesIO()
        description = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": fortran_order,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(stream, description)
        headers.append(stream.getvalue())
    return _Form(str(dtype), math.prod(shape) * dtype.itemsize, *headers)


def read_array(
    array: Array, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return a read-only view of an array's bytes, checked against what it must be.

    Nothing here tries to understand a header that somebody else wrote. What the array must be is
    known, so its bytes must begin as NumPy begins such an array, and have that length.

    Raises
    ------
    InvalidReplyError
        When it is something else; `name` is what the text calls it.
    """
    if tuple(array.shape) != shape:
        raise InvalidReplyError(f"{name} has shape {shown(tuple(array.shape))}, not {shape}")
    form = _form(dtype, shape)
    if array.dtype != form.dtype_name:
        raise InvalidReplyError(f"{name} has dtype {shown(array.dtype)}, not {dtype}")
    orders: tuple[tuple[bytes, Literal["C", "F"]], ...] = (
        (form.header, "C"),
        (form.fortran_header, "F"),
    )
    for header, order in orders:
        if len(array.data) == len(header) + form.num_bytes and array.data.startswith(header):
            values: NDArray[Any] = np.frombuffer(array.data, dtype=dtype, offset=len(header))
            return values.reshape(shape, order=order)
    raise InvalidReplyError(
        f"{name} is not in NumPy's format: its {len(array.data)} bytes must be the header that "
        f"NumPy 1.26 or newer writes for {dtype}{shape}, and {form.num_bytes} bytes of data"
    )
