"""A look at a run from outside, through the events that it writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.server.events import event_from_dict
from fedpsa_strategy.watch.event_log import parse_line
from fedpsa_strategy.watch.run_state import RunState
from fedpsa_strategy.watch.tail import Tail


class Watch:
    """What is known of a run in another process, which will take so many virtual days."""

    def __init__(
        self, events: Path, days: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.days = days
        self.started = monotonic()
        self.run = RunState()
        self._tail = Tail(events)
        self._monotonic = monotonic
        self._first: tuple[float, float, int] | None = None  # moment, day and uploads

    @property
    def day(self) -> float:
        """Virtual days that have passed."""
        return self.run.time / DAY

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        return min(self.day / self.days, 1.0) if self.days else 0.0

    @property
    def seconds(self) -> float:
        """Real seconds since the start of its process."""
        return self._monotonic() - self.started

    @property
    def uploads_per_second(self) -> float | None:
        """Uploads per real second, since the first that was seen."""
        if self._first is None or self._monotonic() <= self._first[0]:
            return None
        return (self.run.uploads - self._first[2]) / (self._monotonic() - self._first[0])

    @property
    def seconds_left(self) -> float | None:
        """How long it will still take at its pace."""
        if not self.days or self._first is None or self.day <= self._first[1]:
            return None
        pace = (self.day - self._first[1]) / (self._monotonic() - self._first[0])
        return (self.days - self.day) / pace

    def look(self) -> None:
        """Read what has happened since the last look."""
        while True:
            restarted, lines = self._tail.read()
            if restarted:  # a resumed run cuts off what came after its checkpoint
                self.run, self._first = RunState(), None
            if not lines:
                break
            for line in lines:
                # What is damaged, or of a kind that a newer version has, is passed over.
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    self.run(event_from_dict(parse_line(line)))
        if self._first is None and self.run.uploads:
            self._first = (self._monotonic(), self.day, self.run.uploads)
