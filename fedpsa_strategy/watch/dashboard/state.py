"""What a run's events add up to, in memory that does not grow with the run."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedpsa_strategy.watch.dashboard.series import Series, short
from fedpsa_strategy.watch.event_log import parse_line

_MEAN_OVER = 50  # recent uploads, as in the status line of a run
_UPLOADS, _BUFFERS, _REJECTIONS = 300, 30, 50  # the last ones are shown
_REASONS, _TEXT = 100, 300  # different reasons told apart, and characters shown of each
_WEIGHTS, _CLIENTS, _BARS = 64, 600, 64
_POINTS, _NOISY_POINTS = 400, 100  # of curves; those that jump with every upload are averaged more

# These come before a run starts, and before it is resumed, perhaps the next day.
_BEFORE_START = ("wait", "join", "leave", "start")


@dataclass
class Client:
    """What is known of a client; its node id is text, as JavaScript has no 64-bit integers."""

    node_id: str
    online: bool = True
    task: tuple[float, int] | None = None  # when it was given, and on which version
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
        return "busy" if self.task else "buffered" if self.buffered else "idle"


class RunState:
    """Takes the lines of `events.jsonl` and answers what the page shows."""

    def __init__(self) -> None:
        self.damaged = 0
        self.time = 0.0
        self.elapsed = 0.0  # real seconds since the start, without the pauses of a resumed run
        self.wall: float | None = None
        self.start: dict[str, int] | None = None
        self.waiting: str | None = None
        self.end_reason: str | None = None
        self.totals: dict[str, Any] = dict.fromkeys(("accuracy", "best_accuracy", "loss"))
        self.totals |= {"temperature": None, "effective_number": None}
        self.totals |= dict.fromkeys(("version", "uploads", "rejected", "quarantines"), 0)
        self.totals |= dict.fromkeys(("tasks", "bytes_up", "bytes_down"), 0)
        self.series: dict[str, Series] = {}
        self.clients: dict[int, Client] = {}
        self._wall_zero: float | None = None
        self._interrupted: dict[int, tuple[float, int] | None] = {}  # tasks before the last start
        self._num_seen = 0  # uploads in this file; the first part of a resumed run may be elsewhere
        self._staleness: Counter[int] = Counter()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_UPLOADS)
        self._buffer: list[dict[str, Any]] = []
        self._buffers: deque[dict[str, Any]] = deque(maxlen=_BUFFERS)
        self._reasons: Counter[str] = Counter()
        self._rejections: deque[dict[str, Any]] = deque(maxlen=_REJECTIONS)

    def take(self, line: bytes) -> None:
        """Take note of an event; a line that is none is counted, not fatal."""
        if not line.strip():
            return
        try:
            event = parse_line(line)
            kind, self.time = event["event"], float(event["time"])
            if "wall" in event:
                self.wall = _number(event["wall"])
                if self._wall_zero is not None and kind not in _BEFORE_START:
                    self.elapsed = max(self.elapsed, self.wall - self._wall_zero)
            handler = getattr(self, "_on_" + kind, None)
            if handler is not None:  # kinds of newer versions are none of our business
                handler(event)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            self.damaged += 1

    # --- One method per kind of event; it reads all it needs before it changes anything --------

    def _on_start(self, event: dict[str, Any]) -> None:
        """Begin, or go on from a checkpoint: what came after it will happen again."""
        names = ("num_clients", "max_in_flight", "num_parameters", "version")
        start = {name: _integer(event[name]) for name in names}
        counts = {name: _integer(event.get(name, 0)) for name in ("uploads", "rejected")}
        self.start = start
        # A resumed run cuts its file at the checkpoint; else what is in the buffer is not known.
        whole = self.totals["uploads"] == counts["uploads"]
        self.totals |= counts | {"version": start["version"]}
        self.end_reason = None
        self._wall_zero = None if self.wall is None else self.wall - self.elapsed
        self._buffer = self._buffer if whole else []
        self._interrupted = {index: client.task for index, client in self.clients.items()}
        for client in self.clients.values():
            client.task, client.buffered = None, whole and client.buffered
        for series in self.series.values():
            series.rewind(self.time)

    def _on_join(self, event: dict[str, Any]) -> None:
        self._client(event).online = True

    def _on_leave(self, event: dict[str, Any]) -> None:
        self._client(event).online = False

    def _on_wait(self, event: dict[str, Any]) -> None:
        self.waiting = _text(event["reason"])

    def _on_dispatch(self, event: dict[str, Any]) -> None:
        task, num_bytes = (self.time, _integer(event["version"])), _integer(event["num_bytes"])
        self._client(event).task = task
        self.totals["tasks"] += 1
        self.totals["bytes_down"] += num_bytes

    def _on_resend(self, event: dict[str, Any]) -> None:
        task, index = (self.time, _integer(event["version"])), _integer(event["client"])
        before = self._interrupted.get(index)
        self._client(event).task = before if before and before[1] == task[1] else task

    def _on_upload(self, event: dict[str, Any]) -> None:
        report, num_bytes = event.get("report") or {}, _integer(event["num_bytes"])
        upload: dict[str, Any] = {"time": self.time, "node_id": str(_integer(event["node_id"]))}
        upload |= {name: _integer(event[name]) for name in ("client", "version", "staleness")}
        upload["kappa"] = _optional(report.get("kappa"))
        temperature = _optional(report.get("temperature"))
        client = self._client(event)
        client.task, client.buffered, client.failures = None, True, 0
        self.waiting = None
        self._num_seen += 1
        self.totals["uploads"] += 1
        self.totals["bytes_up"] += num_bytes
        self._staleness[max(upload["staleness"], 0)] += 1
        self._recent.append(upload)
        self._buffer.append(upload)
        self._add("staleness", upload["staleness"], _NOISY_POINTS)
        self._add("kappa", upload["kappa"], _NOISY_POINTS)
        self._add("temperature", temperature)
        self.totals["temperature"] = temperature

    def _on_reject(self, event: dict[str, Any]) -> None:
        reason, client = _text(event["reason"]), _integer(event["client"])
        node_id = str(_integer(event["node_id"]))
        if client >= 0:  # -1: a reply that belongs to no task
            known = self._client(event)
            known.task, known.reason = None, reason
        self.totals["rejected"] += 1
        told_apart = reason in self._reasons or len(self._reasons) < _REASONS
        self._reasons[reason if told_apart else "other reasons"] += 1
        self._rejections.append(
            {"time": self.time, "client": client, "node_id": node_id, "reason": reason}
        )

    def _on_quarantine(self, event: dict[str, Any]) -> None:
        failures, until = _integer(event["failures"]), _number(event["until"])
        client = self._client(event)
        client.failures, client.paused_until = failures, until
        self.totals["quarantines"] += 1

    def _on_aggregate(self, event: dict[str, Any]) -> None:
        report, version = event.get("report") or {}, _integer(event["version"])
        weights = [short(_number(weight)) for weight in report.get("weights", [])]
        number = _optional(report.get("effective_number"))
        self.totals |= {"uploads": _integer(event["uploads"]), "version": version}
        self.totals["effective_number"] = number
        self._add("effective_number", number)
        members, self._buffer = self._buffer, []
        for upload in members:
            self.clients[upload["client"]].buffered = False
        if weights:
            if len(members) != len(weights):  # a resumed run: the first ones were not seen
                members = [{}] * len(weights)
            buffer: dict[str, Any] = {"version": version, "time": self.time, "size": len(weights)}
            buffer |= {"effective_number": number, "weights": weights[:_WEIGHTS]}
            buffer["clients"] = [member.get("client") for member in members[:_WEIGHTS]]
            buffer["kappas"] = [member.get("kappa") for member in members[:_WEIGHTS]]
            self._buffers.append(buffer)

    def _on_evaluate(self, event: dict[str, Any]) -> None:
        accuracy, loss = (_optional(event["metrics"].get(name)) for name in ("accuracy", "loss"))
        if event["where"] != "server":
            self._add("client_accuracy", accuracy)
            return
        self.totals |= {"accuracy": accuracy, "loss": loss}
        self._add("accuracy", accuracy)
        self._add("loss", loss)
        if accuracy is not None:
            self.totals["best_accuracy"] = max(accuracy, self.totals["best_accuracy"] or 0.0)

    def _on_end(self, event: dict[str, Any]) -> None:
        self.end_reason = _text(event["reason"])

    def _client(self, event: dict[str, Any]) -> Client:
        index, node_id = _integer(event["client"]), str(_integer(event["node_id"]))
        client = self.clients.setdefault(index, Client(node_id))
        client.node_id = node_id  # a client that comes back has another one
        return client

    def _add(self, name: str, value: float | None, limit: int = _POINTS) -> None:
        if value is not None:
            if name not in self.series:
                self.series[name] = Series(limit)
            self.series[name].add(self.time, self.elapsed, self.totals["uploads"], value)

    # --- What the page gets ----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return everything the page shows, as plain values and of bounded size."""
        recent = list(self._recent)[-_MEAN_OVER:]
        totals = self.totals | {
            "kappa": _mean(upload["kappa"] for upload in recent),
            "staleness": _mean(upload["staleness"] for upload in recent),
            "uploads_per_second": self._num_seen / self.elapsed if self.elapsed > 0 else None,
        }
        return {
            "time": self.time,
            "elapsed": self.elapsed if self.wall is not None else None,
            "start": self.start,
            "waiting": self.waiting,
            "end_reason": self.end_reason,
            "damaged": self.damaged,
            "totals": totals,
            "series": {name: series.rows() for name, series in self.series.items()},
            "staleness": self._histogram(),
            "uploads": list(self._recent),
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
        states = {index: client.state(self.time) for index, client in self.clients.items()}
        # Where not all fit, those that do something come first.
        ranks = {name: i for i, name in enumerate(("busy", "paused", "buffered", "idle"))}
        chosen = sorted(states, key=lambda index: (ranks.get(states[index], 9), index))[:_CLIENTS]
        rows = []
        for index in sorted(chosen):
            client, state = self.clients[index], states[index]
            row: dict[str, Any] = {"client": index, "node_id": client.node_id, "state": state}
            if client.task:
                row |= {"since": client.task[0], "version": client.task[1]}
            if state == "paused":
                row |= {"until": client.paused_until, "failures": client.failures}
                row["reason"] = client.reason
            rows.append(row)
        return {"counts": Counter(states.values()), "rows": rows}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"not a number: {value!r}")
    return float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"not an integer: {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    return value if len(value) <= _TEXT else value[: _TEXT - 1] + "…"


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
