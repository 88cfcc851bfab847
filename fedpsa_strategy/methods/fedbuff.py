"""FedBuff: buffered aggregation, damped by staleness.

At K buffered uploads, with τ_i the number of versions since client i was given its model,

    x <- x + η_g · (1/K) Σ_i s(τ_i) Δ_i,      s(τ) = (1 + τ)^-a,

a = ½ by default (the original 1/√(1+τ)), a = 0 for no damping: the uniform buffer. The weights are
not normalised. Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation,
AISTATS 2022; without its differential privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedpsa_strategy.checks import check_range
from fedpsa_strategy.methods.base import (
    Rule,
    Update,
    Vector,
    effective_number,
    normalised,
    weighted_step,
)


class FedBuffRule(Rule):
    """The server's half of FedBuff (formula: see the module).

    Parameters
    ----------
    buffer_size : int (default: 5)
        K: uploads per version.
    server_lr : float (default: 1.0)
        η_g.
    staleness_exponent : float (default: 0.5)
        a; 0 weighs all uploads the same.
    """

    def __init__(
        self, buffer_size: int = 5, server_lr: float = 1.0, staleness_exponent: float = 0.5
    ) -> None:
        check_range("buffer_size", buffer_size, least=1)
        check_range("server_lr", server_lr, above=0)
        check_range("staleness_exponent", staleness_exponent, least=0)
        self.buffer_size = buffer_size
        self.server_lr = server_lr
        self.staleness_exponent = staleness_exponent

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer."""
        super().start(model)
        self.buffer: list[tuple[Vector, float]] = []

    def add(self, update: Update) -> Vector | None:
        """Buffer the update; aggregate when the buffer is full."""
        factor = (1 + update.staleness) ** -self.staleness_exponent
        self.buffer.append((update.delta, factor))
        self.report = {"staleness_factor": factor}
        if len(self.buffer) < self.buffer_size:
            return None

        deltas, factors = zip(*self.buffer, strict=True)
        weights = [self.server_lr * factor / self.buffer_size for factor in factors]
        self.model = weighted_step(self.model, weights, deltas)
        self.state_weights = normalised(weights)
        self.buffer.clear()
        self.version_report = {
            "weights": weights,
            "effective_number": effective_number(weights),
        }
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return the model and the buffer."""
        return {
            "model": self.model,
            "deltas": [delta for delta, _ in self.buffer],
            "factors": [factor for _, factor in self.buffer],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.start(state["model"])
        self.buffer = list(zip(state["deltas"], state["factors"], strict=True))
