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

from dataclasses import dataclass

import numpy as np

from fedpsa_strategy.methods.base import Buffered, Row, Update, Vector, elementwise, setting
from fedpsa_strategy.methods.remembering import Remembering, RememberingRule


class CA2FLRule(RememberingRule):
    """The server's half of CA2FL (formula: see the module)."""

    settings: CA2FLMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with nothing remembered."""
        super().start(model)
        self.mean_before = np.zeros_like(model)  # h
        self.residual = np.zeros_like(model)  # r
        self.buffered = 0

    def add(self, update: Update) -> Vector | None:
        """Calibrate the update by what the client sent last; aggregate when the buffer is full."""
        change = self.remember(update.client, update.delta)
        self.residual += change
        self.buffered += 1
        size = self.settings.buffer_size
        if self.buffered < size:
            return None

        number = self.model.dtype.type
        rate, length = number(self.settings.server_lr), number(size)
        self.model = elementwise(
            lambda x, h, r: x + rate * (h + r / length),
            *(self.model, self.mean_before, self.residual),
        )
        self.mean_before = self.mean_of_memory(self.known_clients)
        self.residual[:] = 0
        self.buffered = 0
        self.state_weights = [1 / size] * size
        weights = [self.settings.server_lr / size] * size
        self.version_report = {"weights": weights, "effective_number": float(size)}
        return self.model


@dataclass(frozen=True)
class CA2FLMethod(Remembering, Buffered):
    """Buffer of updates, corrected by the last update that the server remembers of every client."""

    name = "ca2fl"
    label = "CA2FL"
    colour = "#139a74"
    rule = CA2FLRule
    table = Row(
        aggregated="updates, calibrated by each client's last one",
        when="every K uploads",
        weight="η/K on the residual, plus the mean of all remembered updates",
        memory="(N + 4)·d, N·d of it optionally in half precision or a memory-mapped file",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
