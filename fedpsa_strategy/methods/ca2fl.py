"""CA2FL: cached update calibration.

The server remembers the last update h_i of every client (0 for those never seen), with
h = (1/N) Σ_i h_i over all N clients. On an upload from i:

    r += Δ_i - h_i,    h_i <- Δ_i,

and at K uploads

    v = h_before + r / K,    x <- x + η v,    h <- (1/N) Σ_i h_i,    r <- 0,

where h_before is h from before this buffer. No staleness factor. A client that uploads twice
within one buffer has its second residual taken against its refreshed h_i. Source: Wang et al.,
Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration,
ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.base import Rule, Update, Vector, blocks


class CA2FLRule(Rule):
    """The server's half of CA2FL (formula: see the module).

    Parameters
    ----------
    num_clients : int
        N; raised by itself if more clients turn up.
    buffer_size : int (default: 5)
        K: uploads per version.
    server_lr : float (default: 1.0)
        η.
    memory : MutableMapping[int, Vector] (default: None)
        Where the h_i live; None is a dict in memory. `fedpsa_strategy.methods.mapped_memory`
        has one on disk.
    """

    def __init__(
        self,
        num_clients: int,
        buffer_size: int = 5,
        server_lr: float = 1.0,
        memory: MutableMapping[int, Vector] | None = None,
    ) -> None:
        check_range("num_clients", num_clients, least=1)
        check_range("buffer_size", buffer_size, least=1)
        check_range("server_lr", server_lr, above=0)
        self.num_clients = num_clients
        self.buffer_size = buffer_size
        self.server_lr = server_lr
        self.memory: MutableMapping[int, Vector] = {} if memory is None else memory

    def start(self, model: Vector) -> None:
        """Begin from `model` with nothing remembered."""
        super().start(model)
        self.memory.clear()
        self.total = np.zeros(model.shape, np.float64)  # Σ h_i, in double against drift
        self.mean_before = np.zeros_like(model)  # h
        self.residual = np.zeros_like(model)  # r
        self.buffered = 0

    def add(self, update: Update) -> Vector | None:
        """Calibrate the update by what the client sent last; aggregate when the buffer is full."""
        self.num_clients = max(self.num_clients, update.client + 1)
        last = self.memory.get(update.client)
        for part in blocks(len(self.model)):
            change = update.delta[part]
            if last is not None:
                change = change - last[part]
            self.residual[part] += change
            self.total[part] += change
        self.memory[update.client] = update.delta
        self.buffered += 1
        if self.buffered < self.buffer_size:
            return None

        number = self.model.dtype.type
        model, mean = np.empty_like(self.model), np.empty_like(self.model)
        for part in blocks(len(model)):
            direction = self.mean_before[part] + self.residual[part] / number(self.buffer_size)
            model[part] = self.model[part] + number(self.server_lr) * direction
            mean[part] = self.total[part] / self.num_clients
        self.model, self.mean_before = model, mean
        self.residual[:] = 0
        self.buffered = 0
        self.state_weights = [1 / self.buffer_size] * self.buffer_size
        weights = [self.server_lr / self.buffer_size] * self.buffer_size
        self.version_report = {"weights": weights, "effective_number": float(self.buffer_size)}
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return the model, the memory of all clients and the buffer."""
        clients = sorted(self.memory)
        return {
            "model": self.model,
            "num_clients": self.num_clients,
            "clients": clients,
            "updates": [np.asarray(self.memory[client]) for client in clients],
            "total": self.total,
            "mean_before": self.mean_before,
            "residual": self.residual,
            "buffered": self.buffered,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.start(state["model"])
        self.num_clients = state["num_clients"]
        for client, update in zip(state["clients"], state["updates"], strict=True):
            self.memory[client] = update
        self.total = state["total"].copy()
        self.mean_before = state["mean_before"]
        self.residual = state["residual"].copy()
        self.buffered = state["buffered"]
