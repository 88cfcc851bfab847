"""Events as named numbers: what TensorBoard, MLflow and W&B are told of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fedpsa_strategy.server.events import Aggregated, Evaluated, Event, RunStarted, Uploaded
from fedpsa_strategy.watch.run_state import finite

_RATE_INTERVAL = 5.0  # real seconds over which uploads are counted


class Scalars:
    """Turns each event into the numbers that are worth a curve.

    Parameters
    ----------
    monotonic : Callable[[], float] (default: time.monotonic)
        Real time, for uploads per second.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._uploads = 0
        self._since = monotonic()

    def __call__(self, event: Event) -> dict[str, float]:
        """Return the event's numbers by name; empty for events that have none."""
        match event:
            case RunStarted():
                self._since, self._uploads = self._monotonic(), 0
            case Uploaded():
                return (
                    _chosen("upload", {"staleness": event.staleness}, "staleness")
                    | _chosen("upload", event.report, "kappa", "temperature")
                    | self._rate()
                )
            case Aggregated():
                return _chosen("version", event.report, "effective_number")
            case Evaluated():
                return _chosen(f"evaluate-{event.where}", event.metrics, "accuracy", "loss")
        return {}

    def _rate(self) -> dict[str, float]:
        self._uploads += 1
        seconds = self._monotonic() - self._since
        if seconds < _RATE_INTERVAL:
            return {}
        rate = self._uploads / seconds
        self._since, self._uploads = self._monotonic(), 0
        return {"speed/uploads_per_second": rate}


def _chosen(group: str, values: Mapping[str, Any], *names: str) -> dict[str, float]:
    numbers = {f"{group}/{name}": finite(values.get(name)) for name in names}
    return {name: number for name, number in numbers.items() if number is not None}
