"""The end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.serverapp.strategy import Result

from fedpsa_strategy.server.options import Limits
from fedpsa_strategy.server.run_state import RunState

STOP_REQUESTED = "a stop was requested"

ShouldStop = Callable[[int, Result], bool]

_CHECK = 0.5  # seconds between two questions whether to stop


class Stop:
    """Knows when a run ends, and why.

    Parameters
    ----------
    run : RunState
        The run.
    limits : Limits
        What ends it.
    num_versions : int
        Versions to make.
    monotonic : Callable[[], float]
        Real time.
    should_stop : Callable[[int, Result], bool] (default: None)
        Asked after each version.
    ends : Sequence[Callable[[], str | None]] (default: ())
        Whoever else may say that the run ends, and why.
    """

    def __init__(
        self,
        run: RunState,
        limits: Limits,
        num_versions: int,
        monotonic: Callable[[], float],
        should_stop: ShouldStop | None = None,
        ends: Sequence[Callable[[], str | None]] = (),
    ) -> None:
        self._run = run
        self.limits = limits
        self._num_versions = num_versions
        self._monotonic = monotonic
        self._should_stop = should_stop
        self._ends = ends
        self._asked = False  # it said so
        self._started = 0.0
        self._next_check = 0.0

    def begin(self) -> None:
        """Count real time from here."""
        self._started = self._monotonic()

    def version_made(self, result: Result) -> None:
        """Ask Flower's `should_stop` about the newest version."""
        if self._should_stop is not None and self._should_stop(self._run.version, result):
            self._asked = True

    def reason(self) -> str | None:
        """Return why the run ends now; None if it continues."""
        run, limits = self._run, self.limits
        if run.version >= self._num_versions:
            return f"{self._num_versions} versions are made"
        if limits.deadline is not None and run.clock.now >= limits.deadline:
            return f"the deadline {limits.deadline:g} is reached"
        target, accuracy = limits.target_accuracy, run.accuracy
        if target is not None and accuracy is not None and accuracy >= target:
            return f"accuracy {accuracy:.4f} reaches the target {target:g}"
        if limits.stop_fn is not None and self._monotonic() >= self._next_check:
            self._next_check = self._monotonic() + _CHECK
            if limits.stop_fn():
                return STOP_REQUESTED
        if self._asked:
            return f"should_stop asked for it after version {run.version}"
        for ends in self._ends:
            if (reason := ends()) is not None:
                return reason
        limit = limits.time_limit
        if limit is not None and self._monotonic() - self._started >= limit:
            return f"the time limit of {limit:g} s is reached"
        return None
