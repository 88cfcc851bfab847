"""The private corners of Flower that a grid of one's own has to touch, all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE_ID = 1
RUN_ID = 1

_EMPTY: dict[type[Any], dict[str, Any]] = {
    ArrayRecord: vars(ArrayRecord()),
    MetricRecord: vars(MetricRecord()),
    ConfigRecord: vars(ConfigRecord()),
    RecordDict: vars(RecordDict()),
}

RECORDS = (ArrayRecord, MetricRecord, ConfigRecord)
"""What the content of a message is made of."""

Made = TypeVar("Made")


def act_as(node_id: int) -> None:
    """Make this process the sender of the messages that are created in it."""
    TaskIdentity.run_id = RUN_ID
    TaskIdentity.task_id = node_id
    TaskIdentity.node_id = node_id


def give_id(message: Message, message_id: str) -> None:
    """Give a message the id that elsewhere the SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


# --- Making again what was checked when it was made first -----------------------------------------


def make_array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Return an array of these fields as they are."""
    return _made(Array, {"dtype": dtype, "shape": shape, "stype": stype, "data": data})


def make_record(kind: type[Made], values: dict[str, Any]) -> Made:
    """Return a record, or a RecordDict of records, that has a dict's values; they share it."""
    return _made(kind, _EMPTY[kind] | {"_data": values})


def make_message(metadata: Mapping[str, Any], content: RecordDict) -> Message:
    """Return a message; the metadata are what `vars` says of those of another."""
    fields = {"_metadata": _made(Metadata, metadata), "_content": content, "_error": None}
    return _made(Message, fields)


def _made(kind: type[Made], fields: Mapping[str, Any]) -> Made:
    made = kind.__new__(kind)
    made.__dict__.update(fields)
    return made
