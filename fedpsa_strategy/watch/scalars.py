"""Events as named numbers: the one table of what is added up, drawn, or told to trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from fedpsa_strategy.server.events import Aggregated, Evaluated, Event, RunStarted, Uploaded

_RATE_INTERVAL = 5.0  # real seconds over which uploads are counted

# What trackers draw, by its name there; `{}` is who evaluated.
_CURVES = {
    "staleness": "upload/staleness",
    "kappa": "upload/kappa",
    "temperature": "upload/temperature",
    "effective_number": "version/effective_number",
    "accuracy": "evaluate-{}/accuracy",
    "loss": "evaluate-{}/loss",
}


def numbers_of(event: Event) -> dict[str, float]:
    """Return what an event tells in numbers, by name; what is missing or not finite is left out."""
    match event:
        case Uploaded():
            return {"staleness": float(event.staleness)} | (
                _finite(event.report, "kappa", "temperature")
                | _finite(event.metrics, "train-seconds", "sensitivity-seconds")
            )
        case Aggregated():
            return _finite(event.report, "effective_number")
        case Evaluated():
            return _finite(event.metrics, "accuracy", "loss")
    return {}


def finite(value: Any) -> float | None:
    """Return a number, or None for everything else: clients and other apps may report anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


class Scalars:
    """Turns each event into the numbers that TensorBoard, MLflow and W&B draw."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._uploads = 0
        self._since = monotonic()

    def __call__(self, event: Event) -> dict[str, float]:
        """Return the event's numbers by name; empty for events that have none."""
        if isinstance(event, RunStarted):
            self._since, self._uploads = self._monotonic(), 0
        where = event.where if isinstance(event, Evaluated) else ""
        found = {
            _CURVES[name].format(where): value
            for name, value in numbers_of(event).items()
            if name in _CURVES
        }
        return found | self._rate() if isinstance(event, Uploaded) else found

    def _rate(self) -> dict[str, float]:
        self._uploads += 1
        seconds = self._monotonic() - self._since
        if seconds < _RATE_INTERVAL:
            return {}
        rate = self._uploads / seconds
        self._since, self._uploads = self._monotonic(), 0
        return {"speed/uploads_per_second": rate}


def _finite(values: Mapping[str, Any], *names: str) -> dict[str, float]:
    numbers = {name: finite(values.get(name)) for name in names}
    return {name: number for name, number in numbers.items() if number is not None}
