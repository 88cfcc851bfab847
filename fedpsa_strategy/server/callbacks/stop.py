"""The end of a run."""

from __future__ import annotations

from collections.abc import Callable

from flwr.serverapp.strategy import Result

from fedpsa_strategy.server.callbacks.base import Callback
from fedpsa_strategy.server.options import Limits

STOP_REQUESTED = "a stop was requested"

ShouldStop = Callable[[int, Result], bool]

_CHECK = 0.5  # seconds between two questions whether to stop


class Stop(Callback):
    """Ends a run at its last version, at another limit, or when somebody asks for it.

    Parameters
    ----------
    limits : Limits
        What ends the run.
    num_versions : int
        Versions to make.
    monotonic : Callable[[], float]
        Real time.
    should_stop : Callable[[int, Result], bool] (default: None)
        Flower's: asked once about each version, after its evaluation.
    """

    def __init__(
        self,
        limits: Limits,
        num_versions: int,
        monotonic: Callable[[], float],
        should_stop: ShouldStop | None = None,
    ) -> None:
        self._limits = limits
        self._num_versions = num_versions
        self._monotonic = monotonic
        self._should_stop = should_stop
        self._asked_about = 0  # the version that `should_stop` was asked about last
        self._asked = False  # it said so
        self._wished = False  # `stop_fn` did; asked again, it may not
        self._started = 0.0
        self._next_check = 0.0

    def started(self) -> None:
        """Count real time and versions from here."""
        self._started = self._monotonic()
        self._asked_about = self.run.published

    def ends(self) -> str | None:
        """Return why the run ends now; None if it continues."""
        run, limits = self.run, self._limits
        if self._should_stop is not None and run.version != self._asked_about:
            self._asked_about = run.version
            self._asked |= bool(self._should_stop(run.version, run.result))
        if run.version >= self._num_versions:
            return f"{self._num_versions} versions are made"
        if limits.deadline is not None and run.clock.now >= limits.deadline:
            return f"the deadline {limits.deadline:g} is reached"
        target, accuracy = limits.target_accuracy, run.accuracy
        if target is not None and accuracy is not None and accuracy >= target:
            return f"accuracy {accuracy:.4f} reaches the target {target:g}"
        if limits.stop_fn is not None and self._monotonic() >= self._next_check:
            self._next_check = self._monotonic() + _CHECK
            self._wished |= bool(limits.stop_fn())
        if self._wished:
            return STOP_REQUESTED
        if self._asked:
            return f"should_stop asked for it after version {run.version}"
        limit = limits.time_limit
        if limit is not None and self._monotonic() - self._started >= limit:
            return f"the time limit of {limit:g} s is reached"
        return None
