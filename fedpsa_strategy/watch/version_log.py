"""A log line per version, as Flower's strategies have one per round."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from fedpsa_strategy.server.events import Aggregated, Evaluated, Event, RunStarted, Uploaded

log = logging.getLogger("flwr")


class VersionLog:
    """Logs how a run goes; the listener of strategies that are given no other."""

    def __init__(self) -> None:
        self._staleness: list[int] = []

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                log.info("Training on %d clients begins", event.num_clients)
            case Uploaded():
                self._staleness.append(event.staleness)
            case Aggregated():
                log.info(
                    "[VERSION %d] %d new uploads (mean staleness %.1f), %d in all",
                    event.version,
                    len(self._staleness),
                    fmean(self._staleness or [0]),
                    event.uploads,
                )
                self._staleness = []
            case Evaluated():
                log.info("\t└──> evaluated by %s: %s", event.where, _readable(event.metrics))


def _readable(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
    )
