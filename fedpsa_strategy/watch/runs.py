"""Earlier runs: what they measured, as numbers, tables and pictures.

Any run will do that has written events into a folder: this repository's app does, and every app
that gives its strategy a `RunLog`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedpsa_strategy.files import open_regular, write_atomically
from fedpsa_strategy.server.clock import DAY
from fedpsa_strategy.server.events import event_from_dict
from fedpsa_strategy.watch.curve import draw_curves
from fedpsa_strategy.watch.event_log import parse_line
from fedpsa_strategy.watch.parts import lines_of
from fedpsa_strategy.watch.run_state import Curve, RunState
from fedpsa_strategy.watch.scalars import finite

Row = dict[str, Any]


class NotARunError(ValueError):
    """A folder that holds no run; the text says what was looked for."""


@dataclass(frozen=True)
class Picture:
    """A picture, which notebooks show.

    Parameters
    ----------
    png : bytes
        The file's content.
    """

    png: bytes = field(repr=False)

    def save(self, path: Path | str) -> None:
        """Write it to a file."""
        write_atomically(Path(path), self.png)

    def _repr_png_(self) -> bytes:
        return self.png


class Run:
    """A run in a folder, read when something of it is asked for.

    Parameters
    ----------
    folder : Path | str
        The run's folder.

    Raises
    ------
    NotARunError
        If there is no run in it.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not is_run(self.folder):
            raise NotARunError(
                f"{self.folder} is no run: it has neither events.jsonl nor a summary.json"
            )

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.settings.get('strategy', '?')}, {self.status}>"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @cached_property
    def settings(self) -> Row:
        """The settings that it was run with."""
        return read_values(self.folder / "config.toml") or read_values(self.folder / "config.json")

    @cached_property
    def summary(self) -> Row:
        """What `summary.json` says; of a run without one, what its events add up to."""
        return read_values(self.folder / "summary.json") or {
            "status": "running",
            **self._state.numbers(self._unit),
        }

    @property
    def status(self) -> str:
        """Whether it is "completed", "stopped", "failed" or "running"."""
        return str(self.summary.get("status", "running"))

    @property
    def tags(self) -> list[str]:
        """The words it was given to be found by."""
        return [word.strip() for word in str(self.settings.get("tags", "")).split(",") if word]

    @property
    def accuracy(self) -> float | None:
        """The last test accuracy, 0 to 1; None if there was none."""
        return self.summary.get("accuracy")

    @property
    def virtual(self) -> bool:
        """Whether its time is virtual, so that curves are in days and not in seconds."""
        return self.settings.get("clock") == "virtual"

    @property
    def curve(self) -> Any:
        """Accuracy (or loss, without one) against time, as a DataFrame or a list of rows.

        Times are virtual days with the virtual clock, else seconds.
        """
        measure, points = self.points
        unit = "days" if self.virtual else "seconds"
        return table([{unit: time, measure: value} for time, value in points], (unit, measure))

    @property
    def points(self) -> tuple[str, Curve]:
        """What was measured, "accuracy" or "loss", and the points of its curve."""
        return self._state.points(self._unit)

    @property
    def events(self) -> Any:
        """All events, as a DataFrame or a list of rows; damaged lines are left out."""
        return table(list(self._events()), ("event", "time"))

    @property
    def model(self) -> Any:
        """The final model's arrays by their names.

        Raises
        ------
        FileNotFoundError
            If the run has left none.
        """
        return self.arrays()

    def arrays(self) -> dict[str, Any]:
        """Return the final model's arrays by their names; see `model`."""
        path = self.folder / "model.safetensors"
        if path.exists():
            from safetensors.numpy import load_file

            return dict(load_file(path))
        path = self.folder / "model.npz"
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} holds no model: the run is {self.status}")
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)

    def plot(self) -> Picture:
        """Draw its curve."""
        return draw([self])

    @property
    def _unit(self) -> float:
        return DAY if self.virtual else 1.0

    @cached_property
    def _state(self) -> RunState:
        state = RunState()
        for values in self._events():
            with suppress(KeyError, TypeError):  # of a newer version, or damaged
                state(event_from_dict(values), finite(values.get("wall")))
        return state

    def _events(self) -> Iterator[Row]:
        with suppress(FileNotFoundError):
            for line in lines_of(self.folder / "events.jsonl"):
                with suppress(ValueError):
                    event = parse_line(line)
                    event.pop("crc32", None)
                    yield event


def load(folder: Path | str) -> Run:
    """Return the run in a folder, of this repository's app or of any other that writes events.

    Raises
    ------
    NotARunError
        If there is no run in it.
    """
    return Run(folder)


def is_run(folder: Path) -> bool:
    """Tell whether a run has written something into a folder."""
    return (folder / "events.jsonl").is_file() or "status" in read_values(folder / "summary.json")


def find_runs(folder: Path) -> list[Run]:
    """Return the run in a folder, or those in the folders in it, by name.

    Raises
    ------
    NotARunError
        If there is none.
    """
    if is_run(folder):
        return [Run(folder)]
    inner = sorted(filter(Path.is_dir, folder.iterdir())) if folder.is_dir() else []
    if not (found := [Run(path) for path in inner if is_run(path)]):
        raise NotARunError(f"{folder} is no run, and no folder in it is one")
    return found


def table(rows: list[Row], columns: Sequence[str] = ()) -> Any:
    """Return rows as a pandas DataFrame if pandas is installed, else as they are."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows) if rows else pandas.DataFrame(columns=list(columns))


def draw(runs: Sequence[Run]) -> Picture:
    """Return the curves of runs in one picture.

    Raises
    ------
    ValueError
        If they measured different things.
    """
    measures = {run.points[0] for run in runs if run.points[1]}
    if len(measures) > 1 or len({run.virtual for run in runs}) > 1:
        raise ValueError(
            "these runs cannot be drawn into one picture: some measured accuracy and others loss,"
            " or some have virtual time and others real time"
        )
    png = draw_curves(
        {_label(run, runs): run.points[1] for run in runs},
        virtual=runs[0].virtual,
        measure=measures.pop() if measures else "accuracy",
    )
    return Picture(png)


def _label(run: Run, runs: Sequence[Run]) -> str:
    """Return what a run is called in a picture; no other folder has the same label."""
    strategy = run.settings.get("strategy")
    alike = [other for other in runs if other.settings.get("strategy") == strategy]
    if strategy is not None and len(alike) < 2:
        return str(strategy)
    namesakes = {other.folder.resolve() for other in alike if other.name == run.name}
    name = run.name if len(namesakes) < 2 else str(run.folder)
    return name if strategy is None else f"{strategy}, {name}"


def read_values(path: Path) -> Row:
    """Return what is in a TOML or JSON file; nothing, if it cannot be read (yet)."""
    try:
        with open_regular(path) as file:
            text = file.read().decode()
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
