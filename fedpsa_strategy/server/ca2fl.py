"""CA2FL as a Flower strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from fedpsa_strategy.methods.ca2fl import CA2FLRule
from fedpsa_strategy.methods.mapped_memory import MappedMemory
from fedpsa_strategy.server.strategy import AsyncStrategy


class CA2FL(AsyncStrategy):
    """Buffered aggregation, calibrated by every client's last update.

    The rule is in `fedpsa_strategy.methods.ca2fl`. The server remembers one update per client.

    Parameters
    ----------
    num_clients : int
        N: all clients, also those never seen.
    buffer_size : int (default: 5)
        K: uploads per version.
    server_lr : float (default: 1.0)
        η: factor of the aggregated step.
    memory_path : str | Path (default: None)
        A file for the clients' updates, which is memory-mapped; None keeps them in memory.
    **kwargs : Any
        See `AsyncStrategy`.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        buffer_size: int = 5,
        server_lr: float = 1.0,
        memory_path: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        self._ca2fl = CA2FLRule(num_clients, buffer_size, server_lr)
        self.memory_path = None if memory_path is None else Path(memory_path)
        super().__init__(rule=self._ca2fl, num_clients=num_clients, **kwargs)

    def begin(self, arrays: ArrayRecord, node_ids: Iterable[int] = ()) -> None:
        """Set up a new run, with its memory on disk if that is wanted."""
        super().begin(arrays, node_ids)
        if self.memory_path is not None:
            layout = self.state.layout
            self._ca2fl.memory = MappedMemory(self.memory_path, layout.size, layout.dtype)
