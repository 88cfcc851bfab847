"""The runs below some folders: which there are, how they stand, what is new in them."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpsa_strategy.events import RunEnded
from server_app.dashboard.state import RunState
from server_app.dashboard.tail import Tail
from server_app.progress import DAY

_MARKS = ("events.jsonl", "config.toml", "summary.json", "engine-logs")
_SILENCE = 30.0  # a run that lives says something every few seconds
_PATIENCE = 1.0  # seconds of reading after which the page gets what there is


class NoRunError(ValueError):
    """A folder in which there is no run; the text says what was looked for."""


class Run:
    """A run's folder, read as it grows.

    Parameters
    ----------
    path : Path
        The folder.
    now : Callable[[], float] (default: time.time)
        Real time, to tell a silent run.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.now = now
        self.state = RunState()
        self._tail = Tail(path / "events.jsonl")
        self._lock = threading.Lock()

    def head(self) -> dict[str, Any]:
        """Return how the run stands, without reading its events."""
        config, summary = self._config(), self._summary()
        written, summarised = _changed(self._tail.path), _changed(self.path / "summary.json")
        status, accuracy = "waiting", summary.get("accuracy")
        ended = _ended(self._tail.path)
        # A summary that is older than events that go on belongs to what was resumed.
        if summary and (summarised >= written or ended):
            status = str(summary.get("status"))
        elif ended:
            status = "completed"
        elif written:
            status = "running" if self.now() - written < _SILENCE else "silent"
        names = ("strategy", "dataset", "seed", "clock")
        return {
            "status": status,
            "error": str(summary.get("error")) if status == "failed" else None,
            "accuracy": accuracy if status == "completed" and isinstance(accuracy, float) else None,
            "changed": max(written, summarised, _changed(self.path / "config.toml")),
            **{name: config.get(name) for name in names},
        }

    def snapshot(self, cursor: str = "") -> dict[str, Any] | None:
        """Return all that is known, or None if that is what `cursor` stands for."""
        with self._lock:
            problem, left = None, 0
            try:
                left = self._read()
            except OSError as error:
                problem = f"{self._tail.path.name} cannot be read: {error.strerror}"
            head = self.head()
            parts = (self._tail.restarts, self._tail.offset, head["changed"], head["status"], left)
            current = "-".join(map(str, parts))
            if current == cursor:
                return None
            config, state = self._config(), self.state.snapshot()
            return {
                "cursor": current,
                **head,
                "problem": problem,
                "unread": left / (self._tail.offset + left) if left else 0,
                "age": max(self.now() - head["changed"], 0.0),
                "config": config,
                "share_done": _share_done(config, state),
                **state,
            }

    def _read(self) -> int:
        """Read what is new, but not for long; return how many bytes are left."""
        give_up = time.monotonic() + _PATIENCE
        while True:
            restarted, lines = self._tail.read()
            if restarted:
                self.state = RunState()
            for line in lines:
                self.state.take(line)
            if not lines:
                return 0  # an incomplete line is not there yet
            if time.monotonic() >= give_up:
                return max(self._tail.path.stat().st_size - self._tail.offset, 0)

    def _config(self) -> dict[str, str]:
        """Return the settings as texts: seeds are 64-bit integers, which JavaScript has not."""
        try:
            config = tomllib.loads((self.path / "config.toml").read_text())
        except (OSError, ValueError):
            return {}
        return {
            key: str(v).lower() if v is True or v is False else str(v) for key, v in config.items()
        }

    def _summary(self) -> dict[str, Any]:
        try:
            text = (self.path / "summary.json").read_text()
            summary = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}


class Library:
    """All runs in some folders, looked for anew every time: runs come while the page is open.

    Parameters
    ----------
    folders : Sequence[Path]
        Runs, or folders of runs.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._open: dict[Path, Run] = {}
        for folder in folders:
            if not folder.is_dir():
                raise NoRunError(f"{folder} is no folder")
            if not any(_run_folders(folder)) and any(folder.iterdir()):
                raise NoRunError(
                    f"{folder} is no run: neither it nor a folder in it holds events.jsonl or "
                    "config.toml"
                )

    def runs(self) -> dict[str, Run]:
        """Return the runs by name; names that occur twice are numbered."""
        runs: dict[str, Run] = {}
        for folder in self.folders:
            for path in _run_folders(folder):
                # Names that are no Unicode cannot be sent to a browser, nor come back from it.
                name = key = os.fsencode(path.resolve().name).decode(errors="replace")
                while key in runs and runs[key].path != path:
                    key = f"{name}~{int(key.rpartition('~')[2]) + 1 if key != name else 2}"
                runs[key] = self._open.setdefault(path, Run(path))
        return runs


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folder if it is a run, else those in it that are, the newest first."""
    if any((folder / mark).exists() for mark in _MARKS):
        yield folder
    elif folder.is_dir():
        inner = [path for path in folder.iterdir() if any((path / m).exists() for m in _MARKS)]
        yield from sorted(inner, key=lambda path: (-_changed(path / "config.toml"), path.name))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _ended(path: Path) -> bool:
    """Tell whether the last event is the end of the run."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 4096, 0))
            last = file.read().rstrip().rpartition(b"\n")[2]
        return bool(json.loads(last)["event"] == RunEnded.kind)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def _finite(text: str) -> float | None:
    try:
        return number if math.isfinite(number := float(text)) else None
    except ValueError:
        return None


def _share_done(config: dict[str, str], state: dict[str, Any]) -> float | None:
    """Return how much of the run is done, by the limit that is nearest."""
    done = {
        "num-server-rounds": state["totals"]["version"],
        "virtual-days": state["time"] / DAY if config.get("clock") == "virtual" else 0.0,
        "time-limit": state["elapsed"] or 0.0,
    }
    limits = {key: _finite(config.get(key, "0")) or 0.0 for key in done}
    shares = [min(done[key] / limit, 1.0) for key, limit in limits.items() if limit > 0]
    return max(shares, default=None)
