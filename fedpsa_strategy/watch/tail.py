"""A growing log of lines, read from where the last reading stopped."""

from __future__ import annotations

from pathlib import Path

from fedpsa_strategy.files import open_regular
from fedpsa_strategy.watch.parts import Part, parts_of

CHUNK = 4 * 2**20
_REMEMBERED = 64


class Tail:
    """Gives the lines that a log gained, and notices when it is another one than before.

    Parameters
    ----------
    path : Path
        The file that is written to; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.restarts = 0
        self._last = b""  # the bytes before the offset

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether the log started over, and its next complete lines (at most 4 MiB).

        Raises
        ------
        OSError
            If the file exists but cannot be read.
        """
        found = parts_of(self.path)
        if not found:
            return self.offset > 0 and self._restart(), []
        restarted = False
        try:
            # Truncated, replaced or rewritten: in every case these bytes are other ones.
            if _before(found, self.offset, len(self._last)) != self._last:
                restarted = self._restart()
            if self.offset < found[0].start:  # the oldest parts were taken away
                self.offset, self._last = found[0].start, b""
            part = next(part for part in reversed(found) if part.start <= self.offset)
            with open_regular(part.path) as file:
                file.seek(self.offset - part.start)
                data = file.read(CHUNK)
        except FileNotFoundError:  # just put aside as a full part
            return restarted, []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == CHUNK:
            end = CHUNK  # a line of this length is garbage: hand it out, it will count as damaged
        self.offset += end
        self._last = (self._last + data[:end])[-_REMEMBERED:]
        return restarted, data[:end].splitlines()

    @property
    def unread(self) -> int:
        """How many bytes were not read yet."""
        found = parts_of(self.path)
        return max(found[-1].end - self.offset, 0) if found else 0

    def _restart(self) -> bool:
        self.offset = 0
        self.restarts += 1
        self._last = b""
        return True


def _before(found: list[Part], position: int, count: int) -> bytes:
    """Return so many bytes before a position, which may be those of two parts."""
    pieces: list[bytes] = []
    for part in reversed(found):
        if part.start < position <= part.end and count:
            size = min(count, position - part.start)
            with open_regular(part.path) as file:
                file.seek(position - size - part.start)
                pieces.insert(0, file.read(size))
            position, count = position - size, count - size
    return b"".join(pieces)
