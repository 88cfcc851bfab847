"""What a person sees of a run: a status line every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.server.events import Event, RunStarted, Waiting
from fedpsa_strategy.watch.rate import rate_text
from fedpsa_strategy.watch.run_state import RunState

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Limits:
    """What ends a run, whichever comes first; None: no limit.

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


class StatusLine:
    """Listener that logs a status line every few seconds.

    Parameters
    ----------
    interval : float (default: 5.0)
        Seconds between two status lines.
    virtual : bool (default: False)
        Whether the run's time is virtual.
    limits : Limits (default: no limits)
        What ends the run, for the time left.
    monotonic : Callable[[], float] (default: time.monotonic)
        Real time.

    Attributes
    ----------
    run : RunState
        What the events add up to.
    """

    def __init__(
        self,
        interval: float = 5.0,
        virtual: bool = False,
        limits: Limits | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = interval
        self.virtual = virtual
        self.limits = limits or Limits()
        self.monotonic = monotonic
        self.run = RunState()
        self._started = monotonic()
        self._last_line = self._started

    @property
    def seconds(self) -> float:
        """Real seconds since the first message to a client."""
        return self.monotonic() - self._started

    @property
    def uploads_per_second(self) -> float | None:
        """Accepted uploads per real second, since the first message."""
        seconds, start = self.seconds, self.run.start
        earlier = 0 if start is None else start.uploads
        return (self.run.uploads - earlier) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Real seconds to the nearest limit, at the pace of this process; None if not known."""
        seconds, limits, run = self.seconds, self.limits, self.run
        left = [] if limits.seconds is None else [limits.seconds - seconds]
        # Where the run stood when this process took it up.
        version, moment = (0, 0.0) if run.start is None else (run.start.version, run.start.time)
        for limit, now, earlier in (
            (limits.versions, run.version, version),
            (limits.time, run.time, moment),
        ):
            if limit is not None and now > earlier:
                left.append(seconds * (limit - now) / (now - earlier))
        return max(min(left), 0.0) if left else None

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        self.run(event)
        if isinstance(event, RunStarted):
            self._started = self.monotonic()
            log.info(
                "%d clients, %d kept busy, %s parameters",
                event.num_clients,
                event.max_in_flight,
                f"{event.num_parameters:,}",
            )
        if self.monotonic() - self._last_line < self.interval:
            return
        self._last_line = self.monotonic()
        if isinstance(event, Waiting) and not self.run.uploads:
            log.info("waiting: %s", event.reason)
        else:
            log.info("%s", self.line())

    def replay(self, events: Iterable[Event]) -> None:
        """Take note of what happened before an interruption, without logging it."""
        for event in events:
            self.run(event)

    def line(self) -> str:
        """Return the status line."""
        run = self.run
        left = "?" if self.seconds_left is None else _duration(self.seconds_left)
        moment = f"day {run.time / DAY:.3f}" if self.virtual else _duration(run.time)
        parts = [
            moment,
            f"version {run.version}",
            f"uploads {run.uploads}",
            self._result(),
            f"temp {_number(run.temperature)}",
            f"κ {_number(run.recent_kappa)}",
            f"staleness {_number(run.recent_staleness)}",
            f"rejected {run.rejected}",
            rate_text(self.uploads_per_second),
            f"{left} left",
        ]
        return " | ".join(parts)

    def _result(self) -> str:
        accuracy, loss = self.run.accuracy, self.run.loss
        if accuracy is None and loss is not None:  # regression has no accuracy
            return f"loss {loss:.3g}"
        return f"accuracy {_percent(accuracy)}"


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
