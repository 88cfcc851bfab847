"""FedPAC as a Flower strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.errors import InvalidReplyError
from fedpsa_strategy.methods.base import Vector
from fedpsa_strategy.methods.fedpac import (
    CENTROIDS,
    COUNTS,
    FEATURES,
    VARIANCE,
    FedPACMethod,
    FedPACRule,
)
from fedpsa_strategy.server.strategy import AsyncStrategy, Task
from fedpsa_strategy.wire.layout import States, read_array
from fedpsa_strategy.wire.replies import TrainReply

RECORD_KEY = "fedpac"
KNOWN = "known"


class FedPAC(AsyncStrategy):
    """Personalised, synchronous: shared encoder, own heads (`fedpsa_strategy.methods.fedpac`).

    A train message carries the encoder with the client's own head, and the global centroids in the
    record `fedpac`; the reply's record of that name carries what the rule needs. The client's half
    is selected by `method='fedpac'` in the train config.

    Parameters
    ----------
    head_keys : Sequence[str]
        Keys of the head's arrays, the last trainable ones (weight and bias of a linear layer).
    num_classes : int
        Number of classes.
    num_features : int
        Length of the encoder's output.
    method : FedPACMethod (default: None)
        The method; None makes one from the keyword arguments that are its settings.
    **kwargs : Any
        Settings of `FedPACMethod` (`alignment`, `head_lr`, `head_epochs`), and arguments of
        `AsyncStrategy`.
    """

    def __init__(
        self,
        *,
        head_keys: Sequence[str],
        num_classes: int,
        num_features: int,
        method: FedPACMethod | None = None,
        **kwargs: Any,
    ) -> None:
        check_range("num_classes", num_classes, least=1)
        check_range("num_features", num_features, least=1)
        if method is None:
            own = {item.name for item in fields(FedPACMethod)} & kwargs.keys()
            method = FedPACMethod(**{name: kwargs.pop(name) for name in own})
        self.method = method
        self._fedpac = FedPACRule(self.method)
        super().__init__(rule=self._fedpac, **kwargs)
        self.head_keys = list(head_keys)
        self.num_classes = num_classes
        self.num_features = num_features

    def begin(self, arrays: ArrayRecord, node_ids: Iterable[int] = ()) -> None:
        """Set up a new run; refuses a model without an encoder and a head."""
        super().begin(arrays, node_ids)
        layout = self.state.layout
        self._fedpac.head = layout.span(self.head_keys)
        if self._fedpac.head.start == 0:
            raise ValueError(
                f"FedPAC needs a model with an encoder before its head, but {self.head_keys} are "
                "all of its trainable arrays"
            )

    def personal_heads(self) -> dict[int, tuple[dict[str, np.ndarray[Any, Any]], Any]]:
        """Return every known client's own head (by key) and its class counts."""
        layout, rule = self.state.layout, self._fedpac
        model = rule.model.copy()
        found = {}
        for client, head in rule.heads.items():
            model[rule.head] = head
            arrays = {key: layout.view(model, key).copy() for key in self.head_keys}
            found[client] = (arrays, rule.counts[client])
        return found

    def task_config(self, task: Task, config: ConfigRecord) -> ConfigRecord:
        """Return the config of a train message, with what selects the client's half."""
        record = super().task_config(task, config)
        record.update(self.method.client_config())
        return record

    def task_records(
        self,
        task: Task,
        arrays: ArrayRecord,  # noqa: ARG002
        config: ConfigRecord,
    ) -> dict[str, ArrayRecord | MetricRecord | ConfigRecord]:
        """Return the records of a train message: the client's own head, and the centroids."""
        rule = self._fedpac
        personal = self.state.layout.write(*self.start_of(task))
        records = super().task_records(task, personal, config)
        shape = (self.num_classes, self.num_features)
        centroids = np.zeros(shape, np.float32) if rule.centroids is None else rule.centroids
        known = np.zeros(self.num_classes, bool) if rule.known is None else rule.known
        records[RECORD_KEY] = ArrayRecord(
            {CENTROIDS: Array(centroids), KNOWN: Array(known.astype(np.int64))}
        )
        return records

    def start_of(self, task: Task) -> tuple[Vector, States]:
        """Return the encoder with the client's own head, which changes between rounds alone."""
        shared, states = super().start_of(task)
        model = shared.copy()
        model[self._fedpac.head] = self._fedpac.head_of(task.client)
        return model, states

    def read_reply(self, task: Task, reply: Message) -> TrainReply:
        """Check a reply, its statistics included; raises InvalidReplyError."""
        checked = super().read_reply(task, reply)
        return replace(checked, extra=self._read_statistics(reply))

    def _read_statistics(self, reply: Message) -> dict[str, Any]:
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
        if values[COUNTS].min() < 0 or values[COUNTS].sum() <= 0 or values[VARIANCE] < 0:
            raise InvalidReplyError(f"{RECORD_KEY}: class counts and variance must not be negative")
        return values
