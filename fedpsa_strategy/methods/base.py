"""What an aggregation rule is: a pure object over NumPy vectors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating[Any]]

# What several operations in a row touch has to stay in the processor's cache, and temporary arrays
# below the size from which on the system is asked for new memory each time.
_BLOCK = 2**14


@dataclass(frozen=True)
class Update:
    """One accepted upload.

    Parameters
    ----------
    client : int
        Index of the client, the same for all uploads of one node.
    delta : Vector
        Δ = w' - w: what local training changed of the trainable parameters.
    squared_norm : float
        ||Δ||².
    num_examples : float
        Size of the client's local data.
    version : int
        Version of the global model the client started from.
    staleness : int
        τ: how many versions newer the global model is now.
    start : Vector
        w, the model the client started from.
    metrics : Mapping[str, Any] (default: {})
        What else the client reported; FedPSA reads `sketch` here.
    extra : Mapping[str, NDArray] (default: {})
        Further arrays the client sent; FedPAC reads its statistics here.
    """

    client: int
    delta: Vector
    squared_norm: float
    num_examples: float
    version: int
    staleness: int
    start: Vector
    metrics: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class Rule(ABC):
    """Turns a stream of updates into a sequence of global models.

    A rule knows nothing of Flower, torch, clocks, files or logging. It never writes into a vector
    it was given, nor into one it has handed out: older versions may still be in use. Its vectors
    are the trainable parameters; of the other arrays (BatchNorm's statistics) it only says whose
    values a new version takes, and how much of each.

    Attributes
    ----------
    synchronous : bool
        Whether the rule works in rounds: clients are sampled together, and `finish_round` makes the
        new model when the last of them has answered.
    model : Vector
        The current global model w.
    report : dict[str, Any]
        What the last call of `add` computed about that upload, for the events.
    version_report : dict[str, Any]
        What the last aggregation computed about the version it made.
    state_weights : Sequence[float]
        Convex weights with which the newest version takes the states of the last uploads; what is
        missing to a sum of 1 is the weight of the version before.
    uploads_kept : int
        How many of the last uploads may get such a weight again in a later version.
    """

    synchronous: ClassVar[bool] = False
    state_weights: Sequence[float] = ()
    uploads_kept: int = 0
    model: Vector
    report: dict[str, Any]
    version_report: dict[str, Any]

    def start(self, model: Vector) -> None:
        """Begin from `model`, with everything else in its initial state."""
        self.model = model
        self.report = {}
        self.version_report = {}

    @abstractmethod
    def add(self, update: Update) -> Vector | None:
        """Take one update; return the new global model if this one makes a version."""

    def finish_round(self) -> Vector | None:
        """Return the new global model of a round, or None if nobody delivered."""
        raise NotImplementedError("only synchronous rules have rounds")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all of the state: numbers, None, arrays, and lists and dicts of them."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def blocks(size: int) -> Iterator[slice]:
    """Yield parts of a vector, small enough that work on a part needs the main memory only once.

    For element-wise work alone, whose bits do not depend on how it is divided.
    """
    for start in range(0, size, _BLOCK):
        yield slice(start, start + _BLOCK)


def weighted_step(model: Vector, weights: Sequence[float], deltas: Sequence[Vector]) -> Vector:
    """Return model + Σ weight_i Δ_i, summed in the given order.

    Element-wise operations alone, so that the result has the same bits on any number of threads.
    """
    if len(weights) != len(deltas):
        raise ValueError(f"{len(weights)} weights for {len(deltas)} updates")
    new = np.empty_like(model)
    factors = [model.dtype.type(weight) for weight in weights]
    scaled = np.empty_like(model[:_BLOCK])
    for part in blocks(len(model)):
        total = new[part]
        total[:] = model[part]
        for factor, delta in zip(factors, deltas, strict=True):
            total += np.multiply(delta[part], factor, out=scaled[: len(total)])
    return new


def normalised(weights: Sequence[float]) -> list[float]:
    """Return non-negative weights, scaled to a sum of 1."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def effective_number(weights: Sequence[float]) -> float:
    """Return (Σw)² / Σw²: how many equally weighted updates these weights amount to."""
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / squares if squares > 0 else 0.0
