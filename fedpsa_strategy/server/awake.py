"""Real time in which this process can act."""

from __future__ import annotations

import math
from collections.abc import Callable

_LONGEST = 20.0  # seconds between two looks that count


class AwakeTime:
    """Counts real seconds, but hardly any while the process is stopped or the machine asleep.

    It has to be asked often: of a longer time between two looks only a part counts.

    Parameters
    ----------
    monotonic : Callable[[], float]
        Real time; on some systems it stands still while the machine is asleep.
    wall : Callable[[], float]
        The time of day, which does not.

    Attributes
    ----------
    woke : float
        When the last such pause ended; -inf before the first one.
    """

    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._last = (monotonic(), wall())
        self._now = 0.0
        self.woke = -math.inf

    def __call__(self) -> float:
        """Return the seconds since the beginning."""
        before, self._last = self._last, (self._monotonic(), self._wall())
        passed, by_day = (now - then for now, then in zip(self._last, before, strict=True))
        self._now += min(passed, _LONGEST)
        if max(passed, by_day) > _LONGEST:
            self.woke = self._now
        return self._now
