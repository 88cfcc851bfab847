"""How messages travel between the local grid and its workers.

What is small is pickled. The bytes of big arrays stay outside of the pickle: they are never copied
on the way into it or out of it, and whoever holds them already need not get them again.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, NamedTuple

from flwr.app import Array

# Below this many bytes, an array is cheaper inside the pickle.
_SMALL = 4096


class Packed(NamedTuple):
    """An object ready to travel.

    Attributes
    ----------
    payload : bytes
        The pickle.
    buffers : tuple[bytes, ...]
        The data of its big arrays, in the order in which the pickle asks for them: the very
        objects, so that their identity tells equal ones.
    """

    payload: bytes
    buffers: tuple[bytes, ...]

    def same_as(self, other: Packed) -> bool:
        """Tell whether the other one is the same; not by the value of megabytes."""
        identities = [list(map(id, packed.buffers)) for packed in (self, other)]
        return self.payload == other.payload and identities[0] == identities[1]


def pack(obj: Any) -> Packed:
    """Take an object apart into a pickle and the data of its big arrays."""
    buffers: list[bytes] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw().obj
        if not isinstance(data, bytes) or len(data) < _SMALL:
            return True
        buffers.append(data)
        return False

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=keep_inside)
    pickler.dispatch_table = copyreg.dispatch_table | {Array: _reduce_array}
    pickler.dump(obj)
    return Packed(stream.getvalue(), tuple(buffers))


def unpack(packed: Packed) -> Any:
    """Put the object together again; it shares the data of big arrays with `packed`."""
    return pickle.loads(packed.payload, buffers=packed.buffers)


def _reduce_array(array: Array) -> tuple[Any, ...]:
    # Its fields as they are: `Array` would look at each of them once more.
    fields = {
        "dtype": array.dtype,
        "shape": tuple(array.shape),
        "stype": array.stype,
        "data": pickle.PickleBuffer(array.data),
    }
    return copyreg.__newobj__, (Array,), fields  # type: ignore[attr-defined]
