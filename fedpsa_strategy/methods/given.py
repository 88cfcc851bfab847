"""What a rule is given: by the run as a whole, and with every upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from fedpsa_strategy.methods.vectors import Vector


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
    response_time : float (default: 0.0)
        From sending the task to its effect, in units of the clock.
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
    response_time: float = 0.0


@dataclass(frozen=True)
class Given:
    """What a run gives to a rule beside the method's settings.

    Parameters
    ----------
    num_clients : int (default: 1)
        N: all clients, also those never seen.
    sketch : Callable[[Vector], Sequence[float]] (default: None)
        The sketch of a global model, for methods that need one.
    """

    num_clients: int = 1
    sketch: Callable[[Vector], Sequence[float] | NDArray[Any]] | None = None
