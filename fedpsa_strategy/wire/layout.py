"""The edge between Flower's records and flat vectors.

Inside, a model is one float vector of its trainable parameters and a small dict of its states: the
values of all other arrays. Outside it is an `ArrayRecord` in the shape of a state dict.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.methods.base import Vector
from fedpsa_strategy.wire.contract import STATES
from fedpsa_strategy.wire.text import shown, shown_names
from fedpsa_strategy.wire.update_dtype import decode, wire_form

States = Mapping[str, NDArray[Any]]
"""The arrays of a model that are not trained, by key and in their own dtypes."""

_NUMPY = Array(np.empty(0)).stype  # Flower's name for NumPy's format


# Float buffers of PyTorch's normalisation layers.
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class _Entry:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    span: slice | None  # where it lies in the vector; None for a state


class Layout:
    """How the arrays of a model lie in a flat vector.

    Parameters
    ----------
    arrays : ArrayRecord
        Any version of the model.
    trainable : Iterable[str] (default: None)
        Keys of the trainable parameters, which make up the vector. None takes every float array for
        one, but for the statistics of PyTorch's normalisation layers (`running_mean`,
        `running_var`).

    Attributes
    ----------
    size : int
        d: length of the vector.
    exact : bool
        Whether all trainable arrays have the vector's dtype, so that writing loses nothing.
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
        if trainable is None:
            trainable = [key for key in floats if key.rpartition(".")[2] not in _STATISTICS]
        keys = list(dict.fromkeys(trainable))
        if unknown := sorted(set(keys) - set(floats)):
            raise ValueError(f"trainable keys {unknown} are no float arrays of initial_arrays")
        if not keys:
            raise ValueError("there are no trainable float arrays in initial_arrays")
        self.dtype = np.result_type(np.float32, *(dtypes[key] for key in keys))
        self.exact = all(dtypes[key] == self.dtype for key in keys)
        self.largest_norm = min(
            math.sqrt(np.finfo(self.dtype).max),
            *(float(np.finfo(dtypes[key]).max) for key in keys),
        )

        spans: dict[str, slice] = {}
        end = 0
        for key in keys:
            start, end = end, end + math.prod(arrays[key].shape)
            spans[key] = slice(start, end)
        self.size = end
        self._entries = {
            key: _Entry(dtypes[key], tuple(array.shape), spans.get(key))
            for key, array in arrays.items()
        }
        self._trainable = {key: self._entries[key] for key in spans}
        self._states = {key: e for key, e in self._entries.items() if e.span is None}

    def span(self, keys: Sequence[str]) -> slice:
        """Return where these trainable arrays lie; they have to lie next to each other."""
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
        """Return the part of a vector that is the trainable array `key`, in its shape."""
        return vector[self._span(key)].reshape(self._entries[key].shape)

    def key_at(self, position: int) -> str:
        """Return which array an entry of the vector belongs to."""
        for key in self._trainable:
            if self._span(key).start <= position < self._span(key).stop:
                return key
        raise IndexError(f"position {position} of a vector of {self.size}")

    def _span(self, key: str) -> slice:
        span = self._entries[key].span
        if span is None:
            raise ValueError(f"array {key!r} is not trainable")
        return span

    def read(self, arrays: Mapping[str, Array]) -> tuple[Vector, States]:
        """Return the vector and the states of a whole model.

        Keys, shapes or dtypes that differ from the model's, or bytes of no such array, raise
        InvalidReplyError.
        """
        _check_keys(arrays, self._entries, "arrays")
        vector = np.empty(self.size, dtype=self.dtype)
        states = {}
        for key, entry in self._entries.items():
            values = read_array(arrays[key], f"arrays[{key!r}]", entry.dtype, entry.shape)
            if entry.span is None:
                states[key] = values.copy()
            else:
                vector[entry.span] = values.reshape(-1)
        return vector, states

    def read_update(
        self,
        deltas: Mapping[str, Array],
        states: Mapping[str, Array],
        update_dtype: str = "float32",
    ) -> tuple[Vector, States]:
        """Return an update's vector Δ and the states of its model, checked as `read` does.

        `deltas` is Δ of the trainable arrays, in the format `update_dtype` ("float32" means the
        model's own dtypes); `states` are the values of all others.
        """
        if untrained := sorted(self._trainable.keys() & states.keys()):
            raise InvalidReplyError(
                f"the client does not train {untrained}, of which the server expects updates: name "
                "the trainable arrays in the strategy's `trainable`"
            )
        _check_keys(deltas, self._trainable, "arrays")
        if states or self._states:
            _check_keys(states, self._states, STATES)
        vector = np.empty(self.size, dtype=self.dtype)
        for key, entry in self._trainable.items():
            name = f"arrays[{key!r}]"
            form = wire_form(update_dtype, entry.dtype, entry.shape)
            values = read_array(deltas[key], name, *form)
            decode(values.reshape(-1), update_dtype, vector[entry.span], name)
        return vector, {
            key: read_array(states[key], f"{STATES}[{key!r}]", entry.dtype, entry.shape).copy()
            for key, entry in self._states.items()
        }

    def write(self, vector: Vector, states: States) -> ArrayRecord:
        """Return the record of a model, in the order, shapes and dtypes of the initial arrays."""
        record = ArrayRecord()
        for key, entry in self._entries.items():
            if entry.span is None:
                record[key] = write_array(np.asarray(states[key], dtype=entry.dtype))
            else:
                values = vector[entry.span].reshape(entry.shape)
                record[key] = write_array(values.astype(entry.dtype, copy=False))
        return record


def _check_keys(arrays: Mapping[str, Array], expected: Collection[str], name: str) -> None:
    if arrays.keys() != set(expected):
        missing = shown_names(set(expected) - arrays.keys())
        extra = shown_names(arrays.keys() - set(expected))
        raise InvalidReplyError(f"{name} have wrong keys: missing {missing}, unknown {extra}")


def write_array(values: NDArray[Any]) -> Array:
    """Return an array as Flower's, as `Array(values)` does but with a single copy of the data."""
    form = _form(values.dtype, values.shape)
    data = b"".join((form.header, np.ascontiguousarray(values).data))
    return Array(dtype=form.dtype_name, shape=values.shape, stype=_NUMPY, data=data)


def record_of(arrays: Iterable[tuple[str, NDArray[Any]]]) -> ArrayRecord:
    """Return a record of arrays and their keys."""
    record = ArrayRecord()  # one that is made from a dict makes every array again
    for key, values in arrays:
        record[key] = write_array(values)
    return record


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
    known, so its bytes must begin as NumPy begins such an array, and have that length. Anything
    else raises InvalidReplyError; `name` is what its text calls the array.
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
