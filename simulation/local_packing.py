"""How messages travel between the local grid and its workers.

What is small is pickled. The bytes of big arrays stay outside of the pickle: they are never copied
on the way into it or out of it, and whoever holds them already need not get them again.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Message, RecordDict

from simulation.local_internals import RECORDS, make_array, make_message, make_record

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


def pack(obj: Message | RecordDict) -> Packed:
    """Take an object apart into a pickle and the data of its big arrays."""
    if type(obj) is Message and (parts := _parts(obj)) is not None:
        fields, data = parts
        return Packed(pickle.dumps(fields, protocol=5), tuple(data))
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
    found = pickle.loads(packed.payload, buffers=packed.buffers)
    return _from_parts(found, packed.buffers) if type(found) is tuple else found


def _reduce_array(array: Array) -> tuple[Any, ...]:
    # Its fields as they are: `Array` would look at each of them once more.
    data = pickle.PickleBuffer(array.data)
    return make_array, (array.dtype, tuple(array.shape), array.stype, data)


# --- Messages -------------------------------------------------------------------------------------

# A pickle of Flower's objects takes longer than one of what they hold. This is a message's metadata
# and, of every record, the name, which of `RECORDS` it is, and the values. An array's data is None
# if it is the next one of the buffers.
_Fields = tuple[dict[str, Any], list[tuple[str, int, Any]]]


def _parts(message: Message) -> tuple[_Fields, list[bytes]] | None:
    """Return fields and buffers of a message, None if it has anything but Flower's own records."""
    if not message.has_content():
        return None
    records: list[tuple[str, int, Any]] = []
    buffers: list[bytes] = []
    for name, record in message.content.items():
        if type(record) not in RECORDS:
            return None
        values: Any = dict(record.items())
        if type(record) is ArrayRecord:
            arrays, values = values, []
            for key, array in arrays.items():
                data = array.data
                if type(array) is not Array or type(data) is not bytes:
                    return None
                if len(data) >= _SMALL:
                    buffers.append(data)
                    data = None
                values.append((key, array.dtype, tuple(array.shape), array.stype, data))
        records.append((name, RECORDS.index(type(record)), values))
    return (vars(message.metadata), records), buffers


def _from_parts(fields: _Fields, buffers: tuple[bytes, ...]) -> Message:
    metadata, records = fields
    content = {}
    rest = iter(buffers)
    for name, index, values in records:
        if RECORDS[index] is ArrayRecord:
            values = {
                key: make_array(dtype, shape, stype, next(rest) if data is None else data)
                for key, dtype, shape, stype, data in values
            }
        content[name] = make_record(RECORDS[index], values)
    return make_message(metadata, make_record(RecordDict, content))
