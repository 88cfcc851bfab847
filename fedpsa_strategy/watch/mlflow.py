"""A run's numbers for MLflow, which is an optional package."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedpsa_strategy.files import write_atomically
from fedpsa_strategy.server.events import Event
from fedpsa_strategy.watch.scalars import Scalars
from fedpsa_strategy.watch.tracker import Tracker, first_line, kept_id, missing

log = logging.getLogger("flwr")

_INTERVAL = 2.0  # real seconds between two batches
_BATCH = 1000  # numbers that MLflow takes at a time
_KEPT = 100_000  # numbers that wait for a server that does not answer
_LAST_WORDS = 30.0  # seconds that the end of a run waits for MLflow at most
_LONGEST = 500  # characters of a setting

_Point = tuple[str, float, int, int]  # name, value, wall time in ms, step


class MLflowLog(Tracker):
    """Listener that makes an MLflow run: settings as parameters, numbers by the run's time.

    A thread of its own talks to MLflow. A server that is slow or gone does not delay the run:
    what it does not take is tried again, and left out at the end with a warning.

    Parameters
    ----------
    uri : str
        The tracking URI, such as `http://127.0.0.1:5000` or `sqlite:////home/me/mlflow.db`.
    name : str
        The run's name.
    config : Mapping[str, Any] | None (default: None)
        Settings, recorded as MLflow's parameters.
    experiment : str (default: "fedpsa")
        MLflow's experiment; made if there is none of this name.
    id_file : Path | None (default: None)
        Where the id of the MLflow run is kept. If it is there, the same MLflow run goes on.
    wall : Callable[[], float] (default: time.time)
        Real time.

    Raises
    ------
    ModuleNotFoundError
        If MLflow is not installed.
    ConnectionError
        If MLflow does not take the run at its start.
    """

    def __init__(
        self,
        uri: str,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        experiment: str = "fedpsa",
        id_file: Path | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise missing("MLflow", error, "mlflow-skinny") from error
        self._metric: Callable[..., Any] = Metric
        self._wall = wall
        self._scalars = Scalars()
        self._points: queue.Queue[_Point] = queue.Queue()
        self._over = threading.Event()
        self._status = "FINISHED"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            resumed = kept_id(id_file)
            self.run_id = resumed or self._new_run(name, experiment, id_file)
            if resumed:
                self._client.update_run(resumed, status="RUNNING")
            # A parameter is written once: a resumed run keeps those that it began with.
            settings = {} if resumed else dict(config or {})
            params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
            for first in range(0, len(params), 100):
                self._client.log_batch(self.run_id, params=params[first : first + 100])
        except Exception as error:
            raise ConnectionError(
                f"MLflow at {uri!r} does not take the run: {first_line(error)}"
            ) from error
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take note of what the event says."""
        now = round(1000 * self._wall())
        for name, value in self._scalars(event).items():
            if self._points.qsize() < _KEPT:
                self._points.put((name, value, now, round(event.time)))

    def close(self, error: BaseException | None = None) -> None:
        """Send what is pending and end the MLflow run."""
        if error is not None:
            self._status = "FAILED" if isinstance(error, Exception) else "KILLED"
        self._over.set()
        self._thread.join(_LAST_WORDS)
        if self._thread.is_alive():
            log.warning("MLflow does not answer: its run lacks the last numbers")

    def _new_run(self, name: str, experiment: str, id_file: Path | None) -> str:
        found = self._client.get_experiment_by_name(experiment)
        home = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run_id = str(self._client.create_run(home, run_name=name).info.run_id)
        if id_file is not None:
            write_atomically(id_file, run_id + "\n")
        return run_id

    def _send(self) -> None:
        """Send batches until the run is over and all is sent, or MLflow fails at the very end."""
        batch: list[_Point] = []
        warned = False
        while True:
            last = self._over.wait(_INTERVAL)
            try:
                while batch or not self._points.empty():
                    while len(batch) < _BATCH and not self._points.empty():
                        batch.append(self._points.get())
                    self._client.log_batch(self.run_id, [self._metric(*item) for item in batch])
                    batch = []
                if last:
                    self._client.set_terminated(self.run_id, self._status)
            except Exception as error:
                if not warned or last:
                    then = "its run stays incomplete" if last else "trying again"
                    log.warning("MLflow does not take numbers, %s: %s", then, first_line(error))
                warned = True
            else:
                warned = False
            if last:
                return
