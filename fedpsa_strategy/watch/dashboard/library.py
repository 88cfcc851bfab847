"""The runs below some folders: which there are, how they stand, what is new in them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedpsa_strategy.methods.registry import label_of
from fedpsa_strategy.watch.dashboard.state import PageState
from fedpsa_strategy.watch.runs import NotARunError, is_run, read_values
from fedpsa_strategy.watch.scalars import finite
from fedpsa_strategy.watch.tail import Tail

_SILENCE = 30.0  # a run that lives says something every few seconds
_COPYING = 5.0  # when a folder was copied, any of its files may be some seconds newer
_LONGEST_TITLE = 200
_PATIENCE = 1.0  # seconds of reading after which the page gets what there is


class Run:
    """A run's folder, read as it grows; `now` is real time, to tell a silent run."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.now = now
        self.state = PageState()
        self._tail = Tail(path / "events.jsonl")
        self._lock = threading.Lock()

    def head(self) -> dict[str, Any]:
        """Return how the run stands, without reading its events."""
        config, summary = self.config(), _load(self.path / "summary.json")
        written, summarised = _changed(self._tail.path), _changed(self.path / "summary.json")
        status = "waiting"
        # A summary that is older than the events is that of a run that was resumed.
        if summary and summarised > written - _COPYING:
            status = str(summary.get("status"))
        elif written:
            status = "running" if self.now() - written < _SILENCE else "silent"
        return {
            "status": status,
            "title": self._title(),
            "error": str(summary.get("error")) if status == "failed" else None,
            **{name: finite(summary.get(name)) for name in ("accuracy", "loss")},
            "changed": max(written, summarised, _changed(_config_path(self.path))),
            **{name: config.get(name) for name in ("strategy", "seed", "clock")},
            "label": label_of(_load(_config_path(self.path))),
            "data": config.get("task") or config.get("dataset"),  # an own task has its own data
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
            return {
                "cursor": current,
                **head,
                "problem": problem,
                "unread": left / (self._tail.offset + left) if left else 0,
                "age": max(self.now() - head["changed"], 0.0),
                "config": self.config(),
                **self.state.snapshot(),
            }

    def _read(self) -> int:
        """Read what is new, but not for long; return how many bytes are left."""
        give_up = time.monotonic() + _PATIENCE
        while True:
            restarted, lines = self._tail.read()
            if restarted:
                self.state = PageState()
            for line in lines:
                self.state.take(line)
            if not lines:
                return 0  # an incomplete line is not there yet
            if time.monotonic() >= give_up:
                return self._tail.unread

    def _title(self) -> str | None:
        """Return what experiments call their cell, whose folder is named by a hash."""
        labels = _load(self.path / "cell.json").get("labels")
        if not isinstance(labels, dict) or not labels:
            return None
        parts = [
            f"{key} {value}" if isinstance(value, int | float) else str(value)
            for key, value in labels.items()
        ]
        return " · ".join(parts)[:_LONGEST_TITLE]

    def config(self) -> dict[str, str]:
        """Return the settings as texts: seeds are 64-bit integers, which JavaScript has not."""
        settings = _load(_config_path(self.path)).items()
        return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in settings}


class Library:
    """All runs in some folders, which are runs or hold runs.

    They are looked for every time: runs appear while the page is open.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._open: dict[Path, Run] = {}
        for folder in folders:
            if not folder.is_dir():
                raise NotARunError(f"{folder} is no folder")
            if not any(_run_folders(folder)) and any(folder.iterdir()):
                deeper = [str(path) for path in folder.iterdir() if any(_run_folders(path))]
                raise NotARunError(
                    f"{folder} is no run: neither it nor a folder in it holds events.jsonl or the "
                    "config.toml of a run"
                    + (f"; but there are runs in {', '.join(sorted(deeper))}" if deeper else "")
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
    if _is_run(folder):
        yield folder
    elif folder.is_dir():
        inner = filter(_is_run, folder.iterdir())
        yield from sorted(inner, key=lambda path: (-_changed(_config_path(path)), path.name))


def _is_run(folder: Path) -> bool:
    # Events come late: before them there are an engine's logs, or the settings.
    begun = (folder / "engine-logs").exists() or "run-dir" in _load(folder / "config.toml")
    return begun or is_run(folder)


def _config_path(folder: Path) -> Path:
    """Return where the settings are: in our app's file, or in that of the library's `RunLog`."""
    ours = folder / "config.toml"
    return ours if ours.exists() else folder / "config.json"


def _load(path: Path) -> dict[str, Any]:
    return _load_version(path, _changed(path))


@lru_cache(maxsize=4096)  # a folder of many runs is listed every few seconds
def _load_version(path: Path, changed: float) -> dict[str, Any]:  # noqa: ARG001
    return read_values(path)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
