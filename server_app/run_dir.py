"""The folder of a run, and the only place that writes files."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w
from flwr.app import ArrayRecord
from safetensors.numpy import save

from fedpsa_strategy.events import Event, event_from_dict

log = logging.getLogger("flwr")


class RunDir:
    """A run's folder; every file in it is written whole or not at all.

    Parameters
    ----------
    path : Path
        The folder; made if it does not exist.
    resume : bool (default: False)
        Whether it holds a run that is to go on; else one that holds a run is refused.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        if resume and not self.events_path.exists():
            raise FileNotFoundError(f"run-dir {path} holds no run that could be resumed")
        path.mkdir(parents=True, exist_ok=True)
        if not resume and self.events_path.exists():
            raise FileExistsError(
                f"run-dir {path} already holds a run: choose another folder, or resume=true to go "
                "on from its newest checkpoint"
            )

    @property
    def events_path(self) -> Path:
        """Where the events are."""
        return self.path / "events.jsonl"

    @classmethod
    def default_path(cls, strategy: str, data: str) -> Path:
        """Return runs/<time>-<strategy>-<data> below the working directory."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return Path.cwd() / "runs" / f"{stamp}-{strategy}-{data.replace(':', '.')}"

    def write(self, name: str, data: bytes) -> Path:
        """Write a file under a temporary name and rename it."""
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        return self.path / name

    def write_config(self, run_config: Mapping[str, Any]) -> None:
        """Write all effective settings, in the form `flwr run --run-config` takes."""
        self.write("config.toml", tomli_w.dumps(dict(run_config)).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary as JSON."""
        self.write("summary.json", (json.dumps(_plain(summary), indent=2) + "\n").encode())

    def write_model(self, arrays: ArrayRecord) -> None:
        """Write the final model."""
        self.write("model.safetensors", save({k: array.numpy() for k, array in arrays.items()}))


class EventLog:
    """Listener that appends every event as a line of JSON, each by a single write.

    A full disk does not stop the run: what could not be written is kept and tried again with the
    next event, and a line that got only half its way is cut off.

    Parameters
    ----------
    path : Path
        The file.
    keep : int (default: 0)
        How many bytes of an existing file are kept; what comes after them is cut off.
    wall : Callable[[], float] (default: time.time)
        Real time, which every line carries beside the run's own.
    """

    def __init__(self, path: Path, keep: int = 0, wall: Callable[[], float] = time.time) -> None:
        self._file = path.open("ab", buffering=0)
        self._file.truncate(keep)
        self.size = keep
        self._wall = wall
        self._pending = b""

    def __call__(self, event: Event) -> None:
        """Append the event."""
        line = _to_json(event.to_dict() | {"wall": round(self._wall(), 3)})
        failed_before = bool(self._pending)
        self._pending += line.encode() + b"\n"
        try:
            written = self._file.write(self._pending)
            if written != len(self._pending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(self.size)
            if not failed_before:
                log.warning("events cannot be written, trying again: %s", error)
            return
        self.size += written
        self._pending = b""

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def read_events(path: Path, size: int) -> Iterator[Event]:
    """Yield the events in the first `size` bytes of a file."""
    with path.open("rb") as file:
        for line in file.read(size).splitlines():
            yield event_from_dict(json.loads(line))


def model_sha256(arrays: ArrayRecord) -> str:
    """Return the hash of a model: names, dtypes, shapes and bytes, in order of the names."""
    digest = hashlib.sha256()
    for key in sorted(arrays):
        values = arrays[key].numpy()
        digest.update(f"{key} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


_STRICT = json.JSONEncoder(allow_nan=False)


def _to_json(values: dict[str, Any]) -> str:
    try:
        return _STRICT.encode(values)
    except (TypeError, ValueError):  # seldom, so that nearly no line is looked through twice
        return json.dumps(_plain(values))


def _plain(value: Any) -> Any:
    """Replace what JSON has no word for: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
