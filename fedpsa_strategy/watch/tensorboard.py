"""A run's numbers for TensorBoard, which is an optional package."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpsa_strategy.server.events import Event, RunStarted
from fedpsa_strategy.watch.scalars import Scalars
from fedpsa_strategy.watch.tracker import Tracker, missing


class TensorBoardLog(Tracker):
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
            raise missing("TensorBoard", error, "tensorboard torch") from error
        self._open: Callable[..., Any] = SummaryWriter
        self._path = path
        self._scalars = Scalars(monotonic)
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Write what the event says."""
        if isinstance(event, RunStarted) and event.version > 0:
            # Resumed: hides what an interrupted run wrote beyond this.
            self.close()
            self._writer = self._open(self._path, purge_step=round(event.time) + 1)
        for name, value in self._scalars(event).items():
            if self._writer is None:
                self._writer = self._open(self._path)
            self._writer.add_scalar(name, value, round(event.time))

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        """Write out what is pending."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
