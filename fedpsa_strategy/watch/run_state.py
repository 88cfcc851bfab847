"""What a run's events add up to: the one reducer behind status line, live page and tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from fedpsa_strategy.server.events import (
    Aggregated,
    Dispatched,
    Evaluated,
    Event,
    NodeJoined,
    NodeLeft,
    Quarantined,
    Rejected,
    RunEnded,
    RunStarted,
    Uploaded,
    Waiting,
)
from fedpsa_strategy.watch.scalars import finite, numbers_of

Curve = list[tuple[float, float]]
"""Times and values."""

RECENT = 300
"""The last uploads that are kept."""

_MEAN_OVER = 50  # uploads that recent means cover

_PRIVACY = ("epsilon", "delta", "epsilon_bound", "participations")

# These come before a run starts or is resumed, which may be the next day.
_BEFORE_START = (Waiting, NodeJoined, NodeLeft, RunStarted)


class RunState:
    """Listener that adds up events; it prints, writes and decides nothing.

    Attributes
    ----------
    time : float
        The run's own time.
    elapsed : float
        Real seconds since the start, without the pauses of a resumed run; 0 without wall times.
    wall : float | None
        When the last event was, in real time.
    start : RunStarted | None
        How it began, or was resumed last.
    waiting, end_reason : str | None
        What it waits for, and why it ended.
    version, uploads, rejected, quarantines, tasks, bytes_up, bytes_down : int
        Counts of the whole run.
    uploads_seen : int
        Uploads among the events; the first part of a resumed run may be elsewhere.
    accuracy, best_accuracy, loss : float | None
        What the server's evaluations say.
    curve, losses : Curve
        Accuracies and losses of the server's evaluations.
    metrics : dict[str, float]
        Other numbers of its last one.
    temperature, effective_number, server_seconds : float | None
        The newest of each.
    privacy : dict[str, float]
        With differential privacy: `epsilon` and `delta` so far, `epsilon_bound`, `participations`.
    recent : deque[Uploaded]
        The last uploads.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.elapsed = 0.0
        self.wall: float | None = None
        self.start: RunStarted | None = None
        self.waiting: str | None = None
        self.end_reason: str | None = None
        self.version = self.uploads = self.rejected = self.quarantines = self.tasks = 0
        self.bytes_up = self.bytes_down = 0
        self.uploads_seen = 0
        self.accuracy: float | None = None
        self.best_accuracy: float | None = None
        self.metrics: dict[str, float] = {}
        self.loss: float | None = None
        self.curve: Curve = []
        self.losses: Curve = []
        self.temperature: float | None = None
        self.effective_number: float | None = None
        self.server_seconds: float | None = None
        self.privacy: dict[str, float] = {}
        self.recent: deque[Uploaded] = deque(maxlen=RECENT)
        self._wall_zero: float | None = None
        self._sums: dict[str, tuple[float, int]] = {}

    def __call__(self, event: Event, wall: float | None = None) -> None:
        """Take note of an event, and of when it was in real time."""
        self.time = event.time
        if wall is not None:
            self.wall = wall
            if self._wall_zero is not None and not isinstance(event, _BEFORE_START):
                self.elapsed = max(self.elapsed, wall - self._wall_zero)
        numbers = numbers_of(event)
        match event:
            case RunStarted():
                self._begin(event)
            case Waiting():
                self.waiting = event.reason
            case Dispatched():
                self.tasks += 1
                self.bytes_down += event.num_bytes
            case Uploaded():
                self._take_upload(event, numbers)
            case Rejected():
                self.rejected += 1
            case Quarantined():
                self.quarantines += 1
            case Aggregated():
                self.version, self.uploads = event.version, event.uploads
                self.effective_number = numbers.get("effective_number")
                self._add(numbers)
                self._take_privacy(event)
            case Evaluated(where="server"):
                self._take_evaluation(event, numbers)
            case RunEnded():
                self.end_reason = event.reason
                self.server_seconds = event.server_seconds

    @property
    def uploads_per_second(self) -> float | None:
        """Accepted uploads per real second; None without wall times."""
        return self.uploads_seen / self.elapsed if self.elapsed > 0 else None

    @property
    def recent_kappa(self) -> float | None:
        """The mean κ of the last uploads."""
        return _mean([finite(upload.report.get("kappa")) for upload in self._last()])

    @property
    def recent_staleness(self) -> float | None:
        """The mean staleness of the last uploads."""
        return _mean([upload.staleness for upload in self._last()])

    def points(self, unit: float = 1.0) -> tuple[str, Curve]:
        """Return what was measured, "accuracy" or else "loss", and the curve over units of time."""
        name, curve = "accuracy", self.curve
        if self.losses and not curve:  # regression has no accuracy
            name, curve = "loss", self.losses
        return name, [(time / unit, value) for time, value in curve]

    def mean(self, name: str) -> float | None:
        """Return the mean over the whole run of what uploads and versions tell.

        Parameters
        ----------
        name : str
            `kappa`, `staleness`, `effective_number`, `train-seconds` or `sensitivity-seconds`.
        """
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count else None

    def numbers(self, unit: float = 1.0) -> dict[str, Any]:
        """Return what a summary says of a run; its area is over time in multiples of `unit`."""
        area = area_under_curve(self.curve)
        return {
            "end_reason": self.end_reason,
            "accuracy": self.accuracy,
            "best_accuracy": self.best_accuracy,
            "loss": self.loss,
            "area_under_curve": None if area is None else area / unit,
            "versions": self.version,
            "uploads": self.uploads,
            "rejected": self.rejected,
            "quarantines": self.quarantines,
            "time": self.time,
            "seconds": self.elapsed,
            "uploads_per_second": self.uploads_per_second,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "server_seconds": self.server_seconds,
            "mean_train_seconds": self.mean("train-seconds"),
            "mean_sensitivity_seconds": self.mean("sensitivity-seconds"),
            "mean_kappa": self.mean("kappa"),
            "mean_staleness": self.mean("staleness"),
            "mean_effective_number": self.mean("effective_number"),
            **({"metrics": self.metrics} if self.metrics else {}),
        } | ({"privacy": self.privacy} if self.privacy else {})

    def _begin(self, event: RunStarted) -> None:
        # What a checkpoint says counts, even if events before it were lost; and what came
        # after it will happen again.
        self.start = event
        self.version, self.uploads, self.rejected = event.version, event.uploads, event.rejected
        self.curve = [point for point in self.curve if point[0] <= event.time]
        self.losses = [point for point in self.losses if point[0] <= event.time]
        self.end_reason = None
        self._wall_zero = None if self.wall is None else self.wall - self.elapsed

    def _take_upload(self, event: Uploaded, numbers: Mapping[str, float]) -> None:
        self.waiting = None
        self.uploads += 1
        self.uploads_seen += 1
        self.bytes_up += event.num_bytes
        self.recent.append(event)
        self._add(numbers)
        if "temperature" in event.report:
            self.temperature = numbers.get("temperature")

    def _take_privacy(self, event: Aggregated) -> None:
        found = {name: finite(event.report.get(name)) for name in _PRIVACY}
        numbers = {name: value for name, value in found.items() if value is not None}
        if len(numbers) == len(_PRIVACY):
            self.privacy = numbers

    def _take_evaluation(self, event: Evaluated, numbers: Mapping[str, float]) -> None:
        others = {name: finite(value) for name, value in event.metrics.items()}
        self.metrics = {
            name: value
            for name, value in others.items()
            if value is not None and name not in ("loss", "accuracy")
        }
        self.loss = numbers.get("loss")
        if self.loss is not None:
            self.losses.append((event.time, self.loss))
        if "accuracy" in event.metrics:
            self.accuracy = numbers.get("accuracy")
            if self.accuracy is not None:
                self.best_accuracy = max(self.accuracy, self.best_accuracy or 0.0)
                self.curve.append((event.time, self.accuracy))

    def _add(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + number, count + 1)

    def _last(self) -> list[Uploaded]:
        return list(self.recent)[-_MEAN_OVER:]


def area_under_curve(curve: Curve) -> float | None:
    """Return the area under (time, accuracy) by the trapezoidal rule, in units of the time."""
    if len(curve) < 2:
        return None
    return sum((t2 - t1) * (a1 + a2) / 2 for (t1, a1), (t2, a2) in pairwise(curve))


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
