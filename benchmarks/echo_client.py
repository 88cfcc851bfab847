"""A ClientApp that does not train: it answers at once, with an update of the right shape."""

from __future__ import annotations

from functools import cache

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

SKETCH = [float(value) for value in range(1, 17)]

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell the partition."""
    partition = int(context.node_config["partition-id"])
    metrics = MetricRecord({"num-examples": 1000, "partition-id": partition})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001
    """Answer with the same small update every time."""
    shapes = tuple((key, a.shape) for key, a in message.content.array_records["arrays"].items())
    metrics = MetricRecord({"num-examples": 1000, "train-loss": 0.5, "sketch": SKETCH})
    return Message(RecordDict({"arrays": _update(shapes), "metrics": metrics}), reply_to=message)


@cache
def _update(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> ArrayRecord:
    return ArrayRecord({key: Array(np.full(shape, 1e-6, np.float32)) for key, shape in shapes})
