"""What a person sees of a run: a status line every few seconds, and the numbers behind it."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from fedpsa_strategy.server.events import (
    Aggregated,
    Dispatched,
    Evaluated,
    Event,
    Quarantined,
    Rejected,
    RunEnded,
    RunStarted,
    Uploaded,
    Waiting,
)

log = logging.getLogger("flwr")

DAY = 86_400
_RECENT = 50  # uploads that the means of the status line cover


@dataclass(frozen=True)
class Limits:
    """What ends a run, whichever comes first; None: no such limit.

    Parameters
    ----------
    versions : int | None (default: None)
        The version.
    time : float | None (default: None)
        The run's own time.
    seconds : float | None (default: None)
        Real seconds since this process took the run up.
    """

    versions: int | None = None
    time: float | None = None
    seconds: float | None = None


class Progress:
    """Listener that keeps count and logs a status line every few seconds.

    Parameters
    ----------
    interval : float
        Seconds between two status lines.
    virtual : bool
        Whether the run's time is virtual.
    limits : Limits (default: no limits)
        What ends the run, for the time left.
    monotonic : Callable[[], float] (default: time.monotonic)
        Real time.
    """

    def __init__(
        self,
        interval: float,
        virtual: bool,
        limits: Limits | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = interval
        self.virtual = virtual
        self.limits = limits or Limits()
        self.monotonic = monotonic
        self.time = 0.0
        self.version = 0
        self.uploads = 0
        self.rejected = 0
        self.quarantines = 0
        self.accuracy: float | None = None
        self.loss: float | None = None
        self.best_accuracy: float | None = None
        self.curve: list[tuple[float, float]] = []  # (time, accuracy)
        self.losses: list[tuple[float, float]] = []  # (time, loss)
        self.temperature: float | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        self.server_seconds: float | None = None
        self.end_reason: str | None = None
        self._kappas: deque[float] = deque(maxlen=_RECENT)
        self._staleness: deque[int] = deque(maxlen=_RECENT)
        self._sums: dict[str, tuple[float, int]] = {}
        self._started = monotonic()
        self._last_line = self._started
        # Where the run stood when this process took it up.
        self._earlier_uploads = self._earlier_versions = 0
        self._earlier_time = 0.0

    @property
    def seconds(self) -> float:
        """Real seconds since the first message to a client."""
        return self.monotonic() - self._started

    @property
    def uploads_per_second(self) -> float | None:
        """Accepted uploads per real second, since the first message."""
        seconds = self.seconds
        return (self.uploads - self._earlier_uploads) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Real seconds to the nearest limit, at the pace of this process; None if not known."""
        seconds, limits = self.seconds, self.limits
        left = [] if limits.seconds is None else [limits.seconds - seconds]
        for limit, now, earlier in (
            (limits.versions, self.version, self._earlier_versions),
            (limits.time, self.time, self._earlier_time),
        ):
            if limit is not None and now > earlier:
                left.append(seconds * (limit - now) / (now - earlier))
        return max(min(left), 0.0) if left else None

    def mean(self, name: str) -> float | None:
        """Return the mean over the whole run of what uploads and versions tell.

        Parameters
        ----------
        name : str
            `kappa`, `staleness`, `effective_number`, `train-seconds` or `sensitivity-seconds`.
        """
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count else None

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        self.time = event.time
        match event:
            case RunStarted():
                # What a checkpoint says counts, whatever became of the events before it.
                self.version, self.uploads = event.version, event.uploads
                self.rejected = event.rejected
                self._earlier_versions, self._earlier_uploads = event.version, event.uploads
                self._earlier_time = event.time
                self._started = self.monotonic()
                log.info(
                    "%d clients, %d kept busy, %s parameters",
                    event.num_clients,
                    event.max_in_flight,
                    f"{event.num_parameters:,}",
                )
            case Dispatched():
                self.bytes_down += event.num_bytes
            case Uploaded():
                self._take_upload(event)
            case Rejected():
                self.rejected += 1
            case Quarantined():
                self.quarantines += 1
            case Aggregated():
                self.version = event.version
                if (number := event.report.get("effective_number")) is not None:
                    self._add("effective_number", number)
            case Evaluated(where="server"):
                self._take_evaluation(event)
            case RunEnded():
                self.end_reason = event.reason
                self.server_seconds = event.server_seconds
        if self.monotonic() - self._last_line < self.interval:
            return
        self._last_line = self.monotonic()
        if isinstance(event, Waiting) and not self.uploads:
            log.info("waiting: %s", event.reason)
        else:
            log.info("%s", self.line())

    def replay(self, events: Iterable[Event]) -> None:
        """Take note of what happened before an interruption, without a word about it."""
        interval, self.interval = self.interval, math.inf
        for event in events:
            self(event)
        self.interval = interval

    def line(self) -> str:
        """Return the status line."""
        rate = self.uploads_per_second or 0.0
        left = "?" if self.seconds_left is None else _duration(self.seconds_left)
        moment = f"day {self.time / DAY:.3f}" if self.virtual else _duration(self.time)
        parts = [
            moment,
            f"version {self.version}",
            f"uploads {self.uploads}",
            self._result(),
            f"temp {_number(self.temperature)}",
            f"κ {_number(fmean(self._kappas) if self._kappas else None)}",
            f"staleness {_number(fmean(self._staleness) if self._staleness else None)}",
            f"rejected {self.rejected}",
            f"{rate:.1f} uploads/s",
            f"{left} left",
        ]
        return " | ".join(parts)

    def _result(self) -> str:
        if self.accuracy is None and self.loss is not None:  # regression has no accuracy
            return f"loss {self.loss:.3g}"
        return f"accuracy {_percent(self.accuracy)}"

    def _take_upload(self, event: Uploaded) -> None:
        self.uploads += 1
        self.bytes_up += event.num_bytes
        self._staleness.append(event.staleness)
        self._add("staleness", event.staleness)
        if (kappa := event.report.get("kappa")) is not None:
            self._kappas.append(kappa)
            self._add("kappa", kappa)
        for name in ("train-seconds", "sensitivity-seconds"):
            if isinstance(seconds := event.metrics.get(name), int | float):
                self._add(name, seconds)
        self.temperature = event.report.get("temperature", self.temperature)

    def _take_evaluation(self, event: Evaluated) -> None:
        accuracy: Any = event.metrics.get("accuracy")
        loss: Any = event.metrics.get("loss")
        self.loss = loss
        if isinstance(loss, float):
            self.losses.append((event.time, loss))
        if isinstance(accuracy, float):
            self.accuracy = accuracy
            self.best_accuracy = max(accuracy, self.best_accuracy or 0.0)
            self.curve.append((event.time, accuracy))

    def _add(self, name: str, value: Any) -> None:
        if not isinstance(value, int | float):
            return
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)


def area_under_curve(curve: list[tuple[float, float]]) -> float | None:
    """Return the area under (time, accuracy) by the trapezoidal rule, in units of the time."""
    if len(curve) < 2:
        return None
    return sum((t2 - t1) * (a1 + a2) / 2 for (t1, a1), (t2, a2) in pairwise(curve))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h"
