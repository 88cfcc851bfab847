"""A run's scalars for TensorBoard, which is an optional package."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fedpsa_strategy.server.events import Aggregated, Evaluated, Event, RunStarted, Uploaded

_RATE_INTERVAL = 5.0  # real seconds over which uploads are counted


class TensorBoardLog:
    """Listener that writes scalars by the run's time: whole virtual units, or seconds.

    Parameters
    ----------
    path : Path
        The folder that `tensorboard --logdir` is given.
    monotonic : Callable[[], float] (default: time.monotonic)
        Real time, for uploads per second.

    Raises
    ------
    ModuleNotFoundError
        If TensorBoard is not installed.
    """

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                f"TensorBoard cannot be imported ({error}); install it with: "
                "pip install tensorboard torch"
            ) from error
        self._open: Callable[..., Any] = SummaryWriter
        self._path = path
        self._monotonic = monotonic
        self._writer: Any = None
        self._uploads = 0
        self._since = monotonic()

    def __call__(self, event: Event) -> None:
        """Write what the event says."""
        match event:
            case RunStarted():
                self._since, self._uploads = self._monotonic(), 0
                if event.version > 0:  # resumed: hides what an interrupted run wrote beyond this
                    self.close()
                    self._writer = self._open(self._path, purge_step=round(event.time) + 1)
            case Uploaded():
                self._add(event, "upload", {"staleness": event.staleness})
                self._add(event, "upload", event.report, "kappa", "temperature")
                self._count(event)
            case Aggregated():
                self._add(event, "version", event.report, "effective_number")
            case Evaluated():
                self._add(event, f"evaluate-{event.where}", event.metrics, "accuracy", "loss")

    def close(self) -> None:
        """Write out what is pending."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _count(self, event: Event) -> None:
        self._uploads += 1
        seconds = self._monotonic() - self._since
        if seconds >= _RATE_INTERVAL:
            self._add(event, "speed", {"uploads_per_second": self._uploads / seconds})
            self._since, self._uploads = self._monotonic(), 0

    def _add(self, event: Event, group: str, values: Mapping[str, Any], *names: str) -> None:
        if self._writer is None:
            self._writer = self._open(self._path)
        for name in names or values:
            if isinstance(value := values.get(name), int | float):
                self._writer.add_scalar(f"{group}/{name}", value, round(event.time))
