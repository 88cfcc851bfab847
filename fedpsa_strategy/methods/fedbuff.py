"""FedBuff: buffered aggregation, damped by staleness.

At K buffered uploads, with τ_i the number of versions since client i was given its model,

    x <- x + η_g · (1/K) Σ_i s(τ_i) Δ_i,      s(τ) = (1 + τ)^-a,

a = ½ by default (the original 1/√(1+τ)), a = 0 for no damping: the uniform buffer. The weights are
not normalised. Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation,
AISTATS 2022; without its differential privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpsa_strategy.methods.base import (
    Buffered,
    Row,
    Rule,
    Update,
    Variant,
    Vector,
    normalised,
    setting,
)


class FedBuffRule(Rule):
    """The server's half of FedBuff (formula: see the module)."""

    settings: FedBuffMethod

    def start(self, model: Vector) -> None:
        """Begin from `model` with an empty buffer."""
        super().start(model)
        self.buffer: list[tuple[Vector, float]] = []

    def add(self, update: Update) -> Vector | None:
        """Buffer the update; aggregate when the buffer is full."""
        size = self.settings.buffer_size
        factor = (1 + update.staleness) ** -self.settings.staleness_exponent
        self.buffer.append((update.delta, factor))
        self.report = {"staleness_factor": factor}
        if len(self.buffer) < size:
            return None

        deltas, factors = zip(*self.buffer, strict=True)
        weights = [self.settings.server_lr * factor / size for factor in factors]
        self.state_weights = normalised(weights)
        self.buffer.clear()
        return self.take_step(weights, deltas)


@dataclass(frozen=True)
class FedBuffMethod(Buffered):
    """Buffer of updates, weighted down by staleness."""

    name = "fedbuff"
    label = "FedBuff"
    colour = "#2f7fc1"
    rule = FedBuffRule
    variants = (Variant("Uniform", "#808890", {"staleness-exponent": 0.0}),)
    table = Row(
        aggregated="updates Δ",
        when="every K uploads",
        weight="η/K · (1+τ)^-½, not normalised",
        memory="K·d",
    )

    server_lr: float = setting(1.0, "η: factor of the aggregated step", above=0)
    staleness_exponent: float = setting(
        0.5, "a in the staleness factor (1+τ)^-a; 0 is the uniform buffer", least=0
    )

    @property
    def largest_weight(self) -> float:
        """The weight of a fresh update; stale ones have less."""
        return self.server_lr / self.buffer_size
