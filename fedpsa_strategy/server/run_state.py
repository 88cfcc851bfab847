"""Where a run stands: the data that dispatch, collection and application share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Result

from fedpsa_strategy.methods.base import Rule, Vector
from fedpsa_strategy.server.clients import Clients
from fedpsa_strategy.server.clock import Clock
from fedpsa_strategy.server.events import Event, Listener
from fedpsa_strategy.wire.layout import Layout, States
from fedpsa_strategy.wire.replies import squared_norm

_MOST_REASONS = 64  # different ones that are counted: clients may write what they like


@dataclass(eq=False)
class Model:
    """A model: its trainable parameters as a vector, and its states."""

    vector: Vector
    states: States

    @cached_property
    def norm(self) -> float:
        """||w||."""
        return math.sqrt(squared_norm(self.vector))


@dataclass
class Task:
    """One train message on its way: all that is needed to send it again, or to judge its reply.

    Parameters
    ----------
    sequence : int
        Number of the task in the run.
    client : int
        Index of the client.
    node_id : int
        Its node.
    version, uploads : int
        How far the run was when the task was made.
    due : float or None
        When the reply takes effect; None: when it arrives.
    start : Model
        What the client starts from, as its message says. Tasks that start from the same model
        share it; one that starts from its own holds the only copy.
    message_id : str (default: "")
        Id of the message, once it is sent.
    made : float (default: 0.0)
        When it was made; sending it again does not change that.
    """

    sequence: int
    client: int
    node_id: int
    version: int
    uploads: int
    due: float | None
    start: Model = field(repr=False)
    message_id: str = ""
    made: float = 0.0

    @property
    def about(self) -> dict[str, Any]:
        """What events say of it."""
        return {
            "sequence": self.sequence,
            "client": self.client,
            "node_id": self.node_id,
            "version": self.version,
        }


@dataclass
class RunState:
    """Where a run stands.

    Parameters
    ----------
    rule : Rule
        The aggregation rule.
    clock : Clock
        The run's time.
    listeners : Sequence[Listener]
        Told of every event.
    layout : Layout
        How a model lies in a vector.
    clients : Clients
        Who takes part.
    model : Model
        The current version.
    arrays : ArrayRecord
        The same as a record.
    sent : Model
        The current version as the record says: another object than `model` only where an array's
        number format is narrower than the vector's.
    result : Result
        Flower's result so far: metrics by version; the final arrays when the run has ended.
    """

    rule: Rule
    clock: Clock
    listeners: Sequence[Listener]
    layout: Layout
    clients: Clients
    model: Model
    arrays: ArrayRecord
    sent: Model
    result: Result
    version: int = 0
    published: int = 0  # the last version that all callbacks have been shown
    uploads: int = 0
    rejected: int = 0
    rejected_in_a_row: int = 0
    sequence: int = 0
    in_flight: dict[str, Task] = field(default_factory=dict)  # by message id
    prepared: dict[int, tuple[Task, Message]] = field(default_factory=dict)  # by node id
    upload_states: list[States] = field(default_factory=list)  # of the last uploads
    reasons: Counter[str] = field(default_factory=Counter)
    round_metrics: list[RecordDict] = field(default_factory=list)
    accuracy: float | None = None  # of the last evaluation by the server
    server_seconds: float = 0.0  # real time spent on aggregation, before an interruption too
    # False during a change that must not be saved half done; an exception then leaves it False.
    # What a grid does is always outside of such changes: there a run waits, and learns of its end.
    whole: bool = True

    def emit(self, event: Event) -> None:
        """Hand an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def set_model(self, vector: Vector, states: States) -> None:
        """Take over a new global model."""
        self.model = Model(vector, states)
        self.arrays = self.layout.write(vector, states)
        self.sent = self.model if self.layout.exact else Model(*self.layout.read(self.arrays))

    def record_of(self, start: Model) -> ArrayRecord:
        """Return the record of a model that a task starts from."""
        if start is self.sent:
            return self.arrays
        return self.layout.write(start.vector, start.states)

    def count_reason(self, reason: str) -> None:
        """Count a reason for a rejection; of too many different ones, the rarest is forgotten."""
        self.reasons[reason] += 1
        if len(self.reasons) > _MOST_REASONS:
            del self.reasons[min(self.reasons, key=self.reasons.__getitem__)]


def new_run(
    rule: Rule,
    clock: Clock,
    listeners: Sequence[Listener],
    arrays: ArrayRecord,
    layout: Layout,
    clients: Clients,
) -> RunState:
    """Return the state of a run that begins with `arrays`."""
    model = Model(*layout.read(arrays))
    rule.start(model.vector)
    result = Result(arrays=arrays)
    return RunState(rule, clock, listeners, layout, clients, model, arrays, model, result)
