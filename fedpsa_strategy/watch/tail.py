"""A growing log of lines, read from where the last reading stopped."""

from __future__ import annotations

from pathlib import Path

from fedpsa_strategy.watch.parts import parts_of, read

CHUNK = 4 * 2**20
_REMEMBERED = 64


class Tail:
    """Gives the lines that a log gained, and notices when it is another one than before.

    The file that is written to need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.restarts = 0
        self._last = b""  # the bytes before the offset

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether the log started over, and its next complete lines (at most 4 MiB).

        If the file exists but cannot be read, this raises OSError.
        """
        found = parts_of(self.path)
        if not found:
            return self.offset > 0 and self._restart(), []
        restarted, known = False, len(self._last)
        try:
            # Truncated, replaced or rewritten: in every case these bytes are other ones.
            if read(found, self.offset - known, known) != self._last:
                restarted = self._restart()
            self.offset = max(self.offset, found[0].start)  # the oldest may be taken away
            data = read(found, self.offset, CHUNK)
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
