"""What a run's events add up to, in memory that does not grow with the run."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from fedpsa_strategy.server.events import (
    KINDS,
    Aggregated,
    Dispatched,
    Evaluated,
    Event,
    NodeJoined,
    NodeLeft,
    Overdue,
    Quarantined,
    Rejected,
    Resent,
    RunStarted,
    Uploaded,
    event_from_dict,
)
from fedpsa_strategy.watch.dashboard.series import Series, short
from fedpsa_strategy.watch.event_log import parse_line
from fedpsa_strategy.watch.run_state import RunState
from fedpsa_strategy.watch.scalars import finite, numbers_of

_BUFFERS, _REJECTIONS = 30, 50  # the last ones are shown
_REASONS, _TEXT = 100, 300  # different reasons told apart, and characters shown of each
_WEIGHTS, _CLIENTS, _BARS = 64, 600, 64
# Curves and their points; those that jump with every upload are averaged more.
_CURVES = {"staleness": 100, "kappa": 100} | dict.fromkeys(
    ("temperature", "effective_number", "accuracy", "loss", "client_accuracy"), 400
)

_START = ("num_clients", "max_in_flight", "num_parameters", "version")
_TOTALS = (
    "accuracy",
    "best_accuracy",
    "loss",
    "temperature",
    "effective_number",
    "version",
    "uploads",
    "rejected",
    "quarantines",
    "tasks",
    "bytes_up",
    "bytes_down",
    "uploads_per_second",
    "privacy",
)

_ClientEvent = (
    NodeJoined | NodeLeft | Dispatched | Resent | Overdue | Uploaded | Rejected | Quarantined
)


@dataclass
class Client:
    """What is known of a client; its node id is text, as JavaScript has no 64-bit integers."""

    node_id: str
    host: str = ""
    online: bool = True
    task: tuple[float, int] | None = None  # when it was given, and on which version
    overdue: bool = False  # its slot went to another one
    buffered: bool = False
    failures: int = 0
    reason: str = ""  # of its last rejection
    paused_until: float = -math.inf

    def state(self, now: float) -> str:
        """Return the one word that matters most."""
        if not self.online:
            return "offline"
        if self.paused_until > now:
            return "paused"
        if self.task and self.overdue:
            return "overdue"
        return "busy" if self.task else "buffered" if self.buffered else "idle"


class PageState:
    """Takes the lines of `events.jsonl` and answers what the page shows."""

    def __init__(self) -> None:
        self.run = RunState()  # the numbers, which the status line of a run shows too
        self.damaged = 0  # lines that are no events
        self.series: dict[str, Series] = {}  # curves
        self.clients: dict[int, Client] = {}
        self._interrupted: dict[int, tuple[float, int] | None] = {}  # tasks before the last start
        self._staleness: Counter[int] = Counter()
        self._buffer: list[Uploaded] = []
        self._buffers: deque[dict[str, Any]] = deque(maxlen=_BUFFERS)
        self._reasons: Counter[str] = Counter()
        self._rejections: deque[dict[str, Any]] = deque(maxlen=_REJECTIONS)

    def take(self, line: bytes) -> None:
        """Take note of an event; a line that is none is counted, not fatal."""
        if not line.strip():
            return
        try:
            values = parse_line(line)
            if values["event"] not in KINDS:
                return  # kinds of newer versions are none of our business
            event, wall = event_from_dict(values), values.get("wall")
            _check(event, wall)
        except (ValueError, TypeError, OverflowError):
            self.damaged += 1
        else:
            self._take(event, wall)

    def _take(self, event: Event, wall: float | None) -> None:
        """Add up what only the page shows; the rest is the reducer's."""
        if isinstance(event, RunStarted):
            self._begin(event)
        self.run(event, wall)
        self._draw(event)
        match event:
            case NodeJoined():
                client = self._client(event)
                client.online, client.host = True, _text(event.host)
            case NodeLeft():
                self._client(event).online = False
            case Dispatched():
                client = self._client(event)
                client.task, client.overdue = (event.time, event.version), False
            case Overdue():
                self._client(event).overdue = True
            case Resent():
                task, before = (event.time, event.version), self._interrupted.get(event.client)
                self._client(event).task = before if before and before[1] == task[1] else task
            case Uploaded():
                self._take_upload(event)
            case Rejected():
                self._take_rejection(event)
            case Quarantined():
                client = self._client(event)
                client.failures, client.paused_until = event.failures, event.until
            case Aggregated():
                self._take_version(event)

    def _begin(self, event: RunStarted) -> None:
        """Begin, or resume from a checkpoint: what came after it will happen again."""
        # A resumed run cuts its file at the checkpoint; else what is in the buffer is not known.
        whole = self.run.uploads == event.uploads
        self._buffer = self._buffer if whole else []
        self._interrupted = {index: client.task for index, client in self.clients.items()}
        for client in self.clients.values():
            client.task, client.overdue = None, False
            client.buffered = whole and client.buffered
        for series in self.series.values():
            series.rewind(event.time)

    def _take_upload(self, event: Uploaded) -> None:
        client = self._client(event)
        client.task, client.buffered, client.failures = None, True, 0
        self._staleness[max(event.staleness, 0)] += 1
        self._buffer.append(event)

    def _take_rejection(self, event: Rejected) -> None:
        reason = _text(event.reason)
        host = ""
        if event.client >= 0:  # -1: a reply that belongs to no task
            client = self._client(event)
            client.task, client.reason = None, reason
            host = client.host
        told_apart = reason in self._reasons or len(self._reasons) < _REASONS
        self._reasons[reason if told_apart else "other reasons"] += 1
        rejection = {"time": event.time, "client": event.client, "node_id": str(event.node_id)}
        self._rejections.append(rejection | {"reason": reason, "host": host})

    def _take_version(self, event: Aggregated) -> None:
        members, self._buffer = self._buffer, []
        for upload in members:
            self.clients[upload.client].buffered = False
        weights = [short(weight) for weight in event.report.get("weights", [])]
        if weights:
            seen = len(members) == len(weights)  # else a resumed run: the first ones were not
            shown = members[:_WEIGHTS] if seen else [None] * len(weights[:_WEIGHTS])
            buffer: dict[str, Any] = {"version": event.version, "time": event.time}
            buffer |= {"size": len(weights), "effective_number": self.run.effective_number}
            buffer["weights"] = weights[:_WEIGHTS]
            buffer["clients"] = [upload and upload.client for upload in shown]
            buffer["kappas"] = [upload and finite(upload.report.get("kappa")) for upload in shown]
            self._buffers.append(buffer)

    def _client(self, event: _ClientEvent) -> Client:
        client = self.clients.setdefault(event.client, Client(""))
        if client.node_id != str(event.node_id):  # a client that comes back has another one
            client.node_id, client.host = str(event.node_id), ""
        return client

    def _draw(self, event: Event) -> None:
        """Add what an event tells in numbers to the curves."""
        before = "client_" if isinstance(event, Evaluated) and event.where != "server" else ""
        for name, number in numbers_of(event).items():
            if (curve := before + name) in _CURVES:
                series = self.series.setdefault(curve, Series(_CURVES[curve]))
                series.add(self.run.time, self.run.elapsed, self.run.uploads, number)

    # --- What the page gets ----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return everything the page shows, as plain values and of bounded size."""
        run = self.run
        start = None if run.start is None else {n: getattr(run.start, n) for n in _START}
        totals = {name: getattr(run, name) for name in _TOTALS}
        totals |= {"kappa": run.recent_kappa, "staleness": run.recent_staleness}
        return {
            "time": run.time,
            "elapsed": run.elapsed if run.wall is not None else None,
            "start": start,
            "waiting": run.waiting and _text(run.waiting),
            "end_reason": run.end_reason and _text(run.end_reason),
            "damaged": self.damaged,
            "totals": totals,
            "series": {name: series.rows() for name, series in self.series.items()},
            "staleness": self._histogram(),
            "uploads": [_upload_row(upload) for upload in run.recent],
            "buffers": list(self._buffers),
            "clients": self._client_rows(),
            "reasons": self._reasons.most_common(20),
            "rejections": list(self._rejections)[::-1],
        }

    def _histogram(self) -> dict[str, Any]:
        """Return counts of staleness, in bars as wide as a power of two that makes few of them."""
        greatest, width = max(self._staleness, default=-1), 1
        while greatest >= width * _BARS:
            width *= 2
        counts = [0] * (greatest // width + 1)
        for value, count in self._staleness.items():
            counts[value // width] += count
        return {"width": width, "counts": counts}

    def _client_rows(self) -> dict[str, Any]:
        states = {index: client.state(self.run.time) for index, client in self.clients.items()}
        # Where not all fit, those that do something come first.
        ranks = {
            name: i for i, name in enumerate(("overdue", "busy", "paused", "buffered", "idle"))
        }
        chosen = sorted(states, key=lambda index: (ranks.get(states[index], 9), index))[:_CLIENTS]
        rows = []
        for index in sorted(chosen):
            client, state = self.clients[index], states[index]
            row: dict[str, Any] = {"client": index, "node_id": client.node_id, "state": state}
            row["host"] = client.host
            if client.task:
                row |= {"since": client.task[0], "version": client.task[1]}
            if state == "paused":
                row |= {"until": client.paused_until, "failures": client.failures}
                row["reason"] = client.reason
            rows.append(row)
        return {"counts": Counter(states.values()), "rows": rows}


def _upload_row(upload: Uploaded) -> dict[str, Any]:
    names = ("client", "version", "staleness")
    return {
        "time": upload.time,
        "node_id": str(upload.node_id),
        **{name: getattr(upload, name) for name in names},
        "kappa": finite(upload.report.get("kappa")),
    }


def _check(event: Event, wall: Any) -> None:
    """Refuse, with a TypeError, what `event_from_dict` lets pass but cannot be added up."""
    numbers = [0.0 if wall is None else wall]
    if isinstance(event, Aggregated):
        numbers += event.report.get("weights", [])
    elif isinstance(event, Quarantined):
        numbers.append(event.until)
    if any(finite(number) is None for number in numbers):
        raise TypeError(f"{event.kind}: a value is not a number")


def _text(value: str) -> str:
    return value if len(value) <= _TEXT else value[: _TEXT - 1] + "…"
