"""The log of a run's events: a line of JSON each, written by one class, read by one function.

A line ends with a checksum of what stands before it, so that a damaged line is known as such. The
log tells people what happened; the run's state is in its checkpoints, and no damage to the log
keeps a run from going on.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedpsa_strategy.server.events import Event, event_from_dict
from fedpsa_strategy.watch.parts import cut, full_part, lines_of, parts_of, read

log = logging.getLogger("flwr")

_CHECKSUM = b', "crc32": '
_NAMED = 5  # damaged lines that a warning names


class EventLog:
    """Listener that appends every event as a line of JSON, each by a single write.

    A full disk does not stop the run: what could not be written is kept and tried again with the
    next event, and a line that got only half its way is cut off.

    Parameters
    ----------
    path : Path
        The file.
    keep : int (default: 0)
        How many bytes of an existing file are kept at most; what comes after them is cut off, and
        so is a line that is not complete.
    wall : Callable[[], float] (default: time.time)
        Real time, which every line carries beside the run's own.
    part_size : int (default: 0)
        Bytes after which the file is put aside as a full part and a new one begins; 0: never. See
        `fedpsa_strategy.watch.parts`.

    Attributes
    ----------
    size : int
        The bytes in the log, those of full parts included.
    """

    def __init__(
        self,
        path: Path,
        keep: int = 0,
        wall: Callable[[], float] = time.time,
        part_size: int = 0,
    ) -> None:
        self.size = complete_size(path, keep)
        self._path = path
        self._start = cut(path, self.size)  # of the file in the log
        self._part_size = part_size
        self._file = path.open("ab", buffering=0)
        self._file.truncate(self.size - self._start)
        self._wall = wall
        self._pending = b""

    def __call__(self, event: Event) -> None:
        """Append the event."""
        failed_before = bool(self._pending)
        self._pending += _to_line(event.to_dict() | {"wall": round(self._wall(), 3)})
        try:
            self._write()
        except OSError as error:
            if not failed_before:
                log.warning("events cannot be written, trying again: %s", error)

    def sync(self) -> int:
        """Make sure that all events are on the disk; return the size of the file.

        Raises
        ------
        OSError
            If they are not.
        """
        if self._pending:
            self._write()
        os.fsync(self._file.fileno())
        return self.size

    def _write(self) -> None:
        try:
            written = self._file.write(self._pending)
            if written != len(self._pending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(self.size - self._start)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.size += written
        self._pending = b""
        if self._part_size and self.size - self._start >= self._part_size:
            self._begin_part()

    def _begin_part(self) -> None:
        """Put the file aside, and go on in a new one; if that is impossible, go on in this one."""
        full = full_part(self._path, self._start)
        try:
            os.fsync(self._file.fileno())
            self._path.rename(full)
            try:
                new = self._path.open("ab", buffering=0)
            except OSError:
                full.rename(self._path)
                raise
        except OSError as error:
            log.warning("the events continue in one file: %s", error)
            self._part_size = 0
            return
        self._file.close()
        self._file, self._start = new, self.size

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the event in a line of the log; raises ValueError if the line is damaged."""
    content, mark, checksum = line.rstrip().rpartition(_CHECKSUM)
    if mark and checksum != b"%d}" % zlib.crc32(content):
        raise ValueError("the checksum does not match")
    try:
        event = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(event, dict):
        raise ValueError("it is not an event")
    kind, moment = event.get("event"), event.get("time")
    if not isinstance(kind, str) or isinstance(moment, bool):
        raise ValueError("it is not an event")
    if not isinstance(moment, int | float) or not math.isfinite(moment):
        raise ValueError("it has no time")
    return event


def read_events(
    path: Path, size: int | None = None, kinds: Collection[str] | None = None
) -> Iterator[Event]:
    """Yield the events of a log; damaged lines are left out, and a warning tells which.

    Parameters
    ----------
    path : Path
        The file that is written to; if there is none, and no full part, there are no events.
    size : int | None (default: None)
        Read at most this many bytes, those of full parts included.
    kinds : Collection[str] | None (default: None)
        The kinds of events that are wanted; lines of others are not even decoded.
    """
    starts = tuple(f'{{"event": "{kind}"'.encode() for kind in kinds or ())
    damaged: list[int] = []
    try:
        for number, line in enumerate(lines_of(path, size), 1):
            if starts and not line.startswith(starts) and line.startswith(b'{"event": "'):
                continue
            try:
                event = event_from_dict(parse_line(line))
            except (ValueError, TypeError):
                damaged.append(number)
                continue
            except KeyError:  # a kind that a newer version has
                continue
            if kinds is None or event.kind in kinds:
                yield event
    except FileNotFoundError:
        log.warning("%s is missing: its events are lost", path)
    if damaged:
        some = ", ".join(map(str, damaged[:_NAMED]))
        more = f" and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
        log.warning("%s: damaged lines left out: %s", path, some + more)


def complete_size(path: Path, limit: int) -> int:
    """Return how many of the first `limit` bytes of a log are complete lines."""
    parts = parts_of(path)
    end = min(limit, parts[-1].end) if parts else 0
    while parts:  # usually the first look finds a line's end
        start = max(end - 4096, parts[0].start)
        found = read(parts, start, max(end - start, 0)).rfind(b"\n") + 1
        if found or start == parts[0].start:
            return start + found if found else 0
        end = start
    return 0


def plain(value: Any) -> Any:
    """Replace what JSON cannot express: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


_STRICT = json.JSONEncoder(allow_nan=False)


def _to_line(values: dict[str, Any]) -> bytes:
    try:
        text = _STRICT.encode(values)
    except (TypeError, ValueError):  # seldom, so that nearly no line is looked through twice
        text = json.dumps(plain(values))
    content = text[:-1].encode()
    return b"%s%s%d}\n" % (content, _CHECKSUM, zlib.crc32(content))
