"""How to wait for a grid."""

from __future__ import annotations

from collections.abc import Callable

from flwr.serverapp import Grid

NOTICE = 2.0  # seconds of silence after which listeners are told that the run is alive

# Polling a real grid costs a round trip: back off while nothing arrives, start again when it does.
_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.25


class Pace:
    """Pauses between two looks at a grid.

    Parameters
    ----------
    grid : Grid
        One in this process can tell when something arrives (`wait`); others have to be polled.
    sleep : Callable[[float], None]
        Lets real time pass.
    """

    def __init__(self, grid: Grid, sleep: Callable[[float], None]) -> None:
        self._wait: Callable[[float], None] | None = getattr(grid, "wait", None)
        self._sleep = sleep
        self._pause = _FIRST_PAUSE

    def reset(self) -> None:
        """Note that something arrived: the next pause is short."""
        self._pause = _FIRST_PAUSE

    def rest(self, least: float = 0.0) -> None:
        """Wait a little, longer each time."""
        if least:
            self._sleep(least)
        elif self._wait is not None:
            self._wait(_LONGEST_PAUSE)
        else:
            self._sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
