"""A run's numbers for Prometheus, whose client is an optional package."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedpsa_strategy.server.events import (
    Dispatched,
    Evaluated,
    Event,
    NodeJoined,
    NodeLeft,
    Overdue,
    Quarantined,
    Rejected,
    RunEnded,
    RunStarted,
    Uploaded,
)
from fedpsa_strategy.watch.run_state import RunState
from fedpsa_strategy.watch.scalars import numbers_of
from fedpsa_strategy.watch.tracker import Tracker, missing

_REASONS, _REASON_LENGTH = 30, 120  # different reasons, each a time series for as long as it runs
_STALENESS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_KAPPA = (-0.5, 0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class PrometheusMetrics(Tracker):
    """Listener that serves metrics for Prometheus to scrape, until its `with` block ends.

    Counters begin at 0 when the process starts, also where a run is resumed; `fedpsa_version`
    tells where the run stands.

    Parameters
    ----------
    address : str
        Where to serve, such as `127.0.0.1:9464`, `[::1]:9464` or `0.0.0.0:9464`. Whoever reaches
        it can read the metrics.
    run, strategy, data : str (default: "")
        What `fedpsa_run_info` says.
    wall : Callable[[], float] (default: time.time)
        Real time.

    Attributes
    ----------
    port : int
        Where it listens; with port 0 a free one.

    Raises
    ------
    ModuleNotFoundError
        If the client of Prometheus is not installed.
    ConnectionError
        If it cannot listen at the address.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str = "",
        strategy: str = "",
        data: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise missing("the client of Prometheus", error, "prometheus-client") from error
        host, _, port = address.rpartition(":")
        self._wall = wall
        self._online: set[int] = set()
        self._busy: set[int] = set()
        self._reasons: set[str] = set()
        self._run = RunState()

        # A registry of its own: the metrics of a process that holds several runs do not mix.
        own = client.CollectorRegistry()
        gauge = partial(client.Gauge, registry=own)
        info = gauge("fedpsa_run_info", "What runs", ("run", "strategy", "data"))
        info.labels(run, strategy, data).set(1)
        self._make_counters(partial(client.Counter, registry=own))
        self._make_gauges(gauge)
        self._make_histograms(partial(client.Histogram, registry=own))
        try:
            self._server, self._thread = client.start_http_server(
                int(port), addr=host.strip("[]"), registry=own
            )
        except (OSError, OverflowError, ValueError) as error:
            raise ConnectionError(
                f"prometheus = {address!r}: cannot listen there ({error}); choose another port"
            ) from error
        self.port = int(self._server.server_port)

    def _make_counters(self, counter: Callable[..., Any]) -> None:
        self._uploads = counter("fedpsa_uploads", "Accepted updates")
        self._rejected = counter("fedpsa_rejected", "Refused replies", ["reason"])
        self._quarantines = counter("fedpsa_quarantines", "Nodes left out for a while")
        self._overdue = counter(
            "fedpsa_overdue", "Tasks that took too long and gave their slot away"
        )
        self._received = counter("fedpsa_received_bytes", "Updates received")
        self._sent = counter("fedpsa_sent_bytes", "Models sent")

    def _make_gauges(self, gauge: Callable[..., Any]) -> None:
        self._version = gauge("fedpsa_version", "Version of the global model")
        self._running = gauge("fedpsa_running", "1 while the run lasts")
        self._begun = gauge("fedpsa_start_timestamp_seconds", "When this process took up the run")
        self._last_upload = gauge(
            "fedpsa_last_upload_timestamp_seconds", "When the last update came"
        )
        self._nodes = gauge("fedpsa_nodes", "Nodes that take part")
        self._busy_nodes = gauge("fedpsa_busy_nodes", "Nodes that have a task")
        # A histogram with negative values has no sum, from which the mean could be taken.
        self._mean_kappa = gauge("fedpsa_kappa_mean", "Mean of the last updates")
        self._mean_kappa.set(float("nan"))
        self._newest = {
            "temperature": gauge(
                "fedpsa_temperature", "Temperature of the weights; NaN before there is one"
            ),
            "effective_number": gauge(
                "fedpsa_effective_number", "Updates that count in the last buffer"
            ),
        }
        self._newest["temperature"].set(float("nan"))
        self._metrics = gauge("fedpsa_evaluation", "Newest evaluation", ["where", "metric"])

    def _make_histograms(self, histogram: Callable[..., Any]) -> None:
        self._spread = {
            "staleness": histogram(
                "fedpsa_staleness", "Versions behind, of updates", buckets=_STALENESS
            ),
            "kappa": histogram(
                "fedpsa_kappa",
                "Cosine of the sketches of client and server, of updates",
                buckets=_KAPPA,
            ),
        }
        what = "Seconds that clients spent on an update"
        self._seconds = histogram("fedpsa_client_seconds", what, ["part"], buckets=_SECONDS)

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        self._run(event)
        numbers = numbers_of(event)
        match event:
            case RunStarted():
                self._running.set(1)
                self._begun.set(self._wall())
            case RunEnded():
                self._running.set(0)
                self._busy.clear()
            case NodeJoined():
                self._online.add(event.client)
            case NodeLeft():
                self._online.discard(event.client)
                self._busy.discard(event.client)
            case Dispatched():
                self._busy.add(event.client)
                self._sent.inc(event.num_bytes)
            case Uploaded():
                self._take_upload(event, numbers)
            case Rejected():
                self._busy.discard(event.client)
                self._rejected.labels(self._bounded(event.reason)).inc()
            case Overdue():
                self._overdue.inc()
            case Quarantined():
                self._quarantines.inc()
            case Evaluated():
                for name, value in numbers.items():
                    self._metrics.labels(event.where, name).set(value)
        for name, gauge in self._newest.items():
            if name in numbers:
                gauge.set(numbers[name])
        self._version.set(self._run.version)
        self._nodes.set(len(self._online))
        self._busy_nodes.set(len(self._busy))

    def _take_upload(self, event: Uploaded, numbers: Mapping[str, float]) -> None:
        self._busy.discard(event.client)
        self._uploads.inc()
        self._received.inc(event.num_bytes)
        self._last_upload.set(self._wall())
        for name, histogram in self._spread.items():
            if name in numbers:
                histogram.observe(numbers[name])
        for part in ("train", "sensitivity"):
            if (seconds := numbers.get(f"{part}-seconds")) is not None:
                self._seconds.labels(part).observe(seconds)
        if (mean := self._run.recent_kappa) is not None:
            self._mean_kappa.set(mean)

    def _bounded(self, reason: str) -> str:
        """Return a reason as a label: without its numbers, and one of not too many."""
        label = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "N", reason)[:_REASON_LENGTH]
        if label not in self._reasons and len(self._reasons) >= _REASONS:
            return "other reasons"
        self._reasons.add(label)
        return label

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
