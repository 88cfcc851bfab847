"""A growing file of lines, read from where the last reading stopped."""

from __future__ import annotations

from pathlib import Path

from fedpsa_strategy.files import open_regular

CHUNK = 4 * 2**20
_REMEMBERED = 64


class Tail:
    """Gives the lines that a file gained, and notices when it is another file than before.

    Parameters
    ----------
    path : Path
        The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.restarts = 0
        self._last = b""  # the bytes before the offset

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether the file started over, and its next complete lines (at most 4 MiB).

        Raises
        ------
        OSError
            If the file exists but cannot be read.
        """
        restarted = False
        try:
            with open_regular(self.path) as file:
                # Truncated, replaced or rewritten: in every case these bytes are other ones.
                file.seek(self.offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    restarted = self._restart()
                    file.seek(0)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return self.offset > 0 and self._restart(), []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == CHUNK:
            end = CHUNK  # a line of this length is garbage: hand it out, it will count as damaged
        self.offset += end
        self._last = (self._last + data[:end])[-_REMEMBERED:]
        return restarted, data[:end].splitlines()

    def _restart(self) -> bool:
        self.offset = 0
        self.restarts += 1
        self._last = b""
        return True
