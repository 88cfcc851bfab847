"""FedAvg: synchronous rounds, averaged by the amount of data.

With all clients of a round starting from the same x and ending in y_i = x + Δ_i on n_i samples,

    x <- Σ_i n_i y_i / Σ_i n_i  =  x + Σ_i (n_i / Σ_j n_j) Δ_i.

A round lasts as long as its slowest client. Source: McMahan et al., Communication-Efficient
Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import Method, Row, Rule, Update, Vector


class FedAvgRule(Rule):
    """The server's half of FedAvg (formula: see the module)."""

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
        self.state_weights = weights = [size / total for size in sizes]
        self.round.clear()
        return self.take_step(weights, deltas)


@dataclass(frozen=True)
class FedAvgMethod(Method):
    """Synchronous: a round waits for all of its clients."""

    name = "fedavg"
    label = "FedAvg"
    colour = "#49a9d8"
    rule = FedAvgRule
    rounds = True
    table = Row(
        aggregated="client models",
        when="when the whole round has answered",
        weight="n / Σn",
        memory="m·d for a round of m",
    )
