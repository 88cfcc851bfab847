"""What happens in a run, as one stream of small typed events.

Progress lines, JSON files, dashboards and checkpoints subscribe to it; the loop knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Anything that happens.

    Parameters
    ----------
    time : float
        The run's clock: seconds, or virtual units.
    """

    kind: ClassVar[str]
    time: float

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain values, its kind first."""
        return {"event": self.kind, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The nodes are there; training begins, or resumes from a checkpoint."""

    kind = "start"
    num_clients: int
    max_in_flight: int
    num_parameters: int
    version: int
    uploads: int = 0
    rejected: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Event):
    """A node takes part from now on."""

    kind = "join"
    node_id: int
    client: int
    partition: int | None
    num_examples: float | None
    host: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain values, its kind first; a host only if the node told one."""
        values = super().to_dict()
        return values if self.host else {key: values[key] for key in values if key != "host"}


@dataclass(frozen=True, kw_only=True)
class NodeLeft(Event):
    """A node is gone."""

    kind = "leave"
    node_id: int
    client: int


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """Nothing arrived for a while; tells that the server is alive, and what it waits for."""

    kind = "wait"
    reason: str


@dataclass(frozen=True, kw_only=True)
class TaskEvent(Event):
    """Anything that happens to a task: its number, who has it, and the version it is about."""

    sequence: int
    client: int
    node_id: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Dispatched(TaskEvent):
    """A client was given a task."""

    kind = "dispatch"
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Resent(TaskEvent):
    """A task that was in flight when the run was interrupted was sent again."""

    kind = "resend"


@dataclass(frozen=True, kw_only=True)
class Uploaded(TaskEvent):
    """A client's update was accepted."""

    kind = "upload"
    staleness: int
    num_examples: float
    squared_norm: float
    num_bytes: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rejected(TaskEvent):
    """A reply was refused, or never came."""

    kind = "reject"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Quarantined(Event):
    """A node failed too often in a row and is left out for a while."""

    kind = "quarantine"
    client: int
    node_id: int
    failures: int
    until: float


@dataclass(frozen=True, kw_only=True)
class Overdue(TaskEvent):
    """A client takes so long that its slot went to another one; its reply still counts."""

    kind = "overdue"
    waited: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Aggregated(Event):
    """The global model has a new version."""

    kind = "aggregate"
    version: int
    uploads: int
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The global model was evaluated, by the server or on clients."""

    kind = "evaluate"
    version: int
    uploads: int
    where: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The loop is over."""

    kind = "end"
    version: int
    uploads: int
    rejected: int
    reason: str
    server_seconds: float = 0.0


Listener = Callable[[Event], None]

KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (*Event.__subclasses__(), *TaskEvent.__subclasses__())
    if kind is not TaskEvent
}
"""All kinds of events, by the names that they have in files."""


# What a field may hold when it comes back from a file; numbers that are not finite are null there.
_VALUES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float, type(None)),
    "str": str,
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "Mapping[str, Any]": dict,
}


def event_from_dict(values: Mapping[str, Any]) -> Event:
    """Return the event that `to_dict` was called on; fields it does not know are left out.

    Raises
    ------
    KeyError
        If there is no such kind of event.
    TypeError
        If a field is missing or holds something else than it should.
    """
    kind = KINDS[values["event"]]
    found = {}
    for item in fields(kind):
        if item.name in values:
            value = found[item.name] = values[item.name]
            if isinstance(value, bool) or not isinstance(value, _VALUES[str(item.type)]):
                raise TypeError(f"{kind.kind}: {item.name}={value!r} must be a {item.type}")
    return kind(**found)
