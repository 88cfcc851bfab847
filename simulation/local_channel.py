"""How the local grid and its workers talk: lists of byte strings through a socket.

A list is sent by one system call and nearly always received by one. Every call lets go of Python's
lock, and a thread of a busy process may wait for milliseconds until it gets it back.
"""

from __future__ import annotations

import io
import select
import socket
import struct
from collections.abc import Sequence

_BUFFER = 256 * 2**10  # bytes received by one call; longer strings are put together elsewhere
_MOST_PARTS = 512  # of what one system call sends; systems have limits


class Channel:
    """One end of the socket.

    Parameters
    ----------
    end : socket.socket
        A connected stream socket; closed with the channel.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._arrivals = select.poll()
        self._arrivals.register(end, select.POLLIN)
        # What was received and not asked for yet: the bytes from `_start` to `_stop`.
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._stop = 0

    @property
    def has_arrived(self) -> bool:
        """Whether (the beginning of) a list is here, or the other end is closed."""
        return self._start < self._stop or bool(self._arrivals.poll(0))

    def send(self, strings: Sequence[bytes]) -> None:
        """Send a list."""
        header = struct.pack(f"!I{len(strings)}Q", len(strings), *map(len, strings))
        rest = [memoryview(part) for part in (header, *strings)]
        while rest:
            sent = self._socket.sendmsg(rest[:_MOST_PARTS])
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]

    def receive(self) -> list[bytes]:
        """Wait for a list; raises EOFError when the other end is closed."""
        (count,) = struct.unpack("!I", self._read(4))
        lengths = struct.unpack(f"!{count}Q", self._read(8 * count))
        return [self._read(length) for length in lengths]

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, length: int) -> bytes:
        if length > _BUFFER:
            return self._read_long(length)
        while self._stop - self._start < length:
            if self._start + length > _BUFFER:  # make room
                rest = bytes(self._buffer[self._start : self._stop])
                self._buffer[: len(rest)] = rest
                self._start, self._stop = 0, len(rest)
            received = self._socket.recv_into(self._buffer[self._stop :])
            if received == 0:
                raise EOFError("the other end is closed")
            self._stop += received
        start, self._start = self._start, self._start + length
        string = bytes(self._buffer[start : self._start])
        if self._start == self._stop:
            self._start = self._stop = 0
        return string

    def _read_long(self, length: int) -> bytes:
        whole = io.BytesIO()  # gives away what it holds without another copy
        whole.write(self._buffer[self._start : self._stop])
        self._start = self._stop = 0
        while (missing := length - whole.tell()) > 0:
            received = self._socket.recv_into(self._buffer[: min(missing, _BUFFER)])
            if received == 0:
                raise EOFError("the other end is closed")
            whole.write(self._buffer[:received])
        return whole.getvalue()
