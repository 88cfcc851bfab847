"""FedPAC's records: centroids for clients, statistics from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.methods.fedpac import CENTROIDS, COUNTS, FEATURES, VARIANCE, FedPACRule
from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.run_state import RunState, Task
from fedpsa_strategy.wire.layout import read_array
from fedpsa_strategy.wire.replies import TrainReply

RECORD_KEY = "fedpac"
KNOWN = "known"

# Every client is drawn to the global centroids: from far larger ones the loss is infinite, and all
# replies would have to be refused because of one.
_LARGEST_FEATURE = 1e9


class HeadStatistics(Callback):
    """Sends the global centroids in the record `fedpac`; reads the clients' statistics from it.

    Parameters
    ----------
    head_keys : Sequence[str]
        Keys of the head's arrays.
    num_classes : int
        Number of classes.
    num_features : int
        Length of the encoder's output.
    """

    def __init__(self, head_keys: Sequence[str], num_classes: int, num_features: int) -> None:
        self.head_keys = list(head_keys)
        self.num_classes = num_classes
        self.num_features = num_features

    def begin(self, run: RunState) -> None:
        """Show the rule where the head lies; refuses a model without an encoder and a head."""
        super().begin(run)
        assert isinstance(run.rule, FedPACRule)
        self._rule = run.rule
        self._rule.head = run.layout.span(self.head_keys)
        if self._rule.head.start == 0:
            raise ValueError(
                f"FedPAC needs a model with an encoder before its head, but {self.head_keys} are "
                "all of its trainable arrays"
            )

    def attach(self, task: Task) -> Mapping[str, ArrayRecord]:  # noqa: ARG002
        """Return the centroids."""
        rule = self._rule
        shape = (self.num_classes, self.num_features)
        centroids = np.zeros(shape, np.float32) if rule.centroids is None else rule.centroids
        known = np.zeros(self.num_classes, bool) if rule.known is None else rule.known
        arrays = {CENTROIDS: Array(centroids), KNOWN: Array(known.astype(np.int64))}
        return {RECORD_KEY: ArrayRecord(arrays)}

    def read(self, task: Task, message: Message, reply: TrainReply) -> TrainReply:  # noqa: ARG002
        """Return the reply with its statistics; raises InvalidReplyError."""
        return replace(reply, extra=self._read_statistics(message, reply.num_examples))

    def _read_statistics(self, reply: Message, num_examples: float) -> dict[str, Any]:
        record = reply.content.array_records.get(RECORD_KEY)
        table = (self.num_classes, self.num_features)
        shapes = {CENTROIDS: table, FEATURES: table, COUNTS: (self.num_classes,), VARIANCE: ()}
        if record is None or record.keys() != shapes.keys():
            raise InvalidReplyError(f"the reply's {RECORD_KEY!r} record must hold {sorted(shapes)}")
        values = {}
        for key, shape in shapes.items():
            dtype = np.dtype(np.int64 if key == COUNTS else np.float32)
            name = f"{RECORD_KEY}[{key!r}]"
            values[key] = read_array(record[key], name, dtype, shape).copy()
            if not np.isfinite(values[key]).all():
                raise InvalidReplyError(f"{name} is not finite")
            if key in (CENTROIDS, FEATURES) and np.abs(values[key]).max() > _LARGEST_FEATURE:
                raise InvalidReplyError(
                    f"{name} has numbers above {_LARGEST_FEATURE:.0e}, which no encoder makes"
                )
        if values[COUNTS].min() < 0 or values[COUNTS].sum() <= 0 or values[VARIANCE] < 0:
            raise InvalidReplyError(f"{RECORD_KEY}: class counts and variance must not be negative")
        # They weigh the centroids, as the amount of data weighs the encoders.
        total = float(values[COUNTS].sum(dtype=np.float64))
        if total > num_examples:
            raise InvalidReplyError(
                f"{RECORD_KEY}: the class counts sum to {total:.4g}, of {num_examples:.4g} examples"
            )
        return values
