"""A run in a folder of its own, for apps that have none of their own."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedpsa_strategy.files import make_private_folder, write_atomically
from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.server.events import Event
from fedpsa_strategy.watch.event_log import EventLog, plain
from fedpsa_strategy.watch.run_state import RunState

log = logging.getLogger("flwr")


class RunLog:
    """Listener that writes a run's events, and a summary when its `with` block ends.

    The live page shows what is then in the folder: `config.json`, `events.jsonl`, `summary.json`.

    Parameters
    ----------
    folder : Path | str
        Where to write; made if it does not exist, for its owner alone.
    config : Mapping[str, Any] | None (default: None)
        Settings that the live page shows. It knows `strategy`, `seed`, `dataset` and `clock`
        ("wall", if not given, or "virtual").
    wall : Callable[[], float] (default: time.time)
        Real time.

    Attributes
    ----------
    run : RunState
        What the events add up to.

    Raises
    ------
    FileExistsError
        If the folder holds a run.
    """

    def __init__(
        self,
        folder: Path | str,
        config: Mapping[str, Any] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self.run = RunState()
        self._wall = wall
        make_private_folder(self.folder)
        events = self.folder / "events.jsonl"
        try:
            events.touch(exist_ok=False)
        except FileExistsError:
            raise FileExistsError(
                f"{self.folder} already holds a run: choose another folder"
            ) from None
        config = {"clock": "wall"} | dict(config or {})
        self._unit = DAY if config["clock"] == "virtual" else 1.0  # of the area under the curve
        self._write("config.json", config)
        self._events = EventLog(events, wall=wall)

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        self._events(event)
        self.run(event, self._wall())

    def write_model(self, arrays: Mapping[str, Any]) -> None:
        """Write a model beside the events, for `fedpsa_strategy.load(folder).model`.

        Parameters
        ----------
        arrays : Mapping[str, Array]
            Flower's ArrayRecord, usually the one in the strategy's result.
        """
        write_atomically(self.folder / "model.npz", _npz({k: a.numpy() for k, a in arrays.items()}))

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._events:
            summary: dict[str, Any] = {"status": "stopped"}
            if isinstance(error, Exception):
                summary["status"] = "failed"
            elif error is None and self.run.end_reason is not None:
                summary["status"] = "completed"
            if error is not None:
                summary["error"] = f"{type(error).__name__}: {error}"
            try:
                self._write("summary.json", summary | self.run.numbers(self._unit))
            except OSError as problem:
                if error is None:
                    raise
                log.error("The summary could not be written: %s", problem)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        text = json.dumps(plain(values), indent=2, default=str) + "\n"
        write_atomically(self.folder / name, text)


def _npz(arrays: Mapping[str, Any]) -> bytes:
    buffer = BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()
