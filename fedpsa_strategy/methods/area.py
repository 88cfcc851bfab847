"""AREA: the model is the mean of the last models of all clients.

The server keeps for every client the model y_i with which it last ended (the first global model
for those never seen). At K uploads from clients that ended in y'_i = x_start + Δ_i,

    x <- x + (1/N) Σ (y'_i - y_i),    y_i <- y'_i,

so that x is always (1/N) Σ y_i: an exact average, however often each client reports. In the paper
every client keeps its own y_i and sends the difference. Here the server keeps them, N·d, so that a
client's task remains a function of its message and its data, and a resumed run ends in the same
bits; the model is the same. Source: Iakovidou, Kim, Asynchronous Federated Stochastic Optimization
for Heterogeneous Objectives Under Arbitrary Delays, 2024 (arXiv 2405.10123), and the first author's
own simulator (chariako/asynchronous_federated_learning_simulation). The port in APPFL/APPFL keeps
the model that the client was given in the place of the one with which it ended, so that x is not a
mean of clients' models.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import Buffered, Row, Update, Vector, elementwise
from fedpsa_strategy.methods.remembering import Remembering, RememberingRule


class AREARule(RememberingRule):
    """The server's half of AREA (formula: see the module).

    What is remembered is y_i minus the first global model.
    """

    settings: AREAMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with nothing remembered."""
        super().start(model)
        self.first = model.copy()
        self.buffered = 0

    def add(self, update: Update) -> Vector | None:
        """Put the client's new model in the place of its old one; renew the mean every K."""
        moved = elementwise(
            lambda delta, start, first: (start - first) + delta,
            *(update.delta, update.start, self.first),
        )
        self.remember(update.client, moved)
        self.buffered += 1
        size = self.settings.buffer_size
        if self.buffered < size:
            return None
        number = self.known_clients
        self.model = elementwise(
            lambda first, total: first + total / number, self.first, self.total
        )
        self.buffered = 0
        weights = [1 / max(number, size)] * size
        self.state_weights = weights
        self.version_report = {"weights": weights, "effective_number": float(size)}
        return self.model


@dataclass(frozen=True)
class AREAMethod(Remembering, Buffered):
    """The model is the mean of the last models of all clients."""

    name = "area"
    label = "AREA"
    colour = "#607d3b"
    rule = AREARule
    table = Row(
        aggregated="the last models of all clients",
        when="every K uploads",
        weight="1/N",
        memory="(N + 3)·d, N·d of it optionally in half precision or a memory-mapped file; in the"
        " paper the clients have it",
    )
