"""Vectors by client in a memory-mapped file, for methods that remember every client."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpsa_strategy.methods.base import Vector


class MappedMemory(MutableMapping[int, Vector]):
    """A mapping from client to vector, in a memory-mapped file instead of memory.

    The file, which is overwritten if it exists, grows with the largest client index; on most file
    systems clients never seen cost nothing. All vectors have the same size and dtype.
    """

    def __init__(self, path: Path, size: int, dtype: Any = np.float32) -> None:
        self._path = path
        self._size = size
        self._dtype = np.dtype(dtype)
        self._known: set[int] = set()
        self._rows: Any = None
        self._path.write_bytes(b"")

    def __getitem__(self, client: int) -> Vector:
        if client not in self._known:
            raise KeyError(client)
        row: Vector = self._rows[client]
        return row

    def __setitem__(self, client: int, vector: Vector) -> None:
        if self._rows is None or client >= len(self._rows):
            rows = max(2 * (0 if self._rows is None else len(self._rows)), client + 1, 16)
            with self._path.open("r+b") as file:
                file.truncate(rows * self._size * self._dtype.itemsize)
            self._rows = np.memmap(
                self._path, dtype=self._dtype, mode="r+", shape=(rows, self._size)
            )
        self._rows[client] = vector
        self._known.add(client)

    def __delitem__(self, client: int) -> None:
        self._known.remove(client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._known))

    def __len__(self) -> int:
        return len(self._known)
