"""FedAvg: synchronous rounds, averaged by the amount of data.

With all clients of a round starting from the same x and ending in y_i = x + Δ_i on n_i samples,

    x <- Σ_i n_i y_i / Σ_i n_i  =  x + Σ_i (n_i / Σ_j n_j) Δ_i.

A round lasts as long as its slowest client. Source: McMahan et al., Communication-Efficient
Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedpsa_strategy.methods.base import Rule, Update, Vector, effective_number, weighted_step


class FedAvgRule(Rule):
    """The server's half of FedAvg (formula: see the module)."""

    synchronous: ClassVar[bool] = True

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty round."""
        super().start(model)
        self.round: list[tuple[Vector, float]] = []

    def add(self, update: Update) -> Vector | None:
        """Collect the update until the round ends."""
        self.round.append((update.delta, update.num_examples))
        return None

    def finish_round(self) -> Vector | None:
        """Average the round's models."""
        if not self.round:
            return None
        deltas, sizes = zip(*self.round, strict=True)
        total = sum(sizes)
        weights = [size / total for size in sizes]
        self.model = weighted_step(self.model, weights, deltas)
        self.state_weights = weights
        self.round.clear()
        self.version_report = {
            "weights": weights,
            "effective_number": effective_number(weights),
        }
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return the model and the round so far."""
        return {
            "model": self.model,
            "deltas": [delta for delta, _ in self.round],
            "sizes": [size for _, size in self.round],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.start(state["model"])
        self.round = list(zip(state["deltas"], state["sizes"], strict=True))
