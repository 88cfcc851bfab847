"""The parts of a log: one file, or several when it grew large.

`events.jsonl` is the part that is written to. A part that is full is beside it, named by the
bytes that came before it: `events-000000000000.jsonl` is the first one. Positions count from the
beginning of the first, also when the oldest parts have been taken away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpsa_strategy.files import open_regular


@dataclass(frozen=True)
class Part:
    """A file with lines of a log."""

    path: Path
    start: int  # the position of its first byte
    size: int  # in bytes

    @property
    def end(self) -> int:
        """The position behind its last byte."""
        return self.start + self.size


def full_part(path: Path, start: int) -> Path:
    """Return the name of a full part of the log at `path`, whose first byte is at `start`."""
    return path.with_name(f"{path.stem}-{start:012d}{path.suffix}")


def parts_of(path: Path) -> list[Part]:
    """Return the parts of a log that there are, the oldest first; `path` is the one written to."""
    form = re.compile(re.escape(path.stem) + r"-(\d{12,})" + re.escape(path.suffix))
    found = []
    for other in path.parent.glob(f"{path.stem}-*{path.suffix}"):
        if (match := form.fullmatch(other.name)) and (size := _size(other)) is not None:
            found.append(Part(other, int(match[1]), size))
    found.sort(key=lambda part: part.start)
    if (size := _size(path)) is not None:
        found.append(Part(path, found[-1].end if found else 0, size))
    return found


def read(parts: Sequence[Part], position: int, count: int) -> bytes:
    """Return up to so many bytes from a position on, which may be those of several parts."""
    pieces = []
    for part in parts:
        if part.start <= position and (position < part.end or part is parts[-1]):
            with open_regular(part.path) as file:
                file.seek(position - part.start)
                pieces.append(file.read(count))
            position, count = position + len(pieces[-1]), count - len(pieces[-1])
    return b"".join(pieces)


def lines_of(path: Path, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a log, those of all its parts, up to the position `end`.

    If there is no part, this raises FileNotFoundError.
    """
    found = parts_of(path)
    if not found:
        raise FileNotFoundError(path)
    for part in found:
        position = part.start
        with open_regular(part.path) as file:
            for line in file:
                position += len(line)
                if end is not None and position > end:
                    return
                yield line


def cut(path: Path, end: int) -> int:
    """Take away the parts behind a position, so that the one with this position is written to.

    Returns the position of that one's first byte.
    """
    for part in reversed(parts_of(path)):
        if part.start > end:
            part.path.unlink()
            continue
        if part.path != path and not path.exists():
            if part.end == end:  # full, and all of it stays
                return end
            part.path.rename(path)
        return part.start
    return 0


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
