"""Checks of what clients send, where it enters the process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedpsa_strategy.errors import InvalidReplyError, OutOfMemoryReplyError
from fedpsa_strategy.methods.base import Vector
from fedpsa_strategy.wire.contract import CHECKSUM, DELTA, MARK, SECONDS, STATES, checksum
from fedpsa_strategy.wire.layout import Layout, States
from fedpsa_strategy.wire.states import check_states
from fedpsa_strategy.wire.text import MAX_REASON, shown, shown_names

_NORM_BLOCK = 8192
_MAX_ERROR = 500

# What of a client's metrics is kept, in events and checkpoints, has a bound: no honest reply comes
# near it. A list may be a sketch, so it may be longer than all else.
_MAX_METRICS = 256
_MAX_NAME = 128
_MAX_LIST = 1 << 16


# What torch and Python call it; a name of a class before a colon.
_OUT_OF_MEMORY = re.compile(r"\b(OutOfMemoryError|MemoryError)(:|$)")


@dataclass(frozen=True)
class TrainReply:
    """A reply to a train message, checked and flattened."""

    delta: Vector
    states: States
    squared_norm: float
    num_examples: float
    metrics: MetricRecord
    num_bytes: int
    seconds: float | None = None  # what the sketch took
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def read_train_reply(
    reply: Message,
    layout: Layout,
    start: tuple[Vector, States],
    *,
    arrays_key: str = "arrays",
    weight_key: str = "num-examples",
    update_dtype: str = "float32",
) -> TrainReply:
    """Return the update in a reply: Δ, or the whole trained model minus its `start`.

    See `fedpsa_strategy.wire.contract` for the two forms, `AsyncStrategy` for the keys. When
    anything is wrong, this raises InvalidReplyError; its text is the reason.
    """
    content = _content(reply)
    arrays = _record(content, arrays_key, ArrayRecord)
    mark = content.get(MARK)
    if mark is None:
        model, states = layout.read(arrays)
        with np.errstate(over="ignore", invalid="ignore"):  # noticed below
            delta: Vector = model - start[0]
        update_dtype = "float32"
    else:
        if not isinstance(mark, ConfigRecord) or mark.get("arrays") != DELTA:
            raise InvalidReplyError(f"the record {MARK!r} must be a config with arrays={DELTA!r}")
        own = content.array_records.get(STATES, ArrayRecord())
        if CHECKSUM in mark and mark[CHECKSUM] != checksum(arrays):
            raise InvalidReplyError(
                "the update was changed after it was made: mods that change models, such as "
                "Flower's clipping mods and LocalDpMod, belong behind fedpsa_mod, as in "
                "mods=[fedpsa_mod(Net), LocalDpMod(...)]"
            )
        delta, states = layout.read_update(arrays, own, update_dtype)
    # One pass serves twice: a sum of squares is finite only if every entry is.
    norm = squared_norm(delta)
    if not math.isfinite(norm):
        hint = " (float16 ends at 65504: try bfloat16)" if update_dtype == "float16" else ""
        name = layout.key_at(first_too_large(delta))
        raise InvalidReplyError(
            f"arrays contain NaN, Inf or numbers too large to square, first in {name!r}{hint}"
        )
    if states:
        check_states(states, start[1])
    # After the arrays: if those are not finite, the metrics made from them are not to blame.
    metrics = _metrics(content)
    num_examples = metrics.get(weight_key)
    if not isinstance(num_examples, int | float) or not num_examples > 0:
        raise InvalidReplyError(f"metrics[{weight_key!r}] is {num_examples!r}, need a number > 0")
    return TrainReply(
        delta=delta,
        states=states,
        squared_norm=norm,
        num_examples=num_examples,
        metrics=metrics,
        num_bytes=count_bytes(content),
        seconds=_seconds(mark),
    )


def _seconds(mark: ConfigRecord | None) -> float | None:
    """Return how long a sketch took, if the client says so in a believable way."""
    seconds = None if mark is None else mark.get(SECONDS)
    return seconds if isinstance(seconds, float) and 0 <= seconds < math.inf else None


def read_metrics_reply(reply: Message) -> RecordDict:
    """Return the content of a reply that must carry metrics alone; raises InvalidReplyError."""
    content = _content(reply)
    _metrics(content)
    return content


def count_bytes(content: RecordDict) -> int:
    """Return how many bytes the records of a message hold, in either direction.

    Names and values as they are, without what a transport adds. Not by Flower's own `count_bytes`,
    which refuses empty texts and lists.
    """
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
            continue
        for name, value in record.items():
            # Most values are numbers: found out first, as it is quick.
            total += len(name) + (8 if type(value) in (float, int) else _size(value))
    return total


def _size(value: Any) -> int:
    if isinstance(value, list):  # its values are all of one kind
        numbers = len(value) > 0 and type(value[0]) in (float, int)
        return 8 * len(value) if numbers else sum(map(_size, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8


def squared_norm(vector: Vector) -> float:
    """Return Σ x², with the same bits on any number of threads."""
    if len(vector) == 0:  # a model without float buffers
        return 0.0
    whole = len(vector) // _NORM_BLOCK * _NORM_BLOCK
    sums: Iterable[float] = ()
    with np.errstate(over="ignore", invalid="ignore"):
        # einsum sums by itself, not through a multi-threaded BLAS whose order may vary.
        if whole:
            blocks = vector[:whole].reshape(-1, _NORM_BLOCK)
            sums = np.einsum("ij,ij->i", blocks, blocks).astype(np.float64)
        rest = float(np.einsum("i,i->", vector[whole:], vector[whole:]))
    try:
        return math.fsum(sums) + rest
    except (OverflowError, ValueError):  # fsum's answers to overflow and to +Inf with -Inf
        return math.nan


def first_too_large(vector: Vector) -> int:
    """Return where the first number stands whose square is not finite; 0 if only their sum is."""
    with np.errstate(over="ignore", invalid="ignore"):
        return int(np.argmin(np.isfinite(vector * vector)))


def error_text(reply: Message) -> str:
    """Return what an error reply says, on one line of bounded length."""
    text = " ".join((reply.error.reason or f"error code {reply.error.code}").split())
    if len(text) > _MAX_ERROR:
        # The cause stands at the end of a traceback; torch's own words about memory are long.
        memory = _OUT_OF_MEMORY.search(text)
        cause = text[-_MAX_ERROR:] if memory is None else text[memory.start() :][:_MAX_ERROR]
        text = f"... {cause}"
    return shown(text, MAX_REASON)


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        text = error_text(reply)
        kind = OutOfMemoryReplyError if _OUT_OF_MEMORY.search(text) else InvalidReplyError
        raise kind(f"client error: {text}")
    if not reply.has_content():
        raise InvalidReplyError("the reply has no content")
    return reply.content


def _record(content: RecordDict, key: str, kind: type[Any]) -> Any:
    record = content.get(key)
    if not isinstance(record, kind):
        found = shown_names(f"{type(value).__name__} {name}" for name, value in content.items())
        raise InvalidReplyError(f"the reply lacks {kind.__name__} {key!r}; it has {found}")
    return record


def _metrics(content: RecordDict) -> MetricRecord:
    records = [record for record in content.values() if isinstance(record, MetricRecord)]
    if len(records) != 1:
        raise InvalidReplyError(f"the reply has {len(records)} MetricRecords, need exactly one")
    metrics = records[0]
    if len(metrics) > _MAX_METRICS:
        raise InvalidReplyError(f"the reply has {len(metrics)} metrics, at most {_MAX_METRICS}")
    for name, value in metrics.items():
        if len(name) > _MAX_NAME or not name.isprintable():
            raise InvalidReplyError(
                f"a metric is called '{shown(name)}': names have at most {_MAX_NAME} characters, "
                "all of them printable"
            )
        values = value if isinstance(value, list) else [value]
        if len(values) > _MAX_LIST:
            raise InvalidReplyError(
                f"metrics[{name!r}] has {len(values)} numbers, at most {_MAX_LIST}"
            )
        if not _all_finite(values):
            raise InvalidReplyError(f"metrics[{name!r}] is not finite")
    return metrics


def _all_finite(values: list[Any]) -> bool:
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # an integer beyond all floats
        return False
