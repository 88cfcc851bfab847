"""Methods that remember the last update of every client: where it is kept, and its mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedpsa_strategy.methods.base import Given, Method, Rule, Vector, elementwise, setting


class HalfMemory(MutableMapping[int, Vector]):
    """A mapping from client to vector that takes two bytes a number.

    Each vector has a power of two of its own as its scale, so that neither large nor small ones
    leave the range of float16; a vector comes back rounded to 11 bits. What came back once comes
    back unchanged when it is stored again.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, NDArray[np.float16], np.dtype[Any]]] = {}

    def __getitem__(self, client: int) -> Vector:
        exponent, row, dtype = self._rows[client]
        vector: Vector = np.ldexp(row.astype(dtype), exponent)
        return vector

    def __setitem__(self, client: int, vector: Vector) -> None:
        mantissa, exponent = math.frexp(float(np.abs(vector).max(initial=0.0)))
        exponent += float(np.float16(mantissa)) == 1.0  # rounded up to the next power of two
        row = np.ldexp(vector, -exponent).astype(np.float16)
        self._rows[client] = (exponent, row, vector.dtype)

    def __delitem__(self, client: int) -> None:
        del self._rows[client]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._rows))

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True)
class Remembering(Method):
    """A method that remembers every client: where."""

    remembers_clients: ClassVar[bool] = True

    memory: str = setting(
        "ram",
        "where the clients' last updates are kept: in memory, there in half precision, or in a "
        "file of run-dir",
        choices=("ram", "half", "file"),
    )


class RememberingRule(Rule):
    """A rule that remembers the last update h_i of every client.

    Attributes
    ----------
    memory : MutableMapping[int, Vector]
        h_i by client: as `memory` of the settings says, unless somebody puts another mapping in its
        place.
    known_clients : int
        N; raised by itself if more clients turn up than the run was told of.
    total : NDArray[np.float64]
        Σ h_i, in double against drift.
    """

    settings: Any

    def __init__(self, settings: Any, given: Given | None = None) -> None:
        super().__init__(settings, given)
        self.memory: MutableMapping[int, Vector] = HalfMemory() if settings.memory == "half" else {}

    def start(self, model: Vector) -> None:
        """Begin from `model` with nothing remembered."""
        super().start(model)
        self.known_clients = self.given.num_clients
        self.memory.clear()
        self.total = np.zeros(model.shape, np.float64)

    def remember(self, client: int, delta: Vector) -> Vector:
        """Put Δ_i in the place of h_i; return Δ_i - h_i, which is Δ_i for a client never seen."""
        self.known_clients = max(self.known_clients, client + 1)
        last = self.memory.get(client)
        change = delta if last is None else delta - last
        self.memory[client] = delta
        self.total += change
        if isinstance(self.memory, HalfMemory):
            self.total += self.memory[client] - delta  # what rounding took
        return change

    def forget(self, client: int) -> None:
        """Take h_i out of the memory and its sum."""
        self.total -= self.memory.pop(client)

    def mean_of_memory(self, number: int) -> Vector:
        """Return Σ h_i / number as a vector like the model."""
        return elementwise(lambda _, total: total / number, self.model, self.total)
